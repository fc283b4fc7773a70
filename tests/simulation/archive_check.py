"""Whether what a run has trimmed from Redis is in its archive."""

from collections import Counter

import pyarrow.parquet as pq

from tests.simulation.redis.stream import Stream, parse_id
from tests.simulation.watch import Watch
from tests.simulation.world import World
from tidemill.common.archive import stream_folder
from tidemill.common.archive.manifest import Manifest
from tidemill.common.archive.reader import select
from tidemill.common.archive.rows import ID
from tidemill.common.config import RunConfig
from tidemill.common.errors import ArchiveError
from tidemill.common.streams import Entry
from tidemill.common.streams.entries import id_order
from tidemill.common.streams.selection import Selection, StreamName
from tidemill.common.wire.messages import Trajectory


def missing_ids(world: World) -> list[str]:
    """In words, per stream: entries that neither Redis nor the archive has, and those archived twice."""
    problems = []
    for stream in StreamName:
        name = world.keys.name_of(stream.key(world.keys))
        value = world.cluster.server.space.values.get(stream.key(world.keys).encode())
        in_redis = set(value.ids) if isinstance(value, Stream) else set()
        try:
            manifest = Manifest.load(stream_folder(world.folder / world.run_id, stream))
        except ArchiveError as error:
            problems.append(f"archive: {error}")
            continue
        archived = [entry_id for segment in manifest.segments for entry_id in _ids(segment.path)]
        # What a stranger has written is moved aside.
        put_back = world.history.put_back if name == "dead" else {}
        ours = [
            record
            for record in world.history.of(name)
            if not record.is_foreign and record.entry_id not in put_back
        ]
        wanted = {parse_id(record.entry_id.encode()) for record in ours}
        if missing := sorted(wanted - in_redis - set(archived)):
            problems.append(
                f"archive: of {name}, {len(missing)} entries are nowhere any more, from {missing[0]} on"
            )
        if twice := [entry_id for entry_id, count in Counter(archived).items() if count > 1]:
            problems.append(f"archive: {name} {twice[0]} is archived twice")
    return problems


def other_choices(watch: Watch, config: RunConfig) -> list[str]:
    """In words: an archived trajectory whose choices are not those of its engine, or is kept or left out
    against the config."""
    run_dir = watch.world.folder / watch.world.run_id
    stream = StreamName.TRAJECTORIES
    manifest = Manifest.load(stream_folder(run_dir, stream))
    for records in select(manifest, stream, Selection()):
        for sample in [record.message for record in records if isinstance(record, Entry)]:
            if isinstance(sample, Trajectory) and sample.choices is not None and sample.claim is None:
                rows = sample.choices.rows
                is_right = watch.is_made(sample, sample.logprobs, rows) if rows else True
                if not is_right or bool(rows) != config.streams.archive.keep_choices:
                    return [f"archive: the choices of {sample.key} are not as they were made, or kept"]
    return []


def _ids(path: object) -> list[tuple[int, int]]:
    return [id_order(entry_id) for entry_id in pq.read_table(path, columns=[ID])[ID].to_pylist()]
