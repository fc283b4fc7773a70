"""The trainer's own Redis user may rid the streams of what others have written into them."""

from pathlib import Path

import pytest

from tests.integration.pipeline.test_redis_users import (
    PASSWORDS,
    client_of,
    pytestmark,
    refusals,
    with_user,
)
from tests.support.servers import RedisServer, users_file
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import START, last_id
from tidemill.common.wire.keys import ROLLOUT_GROUP, Keys
from tidemill.common.wire.messages import Commit, Message, Ticket, WeightManifest
from tidemill.services.trainer.batch.unexpected_entries import remove_unexpected

__all__ = ["pytestmark"]


async def test_the_trainer_may_move_strays_aside(
    tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RedisServer(tmp_path / "redis", "--aclfile", str(users_file(tmp_path, PASSWORDS))) as server:
        admin = client_of(server, "admin")
        streams: dict[str, type[Message]] = {
            keys.prompts(): Ticket,
            keys.weights: WeightManifest,
            keys.commits: Commit,
        }
        with_user(monkeypatch, "trainer")
        broker = await Broker.connect(server.url)
        try:
            for key, kind in streams.items():
                admin.xgroup_create(key, ROLLOUT_GROUP, mkstream=True)
                admin.xadd(key, {"by": "hand"})
                admin.xreadgroup(ROLLOUT_GROUP, "w", {key: ">"})
                assert await remove_unexpected(broker, keys, key, kind) == 1
                assert await last_id(broker, key) == START
        finally:
            await broker.close()
        assert refusals(admin) == []
        assert admin.xlen(keys.dead) == len(streams)
