"""Evaluation on its own lane: held-out prompts, generated and scored before any training work.

While an evaluation of version v runs, newer weights are trained but not announced (`wait`), so that
every token of it comes from version v. Tickets are numbered by version, so that an evaluation which a
crash interrupted goes on where it was.
"""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from common import metrics
from common.config import RunConfig
from common.messages import DeadLetter, Lane, SamplingParams, Score, Ticket, Trajectory
from common.service import ServiceContext
from common.streams import (
    Entry,
    Garbled,
    OffsetReader,
    append_numbered,
    entry_id_of,
    last_id,
    trim_before,
)
from services.trainer.prompts import Prompt

log = structlog.get_logger(__name__)

BLOCK_S = 0.5
READ_COUNT = 512


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """One version on one dataset. `score` is avg@k, `accuracy` the share of samples at the threshold."""

    version: int
    dataset: str
    score: float
    accuracy: float
    pass_at_k: float
    mean_length: float
    clipped_ratio: float
    num_samples: int
    num_failed: int
    at: float = field(default_factory=time.time)

    def metrics(self) -> dict[str, float]:
        """For the recorder."""
        names = (
            "score",
            "accuracy",
            "pass_at_k",
            "mean_length",
            "clipped_ratio",
            "num_samples",
            "num_failed",
        )
        return {name: float(getattr(self, name)) for name in names}


class Evaluator:
    """Runs one evaluation at a time."""

    def __init__(self, context: ServiceContext, datasets: Mapping[str, Sequence[Prompt]]) -> None:
        self.context, self.config = context, context.config.trainer.evaluation
        self.prompts = [(name, prompt) for name, rows in datasets.items() for prompt in rows]
        self.sampling = _sampling(context.config)

    def is_due(self, version: int, num_steps: int) -> bool:
        """Whether `version` is to be evaluated."""
        if not self.prompts:
            return False
        if version == num_steps:
            return self.config.at_end
        if version == 0:
            return self.config.at_start
        return self.config.every > 0 and version % self.config.every == 0

    async def evaluate(self, version: int) -> list[EvaluationResult]:
        """Issue the tickets of `version`, wait for every sample, and sum up by dataset."""
        keys, broker = self.context.keys, self.context.broker
        first = version * len(self.prompts)
        tickets = [self._ticket(first + i, version, prompt) for i, (_, prompt) in enumerate(self.prompts)]
        dead_from = await last_id(broker, keys.dead)
        await append_numbered(broker, keys.prompts(Lane.EVAL), ((t.ticket, t) for t in tickets))
        trajectories, scores = await self._collect(tickets, dead_from)
        if self.context.config.streams.trim:
            await self._trim(first + len(tickets))
        results = self._sum_up(version, first, trajectories, scores)
        for result in results:
            metrics.EVALUATION_SCORE.labels(result.dataset).set(result.score)
            log.info("evaluated", version=version, dataset=result.dataset, score=round(result.score, 4))
        return results

    async def _collect(
        self, tickets: Sequence[Ticket], dead_from: str
    ) -> tuple[dict[tuple[int, int], Trajectory], dict[tuple[int, int], Score]]:
        """Read the lane until every sample of every ticket is scored or dead."""
        broker, keys = self.context.broker, self.context.keys
        trajectory_reader = OffsetReader(broker, keys.trajectories(Lane.EVAL), Trajectory)
        score_reader = OffsetReader(broker, keys.scores(Lane.EVAL), Score)
        dead_reader = OffsetReader(broker, keys.dead, DeadLetter, dead_from)
        wanted = {(t.ticket, index) for t in tickets for index in range(t.group_size)}
        trajectories: dict[tuple[int, int], Trajectory] = {}
        scores: dict[tuple[int, int], Score] = {}
        while wanted - scores.keys():
            for entry in await trajectory_reader.read(READ_COUNT):
                if isinstance(entry, Entry) and entry.message.key in wanted:
                    trajectories.setdefault(entry.message.key, entry.message)
            for scored in await score_reader.read(READ_COUNT, BLOCK_S):
                if isinstance(scored, Entry) and scored.message.key in wanted:
                    scores.setdefault(scored.message.key, scored.message)
            for letter in await dead_reader.read(READ_COUNT):
                wanted -= _keys_of(letter, wanted)
        for trajectory in await trajectory_reader.read(READ_COUNT * len(tickets)):
            if isinstance(trajectory, Entry) and trajectory.message.key in wanted:
                trajectories.setdefault(trajectory.message.key, trajectory.message)
        return trajectories, scores

    async def _trim(self, next_ticket: int) -> None:
        """Nothing of a finished evaluation is needed again."""
        broker, keys = self.context.broker, self.context.keys
        for key in (keys.trajectories(Lane.EVAL), keys.scores(Lane.EVAL)):
            await trim_before(broker, key, _after(await last_id(broker, key)))
        await trim_before(broker, keys.prompts(Lane.EVAL), entry_id_of(next_ticket))

    def _sum_up(
        self,
        version: int,
        first: int,
        trajectories: Mapping[tuple[int, int], Trajectory],
        scores: Mapping[tuple[int, int], Score],
    ) -> list[EvaluationResult]:
        values: dict[str, list[list[float]]] = defaultdict(list)
        samples: dict[str, list[Trajectory]] = defaultdict(list)
        for i, (dataset, _) in enumerate(self.prompts):
            keys = [(first + i, index) for index in range(self.config.samples)]
            known = [scores[key].value for key in keys if key in scores]
            values[dataset].append([value for value in known if value is not None])
            samples[dataset] += [trajectories[key] for key in keys if key in trajectories]
        return [self._result(version, name, values[name], samples[name]) for name in values]

    def _result(
        self, version: int, dataset: str, by_prompt: list[list[float]], samples: list[Trajectory]
    ) -> EvaluationResult:
        threshold = self.config.success_threshold
        flat = [value for row in by_prompt for value in row]
        scored = [row for row in by_prompt if row]
        return EvaluationResult(
            version=version,
            dataset=dataset,
            score=_mean(flat),
            accuracy=_mean([value >= threshold for value in flat]),
            pass_at_k=_mean([max(row) >= threshold for row in scored]),
            mean_length=_mean([sample.num_tokens for sample in samples]),
            clipped_ratio=_mean([sample.finish == "length" for sample in samples]),
            num_samples=len(flat),
            num_failed=len(by_prompt) * self.config.samples - len(flat),
        )

    def _ticket(self, number: int, version: int, prompt: Prompt) -> Ticket:
        return Ticket(
            ticket=number,
            step=version,
            min_version=version,
            group_size=self.config.samples,
            sampling=self.sampling,
            row=prompt.row,
            prompt_ids=prompt.ids,
            prompt_text=prompt.text,
            data_source=prompt.data_source,
            ground_truth=prompt.ground_truth,
            extra=prompt.extra,
        )


def _sampling(config: RunConfig) -> SamplingParams:
    return SamplingParams(
        max_tokens=config.rollout.sampling.max_tokens, temperature=config.trainer.evaluation.temperature
    )


def _keys_of(letter: Entry[DeadLetter] | Garbled, wanted: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """The samples that a dead letter of the evaluation lane takes away."""
    if isinstance(letter, Garbled) or not letter.message.origin.endswith(":eval"):
        return set()
    ticket, index = letter.message.ticket, letter.message.index
    return {key for key in wanted if key[0] == ticket and index in (-1, key[1])}


def _after(entry_id: str) -> str:
    milliseconds, _, sequence = entry_id.partition("-")
    return f"{milliseconds}-{int(sequence) + 1}"


def _mean(values: Sequence[float]) -> float:
    """Mean, or NaN of nothing: an evaluation without a single score has no result, not a zero."""
    return sum(values) / len(values) if values else float("nan")
