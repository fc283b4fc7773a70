"""An archive that is as far as it may be."""

from typing import Any

import pytest

from tidemill.common.archive.archiver import archive_run
from tidemill.services.trainer.durable.archive_requests import ArchiveJobs


@pytest.fixture
def archives_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of a jobs worker: what may go is archived before the trainer goes on, in files of any size."""

    async def ask(jobs: ArchiveJobs, until: Any, is_urgent: bool) -> None:
        context = jobs.context
        config = context.config.streams.archive
        await archive_run(context.broker, context.keys, context.run_dir, config, until, is_last=True)
        await jobs.on_progress()

    monkeypatch.setattr(ArchiveJobs, "ask", ask)
