"""Addresses, keys and answers of Redis, as far as they can be judged without one."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from redis import exceptions as redis_errors

from tidemill.common.errors import BrokerError
from tidemill.common.redis import broker as broker_module
from tidemill.common.redis.broker import Broker, redis_url
from tidemill.common.redis.client import make_client
from tidemill.common.redis.cluster import Nodes, _as_tagged, _key_of, _Packer
from tidemill.common.store import ClaimStore
from tidemill.common.wire.keys import RQ_STATES, Keys

OOM = redis_errors.ResponseError("OOM command not allowed when used memory > 'maxmemory'.")


class FailingRedis:
    """Answers with each of some errors, then with OK."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0
        self.disconnects = 0

    def disconnect(self) -> None:
        self.disconnects += 1

    async def execute_command(self, *command: object) -> bytes:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return b"OK"


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(broker_module, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(broker_module, "LONGEST_PAUSE_S", 0.0)


def test_without_an_address_the_variable_is_named(monkeypatch):
    monkeypatch.delenv("TIDEMILL_REDIS_URL", raising=False)
    with pytest.raises(BrokerError, match="TIDEMILL_REDIS_URL is not set") as caught:
        redis_url()
    assert caught.value.exit_code == 2


READ_ONLY = "You can't write against a read only replica."


@pytest.mark.parametrize(
    ("error", "passes", "is_left"),
    [
        (redis_errors.ConnectionError("Connection reset"), True, False),
        (redis_errors.TimeoutError(), True, False),
        (redis_errors.BusyLoadingError("Redis is loading the dataset in memory"), True, False),
        (redis_errors.ResponseError("NOREPLICAS Not enough good replicas to write."), True, False),
        (redis_errors.ResponseError("MISCONF Errors writing to the AOF file"), True, False),
        (redis_errors.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), True, False),
        (OOM, True, False),
        (redis_errors.ExecAbortError(f"Transaction discarded because of: {OOM}"), True, False),
        (ConnectionRefusedError("refused"), True, False),
        (TimeoutError(), True, False),
        (redis_errors.ReadOnlyError(READ_ONLY), True, True),
        (redis_errors.ResponseError(f"READONLY {READ_ONLY} script: 4f2"), True, True),
        (redis_errors.ResponseError("MASTERDOWN Link with MASTER is down"), True, True),
        (redis_errors.ResponseError("UNBLOCKED force unblock from blocking operation"), True, True),
        (redis_errors.AuthenticationError("Authentication required."), False, False),
        (redis_errors.ResponseError("WRONGTYPE Operation against a key"), False, False),
        (redis_errors.DataError("Invalid input"), False, False),
        (ValueError("a mistake in the program"), False, False),
    ],
)
async def test_what_passes_is_waited_out_and_a_server_that_is_the_master_no_more_is_left(
    error, passes, is_left
):
    redis = FailingRedis(error, error, error)
    with nullcontext() if passes else pytest.raises(type(error)):
        assert await Broker(redis).execute("SET", "a", 1) == b"OK"
    assert redis.calls == (4 if passes else 1)
    assert redis.disconnects == 3 * is_left, "or the commands would be sent to the replica for ever"


async def test_a_missing_permission_ends_the_process_in_plain_words():
    redis = FailingRedis(redis_errors.NoPermissionError("this user has no permissions to run 'xtrim'"))
    with pytest.raises(BrokerError, match=r"lacks a permission.*xtrim"):
        await Broker(redis).execute("XTRIM", "a", "MINID", 1)
    assert redis.calls == 1


def opens(store: ClaimStore, *errors: Exception) -> Callable[[], ClaimStore]:
    """Opens the store after it has failed with each of some errors."""
    remaining = list(errors)

    def open_store() -> ClaimStore:
        if remaining:
            raise remaining.pop(0)
        return store

    return open_store


@pytest.mark.parametrize("is_given", [False, True], ids=["opened later", "given later"])
def test_a_store_of_payloads_that_comes_late_reads_choices_too(tmp_path: Path, is_given: bool) -> None:
    broker = Broker(FailingRedis())
    store = ClaimStore(tmp_path)
    broker.read_choices()
    if is_given:
        broker.claims = store
    else:
        broker.open_claims = opens(store)
    assert broker.claims is store and store.reads_choices


def test_a_store_of_payloads_that_could_not_be_opened_is_opened_at_the_next_read(tmp_path: Path) -> None:
    broker = Broker(FailingRedis())
    broker.open_claims = opens(ClaimStore(tmp_path), OSError("Too many open files"))
    broker.read_choices()
    with pytest.raises(OSError, match="Too many open files"):
        _ = broker.claims
    assert not broker.has_opened_claims
    assert broker.claims is not None and broker.claims.reads_choices


async def test_nothing_is_asked_ahead_where_no_connection_is_open_or_no_primary_known():
    command = ("XREADGROUP", "GROUP", "g", "c", "COUNT", 1, "STREAMS", "tidemill:{a}:prompts", ">")
    for url in ("redis://localhost:1", "redis+cluster://localhost:1"):
        assert make_client(url).ask(command) is None


def sent(*command: object) -> list[str]:
    """The words of a packed command."""
    (packed,) = _Packer("arith").pack(*command)
    return packed.decode().split("\r\n")[2::2]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("HSET", "rq:job:a", "k", "rq:job:b"), "HSET rq:{arith}:job:a k rq:job:b"),
        (("SADD", b"rq:queues", "rq:queue:q"), "SADD rq:{arith}:queues rq:queue:q"),
        (
            ("BLMOVE", "rq:queue:q", "rq:queue:q:i", 5, "LEFT", "RIGHT"),
            "BLMOVE rq:{arith}:queue:q rq:{arith}:queue:q:i 5 LEFT RIGHT",
        ),
        (("DEL", "rq:a", "tidemill:{arith}:x", "rq:b"), "DEL rq:{arith}:a tidemill:{arith}:x rq:{arith}:b"),
        (("EVALSHA", "f0", 2, "rq:a", "rq:b", "rq:c"), "EVALSHA f0 2 rq:{arith}:a rq:{arith}:b rq:c"),
        (("PUBLISH", "rq:pubsub:w", "rq:x"), "PUBLISH rq:pubsub:w rq:x"),
        (("SCRIPT LOAD", "return 1"), "SCRIPT LOAD return 1"),
        (("MULTI",), "MULTI"),
    ],
)
def test_keys_of_rq_get_the_tag_of_the_run_and_values_do_not(command, expected):
    assert " ".join(sent(*command)) == expected


def test_a_look_at_a_queue_names_the_key_that_the_queue_has():
    keys = Keys("arith-1")
    key = RQ_STATES["started"].format(keys.sandbox_queue)
    assert list(_as_tagged(("ZCARD", key))) == ["ZCARD", "rq:{arith-1}:wip:tidemill:arith-1:sandbox"]
    assert _key_of(("XREADGROUP", "GROUP", "g", "c", "STREAMS", keys.prompts(), ">")) == keys.prompts()
    assert _key_of(("TIME",)) == ""


def test_every_slot_has_its_primary_or_none():
    nodes = Nodes([("seed", 7)])
    reply = [[0, 99, [b"a", 1], [b"b", 2]], [100, 16383, [b"", 3]]]
    owners = [nodes.owner(slot, reply, ("asked", 9)) for slot in (0, 99, 100, 16383)]
    assert owners == [("a", 1)] * 2 + [("asked", 3)] * 2
    assert nodes.addresses == [("a", 1), ("asked", 3), ("seed", 7)]
    with pytest.raises(redis_errors.ClusterDownError):
        nodes.owner(5, reply[1:], ("asked", 9))
