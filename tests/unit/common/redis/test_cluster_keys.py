"""Where a cluster's keys are, and how RQ's keys come to the slot of their run."""

import pytest
from redis import exceptions as redis_errors

from tidemill.common.redis.cluster import Nodes, _as_tagged, _key_of, _Packer
from tidemill.common.wire.keys import RQ_STATES, Keys


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
    nodes, reply = Nodes([("seed", 7)]), [[0, 99, [b"a", 1], [b"b", 2]], [100, 16383, [b"", 3]]]
    found = [nodes.owner(slot, reply, ("asked", 9)) for slot in (0, 99, 100, 16383)]
    assert found == [("a", 1)] * 2 + [("asked", 3)] * 2
    assert nodes.addresses == [("a", 1), ("asked", 3), ("seed", 7)]
    with pytest.raises(redis_errors.ClusterDownError):
        nodes.owner(5, reply[1:], ("asked", 9))
