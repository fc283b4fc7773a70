"""A version that a worker finds damaged is written again, unless the trainer ends."""

import asyncio
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from tests.support.waiting import wait_until
from tidemill.common.process.heartbeats import DAMAGED_VERSION
from tidemill.services.trainer import trainer as trainer_module
from tidemill.services.trainer.trainer import Trainer

VERSION = 3


@pytest.fixture
def trainer(monkeypatch):
    """Between two steps, with a worker that reports its version as damaged."""

    parts = {name: MagicMock() for name in Trainer.__dataclass_fields__} | {"version": VERSION}
    trainer = Trainer(**parts)
    trainer.reconciler.manifest.version = VERSION
    trainer.runner.has_begun = False
    trainer.context.start = lambda work, _: asyncio.create_task(work)

    async def read_heartbeats(*_):
        trainer.memory.num_looks += 1
        return [SimpleNamespace(name="w", counts={DAMAGED_VERSION: VERSION})]

    async def publish(*_):
        pass

    trainer.memory.num_looks = 0
    monkeypatch.setattr(trainer_module, "LOOK_S", 0.0)
    monkeypatch.setattr(trainer_module, "read_heartbeats", read_heartbeats)
    monkeypatch.setattr(Trainer, "_write_again", publish)
    return trainer


@pytest.mark.parametrize("has_ended", [False, True])
async def test_nothing_is_written_again_once_the_trainer_ends(trainer, has_ended):
    if has_ended:
        await trainer.weights_work.give_up()
    watching = asyncio.create_task(trainer.watch_damage())
    await wait_until(lambda: watching.done() or trainer.memory.num_looks > 2 * has_ended)
    watching.cancel()
    assert trainer.weights.distrust.called is not has_ended
    assert trainer.weights_work.is_pending is not has_ended
    await trainer.weights_work.give_up()
