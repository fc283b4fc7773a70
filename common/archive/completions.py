"""Rows of demonstrations from the archive of another run, selected by reward.

Token ids are those that the run sampled, never tokenized again, with the mask of its model's tokens. Each
segment of a session is a row.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tidemill.common.archive import archive_folder, stream_folder
from tidemill.common.archive.manifest import Manifest
from tidemill.common.data.data_files import open_rows
from tidemill.common.data.dataset import Opener
from tidemill.common.data.row_file import Located
from tidemill.common.errors import ConfigError, TidemillError
from tidemill.common.images.no_pictures import NOT_IMITATED
from tidemill.common.streams.entries import Entry
from tidemill.common.streams.selection import Selection, StreamName
from tidemill.common.wire.messages import Score, Trajectory, TrajectoryKey, fault_of

if TYPE_CHECKING:
    from tidemill.common.config.sources import SourceConfig

M = TypeVar("M", Score, Trajectory)


def opener_of(source: "SourceConfig") -> Opener:
    """An opener of data files; for demonstrations also of the folder of a run that has an archive."""

    def opened(path: str, is_streamed: bool) -> Iterable[Located]:
        if not source.is_imitated or not archive_folder(Path(path)).is_dir():
            return open_rows(path, is_streamed)
        if is_streamed:
            raise ConfigError(f"dataset {path} is a run, which is read at once; set data.stream to false.")
        return _recorded_rows(path, source)

    return opened


def _recorded_rows(path: str, source: "SourceConfig") -> Iterator[Located]:
    """The completions of a run that had at least `source.min_reward`, in the order of its archive; the first
    entry of a key counts, as in its training.

    Raises:
        ConfigError: the archive cannot be read.
    """
    run = Path(path)
    least = source.min_reward
    rewards: dict[TrajectoryKey, list[Score]] = {}
    seen: set[TrajectoryKey] = set()
    try:
        for score in _messages(run, StreamName.SCORES, Score) if least is not None else ():
            rewards.setdefault(score.key, []).append(score)
        for sample in _messages(run, StreamName.TRAJECTORIES, Trajectory):
            if sample.key in seen or sample.is_greedy or fault_of(sample):
                continue
            seen.add(sample.key)
            scores = (score for score in rewards.get(sample.key, ()) if score.is_of(sample.tokens_digest))
            value = next((score.value for score in scores), None)
            if least is None or (value is not None and value >= least):
                if sample.images:
                    raise ConfigError(f"sample {sample.ticket}.{sample.index} has pictures; {NOT_IMITATED}")
                yield from _rows(f"{path} sample {sample.ticket}.{sample.index}", sample)
    except TidemillError as error:
        raise ConfigError(f"demonstrations of run {path}: {error}") from None


def _rows(origin: str, sample: Trajectory) -> Iterator[Located]:
    for number, segment in enumerate(sample.segments):
        if not segment.mask.any():
            continue  # no token of the model, as in an empty completion
        columns = {
            "prompt": "" if number else sample.prompt_text,  # later segments have another
            "prompt_ids": segment.prompt_ids,
            "completion_ids": segment.completion_ids,
            "loss_mask": segment.mask,
            "data_source": sample.data_source,
        }
        yield origin, columns


def _messages(run: Path, stream: StreamName, kind: type[M]) -> Iterator[M]:
    from tidemill.common.archive.reader import select  # imports pyarrow

    manifest = Manifest.load(stream_folder(run, stream))
    for records in select(manifest, stream, Selection()):
        yield from (r.message for r in records if isinstance(r, Entry) and isinstance(r.message, kind))
