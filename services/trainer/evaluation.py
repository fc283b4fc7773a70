"""Evaluation on its own lane: held-out prompts, generated and scored before any training work.

While an evaluation of version v runs, newer weights are trained but not announced, so that every token of it
comes from version v. Tickets are numbered by version, so that an evaluation which a crash interrupted goes on
where it was.
"""

import logging
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from math import comb
from typing import Any

import structlog

from tidemill.common.errors import ConfigError
from tidemill.common.process.failures import FailureLog, added_up
from tidemill.common.process.service import ServiceContext
from tidemill.common.streams import (
    START,
    DeadLetterWriter,
    Entry,
    Garbled,
    OffsetReader,
    append_missing,
    entry_id_of,
    group_status,
    has_entry,
    id_after,
    id_order,
    last_id,
    read_range,
)
from tidemill.common.streams.code_errors import CodeErrors
from tidemill.common.streams.group_results import delete_results
from tidemill.common.telemetry import metrics
from tidemill.common.wire.keys import EVAL, REWARD_GROUP, ROLLOUT_GROUP, StreamName
from tidemill.common.wire.messages import (
    DeadLetter,
    Lane,
    SamplingParams,
    Score,
    Ticket,
    Trajectory,
    TrajectoryKey,
)
from tidemill.services.trainer.batch.prompts import Prompt
from tidemill.services.trainer.batch.unexpected_entries import remove_unexpected, take_back
from tidemill.services.trainer.durable.trimming import Trimmer
from tidemill.services.trainer.groups.group import Group
from tidemill.services.trainer.groups.sample import num_sampled
from tidemill.services.trainer.metrics.step_metrics import component_values

log = structlog.get_logger(__name__)

BLOCK_S = 0.5
READ_COUNT = 512

NO_SCORE = "no score came: its prompt or its trajectory is a dead letter, or was lost"

Evaluations = dict[str, dict[str, float]]
"""Numbers of one version by dataset. `score` is avg@k, `accuracy` the share of samples at the threshold,
`pass_at_k` that of prompts with at least one such sample, `pass_at_<n>` the estimates for smaller k, and
`rewards/<name>/mean` a component of the reward, over the scored samples that have it."""


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """The unbiased estimate 1 - C(n - c, k) / C(n, k) from n samples of which c solve (Chen et al. 2021,
    arXiv 2107.03374, eq. 1), in whole numbers, divided once. Range [0, 1].

    With n = 4, c = 1, k = 2: 1 - C(3, 2) / C(4, 2) = 1 - 3 / 6 = 0.5.

    Raises:
        ValueError: not 1 <= k <= n, or not 0 <= c <= n.
    """
    if not (1 <= k <= num_samples and 0 <= num_solved <= num_samples):
        raise ValueError(f"pass@{k} of {num_solved} solved among {num_samples} samples is not defined")
    return 1.0 - comb(num_samples - num_solved, k) / comb(num_samples, k)


class Evaluator:
    """Runs one evaluation at a time."""

    def __init__(
        self, context: ServiceContext, datasets: Mapping[str, Sequence[Prompt]], trimmer: Trimmer
    ) -> None:
        self.context = context
        self.config = context.config.trainer.evaluation
        self.prompts = [(name, prompt) for name, rows in datasets.items() for prompt in rows]
        limit = context.config.rollout.sampling.max_tokens
        self.sampling = SamplingParams(
            max_tokens=limit, temperature=self.config.temperature, **self.config.filters()
        )
        self.trimmer = trimmer
        self._letters_read = START
        """Id of the last dead letter that earlier evaluations have read: later ones have newer letters."""
        self._is_first = True
        """Whether this process has evaluated nothing yet."""
        self.reasons: dict[str, str] = {}
        """By dataset: why samples of the last evaluation failed, the most frequent cause; only where some
        did."""

    def is_due(self, version: int, num_steps: int) -> bool:
        if not self.prompts:
            return False
        if version == 0:
            return self.config.at_start
        return version == num_steps or (self.config.every > 0 and version % self.config.every == 0)

    async def evaluate(self, version: int) -> Evaluations:
        """Issue the tickets of `version`, wait for every sample, and sum up by dataset. Returns nothing where
        the streams of this version's evaluation have been trimmed already.

        Raises:
            ConfigError: the reward's own code fails for all samples; a trainer that resumes evaluates again.
        """
        first = version * len(self.prompts)
        tickets = [self._ticket(first + i, version, prompt) for i, (_, prompt) in enumerate(self.prompts)]
        code_errors = CodeErrors.of_evaluation(self.context.config, len(tickets) * self.config.samples)
        code_errors.begin(await last_id(self.context.broker, self.context.keys.scores(Lane.EVAL)))
        if self._is_first and await self._has_code_errors(tickets):
            # Left by an evaluation that ended the run: the code was corrected since, so it begins again.
            await self._begin_again(version)
        self._is_first = False
        if not await self._issue(tickets):
            log.warning("cannot be evaluated again: its tickets were trimmed", version=version)
            return {}
        with metrics.EVALUATION_SECONDS.time():
            try:
                groups = await self._collect(tickets, code_errors)
            except ConfigError:
                await self._begin_again(version)
                raise
        results = self._sum_up(groups)
        self.reasons = self._reasons(groups)
        for dataset, numbers in results.items():
            for name, number in numbers.items():
                metrics.EVALUATION_METRIC.labels(dataset, name).set(number)
            log.log(
                logging.WARNING if numbers["num_failed"] else logging.INFO,
                "evaluated",
                version=version,
                dataset=dataset,
                score=round(numbers["score"], 4),
                num_samples=numbers["num_samples"],
                num_failed=numbers["num_failed"],
                **({"reason": self.reasons[dataset]} if dataset in self.reasons else {}),
            )
        return results

    async def trim(self, version: int) -> None:
        """Trim the streams of an evaluation whose results are safe: nothing of it is needed again."""
        await delete_results(self.context.broker, self.context.keys, Lane.EVAL, ())
        if not self.context.config.streams.trim:
            return
        # The epoch before the ids: ids of another server must not be taken for ids of this one.
        broker = self.context.broker
        keys = self.context.keys
        epoch = self.trimmer.epoch
        below = {
            stream: id_after(await last_id(broker, stream.key(keys)))
            for stream in (StreamName.TRAJECTORIES_EVAL, StreamName.SCORES_EVAL)
        }
        below[StreamName.PROMPTS_EVAL] = entry_id_of((version + 1) * len(self.prompts))
        await self.trimmer.release(below, epoch)

    async def take_back(self, version: int) -> None:
        """Remove what evaluations of later versions left, where a trainer starts at `version`.

        Redis has lost the commits that led to them. The stream takes no lower tickets behind theirs, and
        their samples are of weights that are not in the run's history.
        """
        broker = self.context.broker
        keys = self.context.keys
        key = self.context.keys.prompts(Lane.EVAL)
        first = version * len(self.prompts)
        floor = entry_id_of(first - 1)
        next_version = entry_id_of(first + len(self.prompts))

        async def is_ahead() -> bool:
            return id_order(await last_id(broker, key)) >= id_order(next_version)

        # Unexpected entries stand behind all tickets, and are no reason to begin again.
        if not await is_ahead() or (
            await remove_unexpected(broker, keys, key, Ticket, floor) and not await is_ahead()
        ):
            return
        # The version of the start begins again as well: its samples go with those of the others.
        await self._begin_again(version)

    async def _begin_again(self, version: int) -> None:
        """Remove the tickets of `version` and of later ones, and their samples, so that they can be issued
        again."""
        broker = self.context.broker
        keys = self.context.keys
        key = keys.prompts(Lane.EVAL)
        first = version * len(self.prompts)
        floor = entry_id_of(first - 1)
        entries = await read_range(broker, key, Ticket, entry_id_of(first))
        tickets = [entry.message.ticket for entry in entries if isinstance(entry, Entry)]
        await take_back(broker, keys, key, dict.fromkeys(map(entry_id_of, tickets), b""), floor)
        # After the tickets, which no worker holds from then on: it would write its progress again.
        if tickets:
            progress = [keys.progress(ticket, Lane.EVAL) for ticket in tickets]
            await broker.execute("DEL", *progress, *map(keys.parts, progress))
        await self.trim(version - 1)

    async def _issue(self, tickets: Sequence[Ticket]) -> bool:
        """Append the tickets that the stream does not have; False where it had them and they were trimmed."""
        broker = self.context.broker
        key = self.context.keys.prompts(Lane.EVAL)
        by_number = {ticket.ticket: ticket for ticket in tickets}
        if len(await append_missing(broker, key, list(by_number), by_number.__getitem__)) == len(tickets):
            return True
        floor = entry_id_of(tickets[0].ticket - 1)
        if await remove_unexpected(broker, self.context.keys, key, Ticket, floor):
            await append_missing(broker, key, list(by_number), by_number.__getitem__)
        # Fewer than all are appended also where a trainer before this one had issued some of them.
        first = entry_id_of(tickets[0].ticket)
        last = entry_id_of(tickets[-1].ticket)
        return len(await read_range(broker, key, Ticket, first, last)) == len(tickets)

    async def _collect(self, tickets: Sequence[Ticket], code_errors: CodeErrors) -> list[Group]:
        """Read the lane until every sample of every ticket is scored or dead, or no more can come. Raises
        ConfigError: see `evaluate`."""
        broker = self.context.broker
        keys = self.context.keys
        groups = {ticket.ticket: Group.of(ticket) for ticket in tickets}
        dead: dict[str, set[TrajectoryKey]] = {}
        """Id of a dead letter -> the samples that will not come because of it."""
        dead_letters = DeadLetterWriter(broker, keys, keys.scores(Lane.EVAL))
        readers = self._readers(self._letters_read)
        is_exhausted = False
        missing = _missing(groups)
        while missing - _lost(dead) and not is_exhausted:
            is_exhausted = await self._is_exhausted(tickets)
            if is_exhausted:
                # Read once more from the start: a server that took over may have given lower ids since.
                readers = self._readers(START)
            score_reader, trajectory_reader, dead_reader = readers
            # Scores first: the trajectory of a score that was read is in the stream by then.
            scores = await _read_all(score_reader, 0.0 if is_exhausted else BLOCK_S)
            for entry in [*scores, *await _read_all(trajectory_reader)]:
                if isinstance(entry, Entry) and entry.message.ticket in groups:
                    groups[entry.message.ticket].take(entry)
            self._note_scores(code_errors, scores, groups)
            for entry in scores:
                if isinstance(entry, Garbled):
                    await dead_letters.append_unread(entry, self.context.name)
            for letter in await _read_all(dead_reader):
                keys_lost = _keys_of(letter, missing)
                if keys_lost:
                    dead[letter.entry_id] = keys_lost
            missing = _missing(groups)
            if not missing - _lost(dead):
                # Checked only when nothing else is missing: it takes a round trip for each.
                for dead_id in list(dead):
                    if not await has_entry(broker, keys.dead, dead_id):
                        del dead[dead_id]  # the operator has put the message back: wait for its samples
        self._letters_read = readers[-1].position
        return list(groups.values())

    async def _has_code_errors(self, tickets: Sequence[Ticket]) -> bool:
        """Whether the lane holds scores of these tickets that the reward's own code failed."""
        numbers = {ticket.ticket for ticket in tickets}
        reader = OffsetReader(self.context.broker, self.context.keys.scores(Lane.EVAL), Score)
        scores = [entry.message for entry in await _read_all(reader) if isinstance(entry, Entry)]
        return any(score.is_code_error and score.ticket in numbers for score in scores)

    def _note_scores(
        self, code_errors: CodeErrors, scores: Sequence[Entry[Score] | Garbled], tickets: Collection[int]
    ) -> None:
        """Count the new scores of these tickets that the reward's own code failed. Raises ConfigError: none
        will have a value."""
        for entry in scores:
            if isinstance(entry, Entry) and entry.message.ticket in tickets:
                code_errors.note(entry.entry_id, entry.message)
        code_errors.check(" of an evaluation")

    def _readers(
        self, letters_read: str
    ) -> tuple[OffsetReader[Score], OffsetReader[Trajectory], OffsetReader[DeadLetter]]:
        broker = self.context.broker
        keys = self.context.keys
        return (
            # From the start: an evaluation that a crash interrupted has samples there already.
            OffsetReader(broker, keys.scores(Lane.EVAL), Score),
            OffsetReader(broker, keys.trajectories(Lane.EVAL), Trajectory),
            OffsetReader(broker, keys.dead, DeadLetter, letters_read),
        )

    async def _is_exhausted(self, tickets: Sequence[Ticket]) -> bool:
        """Whether all work on the tickets is done: what is not in the streams now never will be.

        Issues tickets again that Redis has lost. Without this check, one sample whose bytes were damaged on
        the way would keep the run waiting for ever.
        """
        broker = self.context.broker
        keys = self.context.keys
        prompts = keys.prompts(Lane.EVAL)
        trajectories = keys.trajectories(Lane.EVAL)
        newest = entry_id_of(tickets[-1].ticket)
        if await last_id(broker, prompts) != newest:  # lost, or with an unexpected entry behind it
            await self._issue(tickets)
        # In this order: a ticket is acknowledged with its last trajectory, a trajectory with its score.
        return await self._is_worked_off(prompts, ROLLOUT_GROUP, newest) and await self._is_worked_off(
            trajectories, REWARD_GROUP, await last_id(broker, trajectories)
        )

    async def _is_worked_off(self, key: str, group: str, newest: str) -> bool:
        status = await group_status(self.context.broker, key, group)
        if status is None or status.pending:
            return False
        return id_order(status.last_delivered) >= id_order(newest)

    def _sum_up(self, groups: Sequence[Group]) -> Evaluations:
        scored: defaultdict[str, list[list[Score]]] = defaultdict(list)
        samples: defaultdict[str, list[Trajectory]] = defaultdict(list)
        for (dataset, _), group in zip(self.prompts, groups, strict=True):
            indices = sorted(group.trajectories)
            scored[dataset].append([group.scores[index] for index in indices if index in group.scores])
            samples[dataset] += [group.trajectories[index] for index in indices]
        return {name: self._numbers(rows, samples[name]) for name, rows in scored.items()}

    def _reasons(self, groups: Sequence[Group]) -> dict[str, str]:
        """By dataset: the most frequent cause of its failed samples, as the last of them gives it."""
        logs: defaultdict[str, FailureLog] = defaultdict(FailureLog)
        for (dataset, _), group in zip(self.prompts, groups, strict=True):
            for index in range(group.group_size):
                score = group.scores.get(index)
                if score is None:
                    logs[dataset].note("", "", NO_SCORE)
                elif score.value is None:
                    logs[dataset].note("", "", score.error)
        return {dataset: added_up(log.failures)[0].reason for dataset, log in logs.items()}

    def _numbers(self, scores: list[list[Score]], samples: list[Trajectory]) -> dict[str, float]:
        """`scores` by prompt; those without a value are failed samples."""
        threshold = self.context.config.trainer.algorithm.success_threshold
        flat: list[float] = []
        solved: list[list[bool]] = []
        """By prompt, without those that have no value."""
        for row in scores:
            values = [score.value for score in row if score.value is not None]
            flat += values
            if values:
                solved.append([value >= threshold for value in values])
        pass_at = {}
        for k in self.config.pass_k:
            # Prompts with fewer than k scored samples are left out.
            pass_at[f"pass_at_{k}"] = _mean(
                [pass_at_k(len(row), sum(row), k) for row in solved if len(row) >= k]
            )
        components = component_values(s for row in scores for s in row if s.value is not None)
        return {
            "score": _mean(flat),
            "accuracy": _mean([value >= threshold for value in flat]),
            "pass_at_k": _mean([any(row) for row in solved]),
            "mean_length": _mean([num_sampled(sample) for sample in samples]),
            "clipped_ratio": _mean([sample.finish == "length" for sample in samples]),
            "num_samples": len(flat),
            "num_failed": len(scores) * self.config.samples - len(flat),
            **pass_at,
            **{f"rewards/{name}/mean": _mean(values) for name, values in sorted(components.items())},
        }

    def _ticket(self, number: int, version: int, prompt: Prompt) -> Ticket:
        return Ticket(
            ticket=number,
            step=version,
            min_version=version,
            group_size=self.config.samples,
            sampling=self.sampling,
            **prompt.ticket_fields(),
        )


async def _read_all(reader: OffsetReader[Any], block_s: float = 0.0) -> list[Any]:
    """All new entries, read in parts: at once they could be more than Redis sends to one client."""
    entries = await reader.read(READ_COUNT, block_s)
    if not entries:
        return entries
    while batch := await reader.read(READ_COUNT):
        entries += batch
    return entries


def _missing(groups: Mapping[int, Group]) -> set[TrajectoryKey]:
    """The samples without a trajectory or without its score."""
    return {
        (ticket, index)
        for ticket, group in groups.items()
        for index in range(group.group_size)
        if not (index in group.trajectories and index in group.scores)
    }


def _lost(dead: Mapping[str, set[TrajectoryKey]]) -> set[TrajectoryKey]:
    """The samples that will not come because of these dead letters."""
    keys: set[TrajectoryKey] = set()
    for keys_of_letter in dead.values():
        keys |= keys_of_letter
    return keys


def _keys_of(letter: Entry[DeadLetter] | Garbled, wanted: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """The wanted samples that a dead letter of the evaluation lane says will not come."""
    if isinstance(letter, Garbled) or not letter.message.origin.endswith(EVAL):
        return set()
    ticket = letter.message.ticket
    index = letter.message.index
    return {key for key in wanted if key[0] == ticket and index in (-1, key[1])}


def _mean(values: Sequence[float]) -> float:
    """Mean, NaN for no values: an evaluation without a single score has no result, not a zero."""
    return sum(values) / len(values) if values else float("nan")
