"""The benchmark of reward consumers: what its lines and figures are made of."""

import pytest

from benchmarks.reward_scaling import Figures, Measured, ideal_time_s, row_of


@pytest.mark.parametrize(
    ("delays_s", "slots", "ideal_s"),
    [([3.0, 1.0, 1.0, 1.0], 2, 3.0), ([1.0] * 4, 1, 4.0), ([2.0, 2.0, 1.0], 2, 3.0), ([1.0, 5.0], 8, 5.0)],
)
def test_the_ideal_gives_each_free_slot_the_next_sample(delays_s, slots, ideal_s):
    assert ideal_time_s(delays_s, slots) == ideal_s


def test_figures_are_those_of_a_score_by_part_and_of_all():
    tree = {
        "wall_s": 4.0,
        "cpu_s": {"worker": 0.3, "child": 0.2, "redis": 0.1, "benchmark": 0.05},
        "lost": 0,
        "twice": 1,
        "killed": 2,
    }
    measured = Measured.of(tree, 1000)
    assert measured.cpu_ms == pytest.approx({"worker": 0.3, "child": 0.2, "redis": 0.1, "benchmark": 0.05})
    row = row_of("this build", "2 x 64", measured, 3.0, 1000)
    assert row[2:] == ("4.00", "3.00", "250", "0.30", "0.20", "0.10", "0.05", "0.65", "0.750")
    figures = Figures()
    figures.add("2 x 64", measured, 3.0)
    assert (figures.efficiency, figures.cpu_ms) == ({"2 x 64": 0.75}, {"2 x 64": 0.65})
    assert (figures.lost, figures.twice, figures.killed) == (0, 1, 2)


def test_of_several_rounds_times_are_medians_and_losses_are_added_up():
    cpu_ms = [dict.fromkeys(("worker", "child", "redis", "benchmark"), value) for value in (1.0, 3.0, 2.0)]
    rounds = [
        Measured(wall_s, cpu, lost=1, killed=2) for wall_s, cpu in zip((5.0, 9.0, 6.0), cpu_ms, strict=True)
    ]
    measured = Measured.median_of(rounds)
    assert (measured.wall_s, measured.total_ms, measured.lost, measured.killed) == (6.0, 8.0, 3, 6)
