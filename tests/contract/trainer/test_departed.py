"""What killed workers leave in Redis goes; what is held, and whoever is there, stays."""

from tests.support.consumers import make_ticket
from tests.support.training import make_trimmer
from tidemill.common.process.heartbeats import Heartbeat, publish_heartbeat, read_heartbeats
from tidemill.common.streams import append, ensure_group
from tidemill.common.wire.keys import ROLLOUT_GROUP


async def test_the_dead_are_forgotten_after_a_while_with_what_they_hold_kept(make, broker, keys):
    context, prompts = make(), keys.prompts()
    await ensure_group(broker, prompts, ROLLOUT_GROUP)
    await append(broker, prompts, make_ticket(0))
    for name in ("holds-a-ticket", "holds-nothing"):
        await publish_heartbeat(broker, keys, Heartbeat(name, "rollout"))
        await broker.execute("XGROUP", "CREATECONSUMER", prompts, ROLLOUT_GROUP, name)
    read = ("GROUP", ROLLOUT_GROUP, "holds-a-ticket", "COUNT", 1, "STREAMS", prompts, ">")
    await broker.execute("XREADGROUP", *read)
    trimmer = make_trimmer(context)
    assert await trimmer.forget_departed() == 0, "an hour has not passed"
    assert await trimmer.forget_departed(after_s=-1.0) == 0, "it has looked a moment ago"
    assert await make_trimmer(context).forget_departed(after_s=-1.0) == 3
    assert await read_heartbeats(broker, keys) == []
    left = await broker.execute("XINFO", "CONSUMERS", prompts, ROLLOUT_GROUP)
    assert [info[1] for info in left] == [b"holds-a-ticket"]
