import unittest

from stats import mean, median


class StatsTest(unittest.TestCase):
    def test_a_mean_may_be_a_fraction(self):
        self.assertEqual(mean([1, 2]), 1.5)

    def test_the_median_is_of_sorted_values(self):
        self.assertEqual(median([9, 1, 5]), 5)

    def test_the_median_of_an_even_number_of_values(self):
        self.assertEqual(median([4, 1, 3, 2]), 2.5)
