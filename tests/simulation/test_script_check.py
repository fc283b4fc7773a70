"""The checks of single commands see what a script does wrong, whether or not a schedule comes to it."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.simulation.history import History
from tests.simulation.process import Process
from tests.simulation.redis.server import MemoryServer
from tests.simulation.script_check import ScriptCheck
from tests.support.trajectories import make_trajectory
from tidemill.common.redis.broker import _script
from tidemill.common.wire import codec
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Score, ScoreStatus

KEYS = Keys("sim")
STREAM = KEYS.trajectories().encode()
SCORES = KEYS.scores().encode()
PROCESS: Any = SimpleNamespace(name="w")


@pytest.fixture
def server() -> MemoryServer:
    """One entry, which consumer `holder` has."""
    server = MemoryServer(lambda: 1000)
    server.apply([[b"XADD", STREAM, b"1-0", b"a", b"b"]])
    server.apply([[b"XGROUP", b"CREATE", STREAM, b"g", b"0"]])
    server.apply([[b"XREADGROUP", b"GROUP", b"g", b"holder", b"COUNT", b"9", b"STREAMS", STREAM, b">"]])
    return server


def make_check() -> ScriptCheck:
    world: Any = SimpleNamespace(keys=KEYS, history=History(KEYS))
    return ScriptCheck(world, [])


def call(name: str, num_keys: int, *words: bytes) -> list[bytes]:
    return [b"EVALSHA", _script(name)[1].encode(), b"%d" % num_keys, *words]


def claim(server: MemoryServer, consumer: bytes, deliveries: int = 1) -> None:
    count = b"%d" % deliveries
    server.apply(
        [[b"XCLAIM", STREAM, b"g", consumer, b"0", b"1-0", b"RETRYCOUNT", count, b"FORCE", b"JUSTID"]]
    )


@pytest.mark.parametrize(("ticket", "is_right"), [(1, True), (2, False)])
def test_a_score_with_the_acknowledgement_of_another_trajectory(server, ticket, is_right):
    check = make_check()
    record: Any = SimpleNamespace(message=make_trajectory(1), stream="trajectories", entry_id="1-0")
    check.see(record)
    payload = codec.encode_payload(Score(ticket=ticket, index=0, status=ScoreStatus.OK, value=1.0))
    fields = call("complete", 2, STREAM, SCORES, b"g", b"holder", b"1", b"1-0", payload)
    hear = check.arrives(server, PROCESS, fields)
    assert hear is not None
    hear([[1]])
    assert (check.broken == []) is is_right


@pytest.mark.parametrize(("consumer", "is_right"), [(b"holder", True), (b"other", False)])
def test_a_hand_back_of_what_another_one_holds(server, consumer, is_right):
    check = make_check()
    fields = call("hand_back", 1, STREAM, b"g", consumer, b"9", b"1", b"nobody", b"1-0")
    hear = check.arrives(server, PROCESS, fields)
    assert hear is not None
    claim(server, b"nobody")
    hear([1])
    assert (check.broken == []) is is_right


@pytest.mark.parametrize(("consumer", "is_right"), [(b"holder", True), (b"other", False)])
def test_a_start_of_a_group_that_another_one_holds(server, consumer, is_right):
    check = make_check()
    fields = call("start_group", 2, STREAM, b"progress", b"g", consumer, b"1-0", b"1", b"0")
    hear = check.arrives(server, PROCESS, fields)
    assert hear is not None
    hear([1])
    assert (check.broken == []) is is_right


def test_what_a_server_without_that_write_holds_is_not_put_back(server):
    check = make_check()
    fields = call("requeue", 3, b"dead", STREAM, b"progress", b"9-0", b"g", b"1-0", b"9", b"", b"nobody")
    hear = check.arrives(server, PROCESS, fields)
    assert hear is not None
    hear([1])
    num_units = len(server.log)
    check.world.history.forget_after(num_units)
    assert set(check.world.history.put_back) == {"9-0"}
    check.world.history.forget_after(num_units - 1)
    assert not check.world.history.put_back


@pytest.mark.parametrize(("deliveries", "is_right"), [(0, True), (5, False)])
def test_what_is_put_back_with_the_deliveries_that_it_had(server, deliveries, is_right):
    check = make_check()
    fields = call("requeue", 3, b"dead", STREAM, b"progress", b"9-0", b"g", b"1-0", b"9", b"", b"nobody")
    hear = check.arrives(server, PROCESS, fields)
    assert hear is not None
    claim(server, b"nobody", deliveries)
    hear([1])
    assert (check.broken == []) is is_right


@pytest.mark.parametrize(
    ("reply", "is_asked", "is_right"), [(1, False, True), (0, False, False), (0, True, True)]
)
def test_a_trainer_that_leaves_although_the_server_lacks_its_last_commit(server, reply, is_asked, is_right):
    check = make_check()
    trainer = Process("trainer", "trainer", 1, code=0, is_asked_to_leave=is_asked)
    hear = check.arrives(server, trainer, call("finish", 2, b"commits", b"state", b"3-0"))
    assert hear is not None
    hear([reply])
    assert (check.judge() == []) is is_right
