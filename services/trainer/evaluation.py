"""Evaluation on its own lane: held-out prompts, generated and scored before any training work.

While an evaluation of version v runs, newer weights are trained but not announced (`wait`), so that every
token of it comes from version v. Tickets are numbered by version, so that an evaluation which a crash
interrupted goes on where it was.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import structlog

from tidemill.common.process.service import ServiceContext
from tidemill.common.run.state import EVALUATION, METRICS_FILE, read_records
from tidemill.common.streams import (
    START,
    Entry,
    Garbled,
    LettersAbout,
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
from tidemill.common.streams.selection import StreamName
from tidemill.common.telemetry import metrics
from tidemill.common.wire.keys import REWARD_GROUP, ROLLOUT_GROUP
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
from tidemill.services.trainer.batch.reconciler import delete_results
from tidemill.services.trainer.batch.unexpected_entries import remove_unexpected
from tidemill.services.trainer.durable.checkpointing import Trimmer
from tidemill.services.trainer.groups.samples import num_sampled


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """The unbiased estimate 1 - C(n - c, k) / C(n, k) from n samples of which c solve (Chen et al. 2021,
    arXiv 2107.03374, eq. 1), as a product, which does not overflow. Range [0, 1].

    With n = 4, c = 1, k = 2: 1 - C(3, 2) / C(4, 2) = 1 - 3 / 6 = 0.5.

    Raises:
        ValueError: not 1 <= k <= n, or not 0 <= c <= n.
    """
    if not (1 <= k <= num_samples and 0 <= num_solved <= num_samples):
        raise ValueError(f"pass@{k} of {num_solved} solved among {num_samples} samples is not defined")
    fail = 1.0
    for i in range(k):
        fail *= max(0, num_samples - num_solved - i) / (num_samples - i)
    return 1.0 - fail


def mean_pass_at_k(by_prompt: Sequence[Sequence[bool]], k: int) -> float:
    """Mean over prompts, NaN where there is none. Prompts with fewer than k scored samples are left out."""
    values = [pass_at_k(len(row), sum(row), k) for row in by_prompt if len(row) >= k]
    return sum(values) / len(values) if values else float("nan")


log = structlog.get_logger(__name__)

BLOCK_S = 0.5
PASS_AT = "pass_at_"
COMPONENT, MEAN = "rewards/", "/mean"
READ_COUNT = 512

Trajectories = dict[TrajectoryKey, Trajectory]
Scores = dict[TrajectoryKey, Score]


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """One version on one dataset. `score` is avg@k, `accuracy` the share of samples at the threshold,
    `pass_at_k` that of prompts with at least one such sample, and `pass_at` the estimates for smaller k."""

    version: int
    dataset: str
    score: float
    accuracy: float
    pass_at_k: float
    mean_length: float
    clipped_ratio: float
    num_samples: int
    num_failed: int
    pass_at: dict[int, float] = field(default_factory=dict)
    components: dict[str, float] = field(default_factory=dict)
    """Mean of each component of the reward, over the scored samples that have it."""
    at: float = field(default_factory=time.time)

    def metrics(self) -> dict[str, float]:
        others = ("version", "dataset", "pass_at", "components", "at")
        names = [item.name for item in fields(self) if item.name not in others]
        numbers = {name: float(getattr(self, name)) for name in names}
        means = {f"{COMPONENT}{name}{MEAN}": value for name, value in self.components.items()}
        return numbers | {f"{PASS_AT}{k}": value for k, value in self.pass_at.items()} | means


def evaluations_on_record(run_dir: Path) -> list[dict[str, object]]:
    """The evaluations of `metrics.jsonl` as the run's state has them, for a Redis that has lost it."""
    found: list[dict[str, object]] = []
    for record in read_records(run_dir / METRICS_FILE):
        if record["kind"] != EVALUATION:
            continue
        names = [item.name for item in fields(EvaluationResult) if item.name in record]
        pass_at = {k.removeprefix(PASS_AT): v for k, v in record.items() if k.startswith(PASS_AT)}
        pass_at = {k: v for k, v in pass_at.items() if k.isdigit()}
        components = {
            key.removeprefix(COMPONENT).removesuffix(MEAN): value
            for key, value in record.items()
            if key.startswith(COMPONENT) and key.endswith(MEAN)
        }
        found.append(
            {name: record[name] for name in names}
            | {"dataset": record["set"], "pass_at": pass_at, "components": components, "at": record["time"]}
        )
    return found


class Evaluator:
    """Runs one evaluation at a time."""

    def __init__(
        self, context: ServiceContext, datasets: Mapping[str, Sequence[Prompt]], trimmer: Trimmer
    ) -> None:
        self.context, self.config = context, context.config.trainer.evaluation
        self.prompts = [(name, prompt) for name, rows in datasets.items() for prompt in rows]
        limit = context.config.rollout.sampling.max_tokens
        own = self.config.model_dump(include={"temperature", "top_p", "top_k", "min_p"})
        self.sampling = SamplingParams(max_tokens=limit, **own)
        self.trimmer = trimmer
        self._letters_read = START
        """How far the evaluations before have read the dead letters."""

    def is_due(self, version: int, num_steps: int) -> bool:
        """Whether `version` is to be evaluated."""
        if not self.prompts:
            return False
        if version == 0:
            return self.config.at_start
        return version == num_steps or (self.config.every > 0 and version % self.config.every == 0)

    async def evaluate(self, version: int) -> list[EvaluationResult]:
        """Issue the tickets of `version`, wait for every sample, and sum up by dataset. No result at all
        where the streams of this version's evaluation have been trimmed already."""
        first = version * len(self.prompts)
        tickets = [self._ticket(first + i, version, prompt) for i, (_, prompt) in enumerate(self.prompts)]
        if not await self._issue(tickets):
            log.warning("cannot be evaluated again: its tickets were trimmed", version=version)
            return []
        with metrics.EVALUATION_SECONDS.time():
            trajectories, scores = await self._collect(tickets)
        results = self._sum_up(version, first, trajectories, scores)
        for result in results:
            for name, number in result.metrics().items():
                metrics.EVALUATION_METRIC.labels(result.dataset, name).set(number)
            log.log(
                logging.WARNING if result.num_failed else logging.INFO,
                "evaluated",
                version=version,
                dataset=result.dataset,
                score=round(result.score, 4),
                num_samples=result.num_samples,
                num_failed=result.num_failed,
            )
        return results

    async def trim(self, version: int) -> None:
        """Let go of an evaluation whose results are safe: nothing of it is needed again."""
        await delete_results(self.context.broker, self.context.keys, Lane.EVAL, ())
        if not self.context.config.streams.trim:
            return
        broker, keys, epoch = self.context.broker, self.context.keys, self.trimmer.epoch
        below = {
            stream: id_after(await last_id(broker, stream.key(keys)))
            for stream in (StreamName.TRAJECTORIES_EVAL, StreamName.SCORES_EVAL)
        }
        below[StreamName.PROMPTS_EVAL] = entry_id_of((version + 1) * len(self.prompts))
        await self.trimmer.release(below, epoch)

    async def _issue(self, tickets: Sequence[Ticket]) -> bool:
        """Append the tickets that the stream does not have; False where it had them and let them go."""
        broker, key = self.context.broker, self.context.keys.prompts(Lane.EVAL)
        by_number = {ticket.ticket: ticket for ticket in tickets}
        if len(await append_missing(broker, key, list(by_number), by_number.__getitem__)) == len(tickets):
            return True
        floor = entry_id_of(tickets[0].ticket - 1) if tickets[0].ticket else START
        if await remove_unexpected(broker, self.context.keys, key, Ticket, floor):
            await append_missing(broker, key, list(by_number), by_number.__getitem__)
        first, last = entry_id_of(tickets[0].ticket), entry_id_of(tickets[-1].ticket)
        return len(await read_range(broker, key, Ticket, first, last)) == len(tickets)

    async def _collect(self, tickets: Sequence[Ticket]) -> tuple[Trajectories, Scores]:
        """Read the lane until every sample of every ticket is scored or dead, or no more can come."""
        broker, keys = self.context.broker, self.context.keys
        trajectory_reader = OffsetReader(broker, keys.trajectories(Lane.EVAL), Trajectory)
        score_reader = OffsetReader(broker, keys.scores(Lane.EVAL), Score)
        # Letters about these tickets came after the evaluation before.
        dead_reader = OffsetReader(broker, keys.dead, DeadLetter, self._letters_read)
        letters = LettersAbout(broker, keys, score_reader.key)
        wanted = {(t.ticket, index) for t in tickets for index in range(t.group_size)}
        trajectories: Trajectories = {}
        scores: Scores = {}
        is_exhausted = False
        dead: dict[str, set[TrajectoryKey]] = {}
        while wanted - scores.keys() - set().union(*dead.values()) and not is_exhausted:
            if is_exhausted := await self._is_exhausted(tickets):
                # A last look from the start: a server that took over may have given lower ids since.
                trajectory_reader = OffsetReader(broker, keys.trajectories(Lane.EVAL), Trajectory)
                score_reader = OffsetReader(broker, keys.scores(Lane.EVAL), Score)
                dead_reader = OffsetReader(broker, keys.dead, DeadLetter)
            for entry in await trajectory_reader.read(READ_COUNT):
                if isinstance(entry, Entry) and entry.message.key in wanted:
                    trajectories.setdefault(entry.message.key, entry.message)
            batch = await score_reader.read(READ_COUNT, 0.0 if is_exhausted else BLOCK_S)
            while batch:
                for scored in batch:
                    if isinstance(scored, Garbled):
                        await letters.bury_unread(scored, self.context.name)
                    elif scored.message.key in wanted:
                        scores.setdefault(scored.message.key, scored.message)
                batch = await score_reader.read(READ_COUNT)
            for letter in await dead_reader.read(READ_COUNT):
                if keys_lost := _keys_of(letter, wanted):
                    dead[letter.entry_id] = keys_lost
            if wanted <= scores.keys() | set().union(*dead.values()):
                await self._revive(dead)
        # All at once could be more than Redis sends to one client.
        while entries := await trajectory_reader.read(READ_COUNT):
            for trajectory in entries:
                if isinstance(trajectory, Entry) and trajectory.message.key in wanted:
                    trajectories.setdefault(trajectory.message.key, trajectory.message)
        self._letters_read = dead_reader.position
        return trajectories, scores

    async def _revive(self, dead: dict[str, set[TrajectoryKey]]) -> None:
        """Wait again for the samples of letters that are gone: the operator has put them back."""
        for letter_id in list(dead):
            if not await has_entry(self.context.broker, self.context.keys.dead, letter_id):
                del dead[letter_id]

    async def _is_exhausted(self, tickets: Sequence[Ticket]) -> bool:
        """Whether all work on the tickets is done: what is not in the streams now never will be.

        Issues again what Redis has lost. Without this check, one sample whose bytes were damaged on the way
        would keep the run waiting for ever.
        """
        broker, keys = self.context.broker, self.context.keys
        prompts, trajectories = keys.prompts(Lane.EVAL), keys.trajectories(Lane.EVAL)
        newest = entry_id_of(tickets[-1].ticket)
        if await last_id(broker, prompts) != newest:  # lost, or a foreign entry behind it
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

    def _sum_up(
        self, version: int, first: int, trajectories: Trajectories, scores: Scores
    ) -> list[EvaluationResult]:
        scored: dict[str, list[list[Score]]] = defaultdict(list)
        samples: dict[str, list[Trajectory]] = defaultdict(list)
        for i, (dataset, _) in enumerate(self.prompts):
            keys = [(first + i, index) for index in range(self.config.samples)]
            scored[dataset].append([scores[key] for key in keys if key in scores])
            samples[dataset] += [trajectories[key] for key in keys if key in trajectories]
        return [self._result(version, name, scored[name], samples[name]) for name in scored]

    def _result(
        self, version: int, dataset: str, scores: list[list[Score]], samples: list[Trajectory]
    ) -> EvaluationResult:
        """`scores` by prompt; those without a value are failed samples."""
        threshold = self.context.config.trainer.algorithm.success_threshold
        by_prompt = [[score.value for score in row if score.value is not None] for row in scores]
        flat = [value for row in by_prompt for value in row]
        scored = [row for row in by_prompt if row]
        return EvaluationResult(
            version=version,
            dataset=dataset,
            score=_mean(flat),
            accuracy=_mean([value >= threshold for value in flat]),
            pass_at_k=_mean([max(row) >= threshold for row in scored]),
            mean_length=_mean([num_sampled(sample) for sample in samples]),
            clipped_ratio=_mean([sample.finish == "length" for sample in samples]),
            num_samples=len(flat),
            num_failed=len(by_prompt) * self.config.samples - len(flat),
            pass_at={
                k: mean_pass_at_k([[value >= threshold for value in row] for row in scored], k)
                for k in self.config.pass_k
            },
            components=component_means([s for row in scores for s in row if s.value is not None]),
        )

    def _ticket(self, number: int, version: int, prompt: Prompt) -> Ticket:
        return Ticket(
            ticket=number,
            step=version,
            min_version=version,
            group_size=self.config.samples,
            sampling=self.sampling,
            **prompt.ticket_fields(),
        )


def component_means(scores: Sequence[Score]) -> dict[str, float]:
    """The mean of each component over those scores that have it."""
    found: dict[str, list[float]] = defaultdict(list)
    for score in scores:
        for name, value in score.components.items():
            if value is not None:
                found[name].append(value)
    return {name: _mean(values) for name, values in sorted(found.items())}


def _keys_of(letter: Entry[DeadLetter] | Garbled, wanted: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """The samples that a dead letter of the evaluation lane takes away."""
    if isinstance(letter, Garbled) or not letter.message.origin.endswith(":eval"):
        return set()
    ticket, index = letter.message.ticket, letter.message.index
    return {key for key in wanted if key[0] == ticket and index in (-1, key[1])}


def _mean(values: Sequence[float]) -> float:
    """Mean, or NaN of nothing: an evaluation without a single score has no result, not a zero."""
    return sum(values) / len(values) if values else float("nan")
