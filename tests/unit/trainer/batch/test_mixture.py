"""The mixture of sources: shares are exact at every ticket, and the order follows from the seed."""

from collections import Counter

import numpy as np
import pytest

from tidemill.common.errors import ConfigError
from tidemill.services.trainer.batch.prompt_plan import Mixture


def sources(mixture: Mixture, count: int) -> list[int]:
    return [mixture.place_at(number)[0] for number in range(count)]


def test_by_hand() -> None:
    """Weights 1/2, 1/3, 1/6. After 6: three, two and one. At n = 1 all may come, due at 2, 3 and 6. At n = 2
    sources 1 and 2 may (source 0 has 1 of 2 * 1/2), due at 3 and 6; at n = 3 only 0 (due 4) and 2; at n = 4
    1 (due 6) and 2 (due 6), a tie; at n = 5 0 (due 6) and who lost the tie (due 6); at n = 6 who is left."""
    for seed in range(8):
        found = sources(Mixture([3, 2, 1], seed), 6)
        assert found[:3] == [0, 1, 0]
        assert sorted(found[3:]) == [0, 1, 2]
        assert found[3] in (1, 2)


@pytest.mark.parametrize("seed", range(5))
def test_after_any_number_of_tickets_each_source_is_within_one_of_its_share(seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = [round(float(weight), 3) + 0.001 for weight in rng.exponential(size=int(rng.integers(2, 9)))]
    chosen = np.array(sources(Mixture(weights, seed), 3000))
    counts = np.cumsum(np.eye(len(weights))[chosen], axis=0)
    shares = np.outer(np.arange(1, 3001), np.array(weights) / np.sum(weights))
    assert np.abs(counts - shares).max() < 1.0 + 1e-6


def test_positions_of_a_source_count_up_without_a_gap() -> None:
    mixture = Mixture([0.7, 0.2, 0.1], 3)
    places = [mixture.place_at(number) for number in range(500)]
    for source in range(3):
        own = [position for one, position in places if one == source]
        assert own == list(range(len(own)))
    assert mixture.counts_at(500) == [350, 100, 50]
    assert mixture.counts_at(0) == [0, 0, 0]


def test_a_place_does_not_depend_on_which_were_asked_before() -> None:
    forward = sources(Mixture([1, 1, 2], 7), 100)
    backward = Mixture([1, 1, 2], 7)
    assert [backward.place_at(number)[0] for number in reversed(range(100))] == forward[::-1]
    assert sources(Mixture([1, 1, 2], 8), 100) != forward


def test_the_order_never_changes_between_releases() -> None:
    order = [0, 1, 0, 2, 0, 1, 0, 1, 2, 0, 0, 1, 0, 2, 0, 1, 0, 2, 1, 0]
    assert sources(Mixture([0.5, 0.3, 0.2], 11), 20) == order


def test_a_source_at_its_limit_leaves_its_place_to_the_others() -> None:
    """One of two rows, twice: four turns of half of the tickets; then the two others share by 3 to 1."""
    mixture = Mixture([4, 3, 1], 0, [4, None, None])
    found = sources(mixture, 40)
    assert Counter(found)[0] == 4
    last = max(number for number, source in enumerate(found) if source == 0)
    assert last < 8
    rest = found[last + 1 :]
    assert all(abs(rest[:n].count(1) - 0.75 * n) < 1 for n in range(1, len(rest)))


def test_when_all_sources_are_at_their_limits_the_message_says_so() -> None:
    mixture = Mixture([1, 1], 0, [2, 3])
    assert Counter(sources(mixture, 5)) == {0: 2, 1: 3}
    with pytest.raises(ConfigError, match="every source has been used for all its epochs, after 5 groups"):
        mixture.place_at(5)
