"""`tidemill archive`, and the end of `tidemill up`: archives the rest of a run's streams in its folder."""

import asyncio
import json
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError
from rich.console import Console

from tidemill.common.archive import archive_folder, is_whole, mark_whole, stream_folder
from tidemill.common.archive.manifest import Manifest
from tidemill.common.config import ArchiveConfig, StreamsConfig
from tidemill.common.errors import ConfigError, OutageError, UnreachableError
from tidemill.common.process.programs import run_main
from tidemill.common.redis.broker import Broker
from tidemill.common.store import ClaimStore
from tidemill.common.streams.selection import StreamName
from tidemill.common.telemetry.logs import configure_logs
from tidemill.common.wire.keys import Keys
from tidemill.services.console.commands import ArchiveOptions
from tidemill.services.console.run.folder import find_run, nearest
from tidemill.services.console.run.history import open_history
from tidemill.services.console.text.tree import note, part, show, table

ANSWER_S = 5.0


async def archive_rest(broker: Broker, keys: Keys, run_dir: Path, config: ArchiveConfig) -> None:
    """Archive what is left of all streams. Raises UnreachableError: Redis does not answer."""
    from tidemill.common.archive.archiver import archive_run

    try:
        async with asyncio.timeout(ANSWER_S):
            await broker.execute("PING")
    except (TimeoutError, RedisError, OutageError):
        raise UnreachableError("Redis does not answer") from None
    await archive_run(broker, keys, run_dir, config, is_last=True)


def archive(options: ArchiveOptions) -> int:
    configure_logs("archive")  # what is restored or kept aside is said beside the output
    folder = find_run(options.run_id, options.runs_dir)
    if options.check:
        return _check(folder.path, options.as_json)

    async def work() -> Path:
        async with open_history(folder) as access:
            run_dir = access.folder.path
            broker = access.history.broker
            if broker is None and is_whole(run_dir):
                return run_dir
            if broker is None:
                raise ConfigError(
                    f"the Redis of run {access.run_id} is gone: what its archive holds is all there is. "
                    f"`{access.folder.command('archive', '--check')}` says whether that is whole."
                )
            streams = access.config.streams if access.config else StreamsConfig()
            broker.claims = ClaimStore(run_dir, max_bytes=streams.max_message_mb << 20)
            await archive_rest(broker, access.history.keys, run_dir, streams.archive)
            if access.is_over:
                mark_whole(run_dir, True)
            return run_dir

    _show(run_main(work()), options.as_json)
    return 0


def _check(run_dir: Path, as_json: bool) -> int:
    from tidemill.common.archive.archiver import check, has_archive

    if not has_archive(run_dir):
        raise ConfigError(f"{archive_folder(run_dir)} does not exist: nothing of this run was archived.")
    damages = check(run_dir)
    if as_json:
        print(json.dumps([{"path": str(damage.path), "reason": damage.reason} for damage in damages]))
        return 1 if damages else 0
    _show(run_dir, as_json=False)
    console = Console(highlight=False)
    for damage in damages:
        console.print(f"{damage.path}: {damage.reason}", style="red", soft_wrap=True, markup=False)
    if not damages:
        console.print("every file is there, with the bytes that were written")
    return 1 if damages else 0


def _show(run_dir: Path, as_json: bool) -> None:
    rows: dict[str, dict[str, Any]] = {}
    for stream in StreamName:
        manifest = Manifest.load(stream_folder(run_dir, stream))
        if manifest.last_id != "0-0":
            rows[stream.value] = {
                "entries": manifest.entries,
                "files": len(manifest.segments),
                "bytes": manifest.num_bytes,
                "payload_bytes": sum(segment.details.payload_bytes for segment in manifest.segments),
                "removed": manifest.removed.entries,
                "last_id": manifest.last_id,
            }
    titles = {"bytes": "size", "payload_bytes": "of payload"}
    lines = []
    for name_of_stream, row in rows.items():
        cells = {titles.get(name, name): value for name, value in row.items() if name != "last_id"}
        lines.append({"stream": name_of_stream} | cells)
    listing = table(lines, {"size": "bytes", "of payload": "bytes"})
    folder = archive_folder(run_dir)
    tree = part("", listing, note(f"in {nearest(folder)}"))
    show({"folder": str(folder), "streams": rows}, tree, as_json)
