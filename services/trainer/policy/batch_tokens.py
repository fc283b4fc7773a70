"""The trained tokens of a micro-batch: what is known of them before the model has scored them.

All of it is made once for the micro-batch, in the order of its tiles, and crosses to the device in one copy;
each tile's `Tokens` are views of it.

Shape legend: M trained tokens of a micro-batch, C columns, N of the tokens that are in one tile.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidemill.services.trainer.algorithm.losses.tokens import Normalisation, Tokens, token_weight
from tidemill.services.trainer.groups.columns import COLUMNS, trained_names
from tidemill.services.trainer.groups.micro_batch import MicroBatch
from tidemill.services.trainer.groups.sample import Sample
from tidemill.services.trainer.policy.tile import Row, Tile

WEIGHTS = "weights"
TEACHER_WEIGHTS = "teacher_weights"
IMITATION = "imitation"
"""Numbers of a sample that its tokens share: rows beside those of columns, under these names."""


@dataclass(slots=True)
class _TileNumbers:
    """Which columns the `Tokens` of a tile have, and how many tokens and sequences.

    Example: `names` ["rollout_logprobs", "advantages"], `num_tokens` 3 of `num_sequences` 2.
    """

    names: list[str]
    num_tokens: int
    num_sequences: int


class BatchTokens:
    """`tiles` are the plan of `batch`: their rows refer to its samples.

    Of two tiles, the first with 2 and the second with 3 trained tokens:

        rollout_logprobs  -.1 -.2 | -.5 -.9 -.3
        advantages         .7  .7 |  .2  .2 -.4
        weights             1   1 |   1   1   1
        sequences           0   0 |   0   0   1
    """

    def __init__(self, tiles: Sequence[Tile], batch: MicroBatch, normalisation: Normalisation) -> None:
        self._tiles: list[_TileNumbers] = []
        rows = [row for tile in tiles for row in tile.rows]
        samples = [batch.samples[row.sample] for row in rows]
        counts = np.array([len(row.targets) for row in rows], dtype=np.int64)
        columns = trained_names()
        if batch.is_at_start:
            columns.remove("proximal_logprobs")
        names_of_tiles: set[str] = set()
        sequences: list[int] = []
        for tile in tiles:
            # All segments of a session have one number: ratios and means of sequences go over all of them.
            sequence_of_sample: dict[int, int] = {}
            for row in tile.rows:
                sequences.append(sequence_of_sample.setdefault(row.sample, len(sequence_of_sample)))
            names = _names_of([batch.samples[index] for index in sequence_of_sample], columns)
            names_of_tiles.update(names)
            self._tiles.append(_TileNumbers(names, tile.num_scored, len(sequence_of_sample)))
        self._names = [name for name in columns if name in names_of_tiles]
        shared: dict[str, list[float]] = {
            WEIGHTS: [token_weight(normalisation, s.num_trained, s.group_trained) for s in samples]
        }
        if "teacher_logprobs" in names_of_tiles:
            shared[TEACHER_WEIGHTS] = [sample.teacher_weight for sample in samples]
        if any(sample.imitation for sample in batch.samples):
            shared[IMITATION] = [sample.imitation for sample in samples]
        # Divisions are done by now, in float64 on the host; products with the loss follow in the dtype of the
        # logprobs.
        self._numbers_CM = np.empty((len(self._names) + len(shared), counts.sum()))
        # Not strict: the rows after those of the columns are for `shared`.
        for name, numbers_M in zip(self._names, self._numbers_CM, strict=False):
            _fill_column(numbers_M, name, rows, samples)
        for number, of_rows in enumerate(shared.values(), len(self._names)):
            self._numbers_CM[number] = np.repeat(of_rows, counts)
        self._names += shared
        self._sequence_M = np.repeat(np.array(sequences, dtype=np.int64), counts)
        self._columns_of_tiles: list[dict[str, Tensor]] = []
        """[N] of each tile, by name, on the device; made with the first scores."""
        self._shared_of_tiles: dict[str, Sequence[Tensor]] = {}
        """[N] of each tile: numbers that all tokens of a sample share (`WEIGHTS` and its like), by name."""
        self._sequences_of_tiles: Sequence[Tensor] = ()

    def of_tile(self, number: int, scores: Tile, columns_now: Mapping[str, Tensor]) -> Tokens:
        """The trained tokens of the tile of this number in the plan, of which `scores` has the scores, and
        `columns_now` what else the policy has just computed of them: `values`."""
        if not self._columns_of_tiles:
            self._move(scores.logprobs_N.device, scores.logprobs_N.dtype)
        tile = self._tiles[number]
        shared = self._shared_of_tiles
        return Tokens(
            logprobs_N=scores.logprobs_N,
            entropies_N=scores.entropies_N,
            log_mass_N=scores.log_mass_N,
            values_N=columns_now.get("values"),
            sequence_N=self._sequences_of_tiles[number],
            num_sequences=tile.num_sequences,
            routing=scores.routing,
            weights_N=shared[WEIGHTS][number],
            teacher_weights_N=shared[TEACHER_WEIGHTS][number] if "teacher_logprobs" in tile.names else None,
            imitation_N=shared[IMITATION][number] if IMITATION in tile.names else None,
            columns=self._columns_of_tiles[number],
        )

    def _move(self, device: torch.device, dtype: torch.dtype) -> None:
        lengths = [tile.num_tokens for tile in self._tiles]
        numbers_CM = torch.from_numpy(self._numbers_CM).to(device, dtype)
        of_tiles: dict[str, Sequence[Tensor]] = {}
        for name, numbers_M in zip(self._names, numbers_CM.unbind(0), strict=True):
            of_tiles[name] = numbers_M.split(lengths)
        self._shared_of_tiles = {name: of_tiles[name] for name in of_tiles if name not in COLUMNS}
        for number, tile in enumerate(self._tiles):
            columns = {name: of_tiles[name][number] for name in tile.names if name in COLUMNS}
            self._columns_of_tiles.append(columns)
        self._sequences_of_tiles = torch.from_numpy(self._sequence_M).to(device).split(lengths)


def _names_of(samples: Sequence[Sample], columns: Sequence[str]) -> list[str]:
    """What the loss gets of a tile with these samples, which may have some of these columns."""
    held = {"advantages"}  # demonstrations alone have none
    for sample in samples:
        held.update(sample.columns)
    names = [name for name in columns if name in held]
    if any(sample.imitation for sample in samples):
        names.append(IMITATION)
    return names


def _fill_column(
    numbers_M: NDArray[np.float64], name: str, rows: Sequence[Row], samples: Sequence[Sample]
) -> None:
    """Write one column of each row's sample at the row's tokens; what a sample lacks is as `COLUMNS` says."""
    column = COLUMNS[name]
    start = 0
    for row, sample in zip(rows, samples, strict=True):
        end = start + len(row.places)
        values_T = sample.columns.get(name)
        if sample.imitation and column.of_demonstration != "current":
            numbers_M[start:end] = column.of_demonstration
        elif values_T is not None:
            is_whole = len(row.places) == len(values_T)
            numbers_M[start:end] = values_T if is_whole else values_T[row.places]
        else:
            filler = 0.0 if sample.imitation else column.of_others
            assert filler is not None, f"a micro-batch has {name} as a whole or not at all"
            numbers_M[start:end] = filler
        start = end
