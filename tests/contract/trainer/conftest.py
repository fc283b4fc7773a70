"""What surrounds a whole trainer: workers that answer at once, and an archive that is as far as it may be."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.training import answering
from tidemill.common.archive.archiver import archive_run
from tidemill.common.redis.broker import Broker
from tidemill.common.wire.keys import Keys
from tidemill.services.trainer.durable.archive_requests import ArchiveJobs


@pytest.fixture
async def answers(broker: Broker, keys: Keys) -> AsyncIterator[None]:
    """Workers that answer every ticket, for the length of a test."""
    async with answering(broker, keys):
        yield


@pytest.fixture
def archives_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of a jobs worker: what may go is archived before the trainer goes on, in files of any size."""

    async def ask(jobs: ArchiveJobs, until: Any, is_urgent: bool) -> None:
        context = jobs.context
        config = context.config.streams.archive
        await archive_run(context.broker, context.keys, context.run_dir, config, until, is_last=True)
        await jobs.on_progress()

    monkeypatch.setattr(ArchiveJobs, "ask", ask)
