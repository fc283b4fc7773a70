"""What surrounds a whole trainer: workers that answer at once, and an archive that is as far as it may be."""

import pytest

from tests.support.training import answering
from tidemill.common.archive.archiver import archive_run
from tidemill.services.trainer.durable.archive_requests import ArchiveRequests


@pytest.fixture
async def answers(broker, keys):
    """Workers that answer every ticket, for the length of a test."""
    async with answering(broker, keys):
        yield


@pytest.fixture
def archives_at_once(monkeypatch):
    """In place of a process: what may go is archived before the trainer goes on, in files of any size."""

    async def ask(requests, until, is_urgent):
        context = requests.context
        config = context.config.streams.archive
        await archive_run(context.broker, context.keys, context.run_dir, config, until, is_last=True)
        await requests.on_progress()

    monkeypatch.setattr(ArchiveRequests, "ask", ask)
