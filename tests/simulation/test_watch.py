"""What is looked at as it happens: each check sees its mistake, whether or not a schedule comes to it."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.simulation.watch import Watch
from tests.support.trajectories import make_trajectory


@pytest.fixture
def watch() -> Watch:
    world: Any = SimpleNamespace()
    return Watch(world)


def make_follower(announced: tuple[int, str] | None, version: int, loaded: str) -> Any:
    """A follower that knows of `announced` weights, and whose engine has loaded others as `version`."""
    engine = SimpleNamespace(version=version, digests={version: loaded})
    held = SimpleNamespace(version=announced[0], digest=announced[1]) if announced else None
    return SimpleNamespace(_held=held, engine=engine)


@pytest.mark.parametrize(
    ("announced", "version", "loaded", "is_right"),
    [
        ((2, "a"), 2, "a", True),
        ((2, "b"), 2, "a", False),
        (None, 2, "a", True),
        ((1, "b"), 2, "a", True),
        ((0, "b"), 0, "a", True),
    ],
    ids=[
        "the announced weights",
        "others",
        "none are announced",
        "a load is under way",
        "the starting model",
    ],
)
def test_an_engine_holds_the_weights_that_its_follower_says(watch, announced, version, loaded, is_right):
    watch.holds(make_follower(announced, version, loaded))
    assert (watch.broken == []) is is_right


@pytest.mark.parametrize(
    ("num_running", "num_first", "num_unpublished", "is_right"),
    [(2, 0, 1, True), (2, 0, 0, False), (1, 1, 1, True), (1, 1, 0, False), (1, 1, 2, False)],
)
def test_slots_are_those_of_samples_at_work(watch, num_running, num_first, num_unpublished, is_right):
    lane: Any = SimpleNamespace(
        num_held=3,
        running=[SimpleNamespace(done=lambda: False)] * num_running,
        _first_attempts=dict.fromkeys(range(num_first)),
        _num_unpublished=num_unpublished,
    )
    watch.fetches(lane)
    assert (watch.broken == []) is is_right


@pytest.mark.parametrize(("num_counted", "is_right"), [(0, True), (1, False)])
def test_what_is_read_again_is_not_counted_again(watch, num_counted, is_right):
    join: Any = SimpleNamespace(num_trajectories=5)
    entry: Any = SimpleNamespace(message=make_trajectory(1), entry_id="1-0")
    before = watch.counted(join, entry)
    join.num_trajectories += 1
    watch.takes(join, entry, before)
    before = watch.counted(join, entry)
    join.num_trajectories += num_counted
    watch.takes(join, entry, before)
    assert (watch.broken == []) is is_right
