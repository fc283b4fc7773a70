"""Releases side by side in one run, as while its workers are updated one after the other."""

import json
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tests.contract.reward.test_reward_worker import running
from tests.support.training import make_score, messages, outstanding, reading
from tests.support.trajectories import make_config, make_trajectory
from tests.support.waiting import wait_until
from tidemill.common.errors import ConfigError
from tidemill.common.process.activity import Activity
from tidemill.common.process.service import ServiceContext
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import read_config
from tidemill.common.wire import codec
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import DeadLetter, Message, Score
from tidemill.services.reward.worker import serve
from tidemill.services.trainer.batch.stream_join import StreamJoin


async def write_as(release: bytes, broker: Broker, key: str, message: Message) -> None:
    """Append a message as another release would: with its schema, and with a field that we do not know."""
    tree = msgpack.unpackb(codec.encode_payload(message)) | {"colour": "blue"}
    await broker.execute("XADD", key, "*", "v", release, "p", msgpack.packb(tree))


async def test_a_reward_worker_scores_what_a_newer_minor_release_wrote_and_buries_a_newer_major(
    broker: Broker, keys: Keys
) -> None:
    await write_as(b"1.9", broker, keys.trajectories(), make_trajectory(0))
    await write_as(b"2.0", broker, keys.trajectories(), make_trajectory(1))
    config = make_config(reward={"function": "gsm8k"})
    context = ServiceContext("reward", "w1", keys, config, broker, Path(), Activity("reward"))
    async with running(serve(context), context):
        (score,) = await wait_until(lambda: messages(broker, keys.scores(), Score))
        (letter,) = await wait_until(lambda: messages(broker, keys.dead, DeadLetter))
    assert (score.key, score.value) == ((0, 0), 1.0)
    assert "schema 2.0" in letter.error and "update the older side" in letter.error


async def test_the_trainer_takes_what_newer_minor_releases_of_its_workers_wrote(
    broker: Broker, keys: Keys
) -> None:
    join = StreamJoin(broker, keys)
    join.expect(outstanding(0, group_size=1))
    await write_as(b"1.9", broker, keys.trajectories(), make_trajectory(0, group_size=1))
    await write_as(b"1.9", broker, keys.scores(), make_score(0, 0))
    async with reading(join):
        await wait_until(lambda: join.complete == [0])


async def test_a_worker_refuses_the_config_of_a_newer_release_and_says_which_field(
    broker: Broker, keys: Keys
) -> None:
    """So workers are updated before the trainer, which publishes the config."""
    tree: dict[str, Any] = make_config().model_dump(mode="json")
    tree["trainer"]["shiny"] = 1
    await broker.execute("SET", keys.config, json.dumps(tree))
    with pytest.raises(ConfigError, match=r"trainer\.shiny: no such field") as caught:
        await read_config(broker, keys)
    assert caught.value.exit_code == 2
