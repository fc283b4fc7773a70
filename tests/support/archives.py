"""Filled streams, and archives of them, for tests that compare the two."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.trajectories import make_trajectory
from tidemill.common.archive.archiver import archive_stream, writing
from tidemill.common.archive.manifest import Manifest
from tidemill.common.config import ArchiveConfig
from tidemill.common.history import History, Record, Selection, StreamName
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import Fields, read_raw
from tidemill.common.streams.selection import ALL
from tidemill.common.wire import codec
from tidemill.common.wire.codec import PAYLOAD_FIELD, SCHEMA, VERSION_FIELD
from tidemill.common.wire.keys import Keys

STREAM = StreamName.TRAJECTORIES


def run_folder(folder: Path, keys: Keys) -> Path:
    return folder / keys.run_id


async def fill(broker: Broker, key: str, tickets: Sequence[int], garbled: bool = True) -> None:
    """Append groups of two trajectories, and after each an entry that cannot be decoded."""
    for ticket in tickets:
        for index in range(2):
            message = make_trajectory(ticket, index, step=ticket // 4, finished_at=1000.0 + ticket)
            payload = codec.encode_payload(message)
            await broker.execute("XADD", key, "*", VERSION_FIELD, SCHEMA, PAYLOAD_FIELD, payload)
        if garbled:
            await broker.execute("XADD", key, "*", "odd", b"\x00\xff" * 8)


async def raw(broker: Broker, key: str) -> list[tuple[str, Fields]]:
    """Everything the stream holds, as it is."""
    return await read_raw(broker, key, count=1_000_000)


async def archive(
    broker: Broker,
    keys: Keys,
    run_dir: Path,
    stream: StreamName = STREAM,
    *,
    segment_bytes: int = 2000,
    until: str = "+",
    is_last: bool = True,
    keep_choices: bool = True,
) -> int:
    """Archive one stream in this process."""
    with writing(run_dir):
        changes = {"segment_mb": segment_bytes / (1 << 20), "keep_choices": keep_choices}
        config = ArchiveConfig().model_copy(update=changes)
        return await archive_stream(broker, keys, run_dir, stream, config, until, is_last)


async def scanned(
    history: History, stream: StreamName = STREAM, selection: Selection = ALL, newest_first: bool = False
) -> list[Record]:
    return [record async for record in history.scan(stream, selection, newest_first)]


def ids_listed(manifest: Manifest) -> list[tuple[str, str, int]]:
    """First id, last id and number of entries of each segment."""
    return [(segment.first_id, segment.last_id, segment.entries) for segment in manifest.segments]


if __name__ == "__main__":  # one archiver that can be killed: URL RUN_ID FOLDER
    _, url, run_id, folder = sys.argv

    async def _main() -> None:
        broker = await Broker.connect(url)
        await archive(broker, Keys(run_id), Path(folder))
        await broker.close()

    asyncio.run(_main())
