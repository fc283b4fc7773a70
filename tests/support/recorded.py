"""A run's folder with a recorded history, without having to train: streams in the data of its Redis."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import yaml

from tests.support import preloaded
from tests.support.numbered import append_numbered
from tidemill.common.config import RunConfig
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.embedded import EmbeddedRedis
from tidemill.common.run.state import publish_config
from tidemill.common.streams import append
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Score, Ticket, Trajectory

REPO = Path(__file__).resolve().parent.parent.parent


async def record(
    runs: Path,
    config: RunConfig,
    tickets: Sequence[Ticket],
    trajectories: Sequence[Trajectory],
    scores: Sequence[Score],
) -> Path:
    """Make the folder of a run that has ended, with these messages in its streams."""
    folder = runs / config.run_id
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    keys = Keys(config.run_id)
    server = EmbeddedRedis(folder / "redis")
    server.start()
    try:
        broker = await Broker.connect(server.url)
        await publish_config(broker, keys, config)
        await append_numbered(broker, keys.prompts(), [(ticket.ticket, ticket) for ticket in tickets])
        await append(broker, keys.trajectories(), *trajectories)
        await append(broker, keys.scores(), *scores)
        await broker.close()
    finally:
        server.stop()
    return folder


def tidemill(runs: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the command as a user does."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("TIDEMILL_")}
    env |= {"TIDEMILL_RUNS_DIR": str(runs), "OMP_NUM_THREADS": "1", "COLUMNS": "110"}
    return preloaded.tidemill(*arguments, **env)
