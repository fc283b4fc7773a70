"""One measurement of reward consumers: real workers, of which some are killed meanwhile."""

from benchmarks.reward_scaling import PARTS, REPO, measure, worktree

DELAYS_S = [0.02 + 0.01 * (number % 7) for number in range(200)]


def test_workers_that_are_killed_lose_no_sample_and_score_none_twice() -> None:
    measured = measure(REPO, 2, 8, 2, DELAYS_S)
    assert (measured.killed, measured.lost, measured.twice) == (2, 0, 0)
    assert set(measured.cpu_ms) == set(PARTS)
    assert min(measured.cpu_ms.values()) > 0.0
    assert measured.wall_s > sum(DELAYS_S) / 16


def test_another_commit_is_measured_in_a_folder_that_is_gone_afterwards() -> None:
    with worktree("HEAD") as folder:
        assert (folder / "benchmarks" / "reward_side.py").exists()
        assert (folder / "services" / "reward" / "worker.py").exists()
    assert not folder.exists()
