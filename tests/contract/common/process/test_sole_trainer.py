"""One run has one trainer, also where a second one has a folder of its own."""

import asyncio
import json
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.support.waiting import wait_until
from tidemill.common.errors import ConfigError
from tidemill.common.process.heartbeats import GONE_AFTER_S, Heartbeat, check_sole_trainer, publish_heartbeat
from tidemill.common.redis.broker import Broker
from tidemill.common.wire.keys import Keys

OURS = Path("/runs/here")


def beat_of(folder: str, host: str = "") -> Heartbeat:
    beat = Heartbeat("trainer", "trainer", folder=folder)
    beat.host = host or beat.host
    return beat


@pytest.mark.parametrize("other", [beat_of("/runs/elsewhere"), beat_of(str(OURS), host="another")])
async def test_a_trainer_that_goes_on_speaking_elsewhere_is_found(
    broker: Broker, keys: Keys, other: Heartbeat
) -> None:
    await publish_heartbeat(broker, keys, other)
    check = asyncio.create_task(check_sole_trainer(broker, keys, OURS))

    async def speaks_until_found() -> bool:
        await publish_heartbeat(broker, keys, other)
        return check.done()

    await wait_until(speaks_until_found)
    with pytest.raises(ConfigError, match=other.host):
        await check


async def test_nobody_is_waited_for_where_none_has_spoken_or_died_in_the_same_folder(
    broker: Broker, keys: Keys
) -> None:
    await check_sole_trainer(broker, keys, OURS)
    await publish_heartbeat(broker, keys, beat_of(str(OURS)))
    await check_sole_trainer(broker, keys, OURS)


@pytest.mark.parametrize("age_s", [GONE_AFTER_S - 0.5, GONE_AFTER_S + 1.0])
async def test_a_trainer_that_died_elsewhere_is_waited_for_until_it_counts_as_gone(
    broker: Broker, keys: Keys, age_s: float
) -> None:
    dead = beat_of("/runs/elsewhere")
    dead.at = time.time() - age_s
    await broker.execute("HSET", keys.workers("trainer"), dead.name, json.dumps(asdict(dead)))
    await check_sole_trainer(broker, keys, OURS)
