"""A version that a worker finds damaged is written again, unless the trainer ends."""

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.support.waiting import wait_until
from tidemill.common.process.heartbeats import DAMAGED_VERSION
from tidemill.services.trainer import weight_repair
from tidemill.services.trainer.durable.background_work import BackgroundWork

VERSION = 3


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Between two steps, with a worker that reports its version as damaged."""

    async def read_heartbeats(*_: Any) -> list[Any]:
        trainer.num_looks += 1
        return [SimpleNamespace(name="w", counts={DAMAGED_VERSION: VERSION})]

    monkeypatch.setattr(weight_repair, "LOOK_S", 0.0)
    monkeypatch.setattr(weight_repair, "read_heartbeats", read_heartbeats)
    trainer = MagicMock(version=VERSION, trained_version=VERSION, num_looks=0)
    trainer.reconciler.manifest.version = VERSION
    trainer.runner.has_begun = False
    trainer.weights_work = BackgroundWork(MagicMock(start=lambda work, _: asyncio.create_task(work)), "write")
    return trainer


@pytest.mark.parametrize("has_ended", [False, True])
async def test_nothing_is_written_again_once_the_trainer_ends(
    trainer: Any, has_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def publish(*_: Any) -> None:
        pass

    monkeypatch.setattr(weight_repair.WeightRepair, "_write_again", publish)
    if has_ended:
        await trainer.weights_work.give_up()
    watching = asyncio.create_task(weight_repair.WeightRepair(MagicMock(), trainer).watch())
    await wait_until(lambda: watching.done() or trainer.num_looks > 2 * has_ended)
    watching.cancel()
    assert trainer.outputs.weights.distrust.called is not has_ended
    assert trainer.weights_work.is_pending is not has_ended
    await trainer.weights_work.give_up()
