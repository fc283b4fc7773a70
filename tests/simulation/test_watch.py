"""What is looked at as it happens: each check sees its mistake, whether or not a schedule comes to it."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.simulation.watch import Watch
from tests.support.trajectories import make_trajectory
from tidemill.common.redis.broker import _script
from tidemill.common.streams.entries import Delivery
from tidemill.common.wire import codec
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Score, ScoreStatus

KEYS = Keys("sim")


@pytest.fixture
def watch() -> Watch:
    world: Any = SimpleNamespace(keys=KEYS)
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


@pytest.mark.parametrize(
    ("ticket", "is_lost", "is_right"), [(1, False, True), (2, False, False), (1, True, False)]
)
def test_a_score_goes_out_under_the_id_of_its_own_trajectory(watch, ticket, is_lost, is_right):
    stream = KEYS.trajectories()
    trajectory = make_trajectory(ticket)
    watch.given("w", stream, b"1-0", Delivery("1-0", codec.encode(trajectory), trajectory, 1))
    if is_lost:
        watch.loses("w", stream, "1-0")
    payload = codec.encode_payload(Score(ticket=1, index=0, status=ScoreStatus.OK, value=1.0))
    keys = (stream.encode(), KEYS.scores().encode())
    command = [b"EVALSHA", _script("complete")[1].encode(), b"2", *keys, b"g", b"w", b"1", b"1-0", payload]
    process: Any = SimpleNamespace(name="w")
    watch.sends(process, command)
    assert (watch.broken == []) is is_right
