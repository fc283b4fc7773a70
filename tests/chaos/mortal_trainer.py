"""A trainer process that dies of SIGKILL at a given point, between things that must not be torn apart."""

import asyncio
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.chaos.signals import arrange_signal
from tests.support.training import make_context
from tidemill.common.config import RunConfig
from tidemill.common.redis.broker import Broker
from tidemill.common.wire.keys import Keys
from tidemill.services.trainer import trainer
from tidemill.services.trainer.batch.reconciler import Reconciler
from tidemill.services.trainer.batch.scheduler import Scheduler
from tidemill.services.trainer.durable import checkpoint
from tidemill.services.trainer.durable.checkpoint import CheckpointStore
from tidemill.services.trainer.policy.state import PolicyState
from tidemill.services.trainer.policy.transformers_policy import TransformersPolicy
from tidemill.services.trainer.service import serve
from tidemill.services.trainer.weights import store
from tidemill.services.trainer.weights.shadow import Shadow
from tidemill.services.trainer.weights.shard_writer import ShardWriter
from tidemill.services.trainer.weights.store import WeightStore

POINTS: dict[str, tuple[Any, str, bool]] = {
    "after a micro-batch": (TransformersPolicy, "accumulate", True),
    "before the update": (TransformersPolicy, "update", False),
    "after the update, before its comparison": (TransformersPolicy, "compare_weights", False),
    "between comparison and commit": (trainer, "append_commit", False),
    "between commit and weights": (trainer, "append_commit", True),
    "before a file of the weights": (ShardWriter, "_write", False),
    "with the weights half-written": (Shadow, "write_changes", True),
    "with the weights written, before their name": (store, "publish_folder", False),
    "between weights and announcement": (WeightStore, "finish", True),
    "after the announcement": (Reconciler, "announce", True),
    "with old versions half-removed": (store, "retire_folder", True),
    "before new tickets": (Scheduler, "admit", False),
    "after new tickets": (Scheduler, "admit", True),
    "with a checkpoint's state copied": (TransformersPolicy, "stage_state", True),
    "before a file of the checkpoint": (PolicyState, "write", False),
    "with the checkpoint's tensors written": (PolicyState, "write", True),
    "before the checkpoint gets its name": (checkpoint, "publish_folder", False),
    "after the checkpoint got its name": (checkpoint, "publish_folder", True),
    "with the checkpoint whole, before trimming": (CheckpointStore, "save", True),
}
"""Where a trainer can die: owner and name of a function, and whether it is when that has returned."""


@dataclass(frozen=True)
class Death:
    """At the `count`-th time that the point is reached in this life."""

    point: str
    count: int


def live(url: str, run_id: str, folder: str, config_json: str, death: Death | None) -> None:
    """One life of a trainer process; the target of a forked process."""
    torch.set_num_threads(1)
    WeightStore.max_chain_share = 10.0  # deltas however much has changed
    if death is not None:
        owner, name, is_after = POINTS[death.point]
        arrange_signal(owner, name, is_after, death.count, signal.SIGKILL)
    asyncio.run(_serve(url, Keys(run_id), Path(folder), RunConfig.model_validate_json(config_json)))


async def _serve(url: str, keys: Keys, folder: Path, config: RunConfig) -> None:
    broker = await Broker.connect(url)
    await serve(make_context(broker, keys, config, folder))
    await broker.close()
