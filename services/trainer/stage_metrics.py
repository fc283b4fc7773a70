"""What a step's own trajectories and scores tell of the stages before the trainer.

`tidemill plan` computes from these numbers how many workers a run needs. Clocks of several machines differ:
only differences of one clock are counted, and none is shorter than nothing.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from common.messages import Score, Trajectory

BYTES_OF_A_TOKEN = 4
"""Of an id, and of a logprob."""
ENTRY_BYTES = 500
"""Of a trajectory and its score besides ids, logprobs and text: field names, times, Redis's own."""


def stage_metrics(
    trajectories: Sequence[Trajectory], scores: Sequence[Score], queued: Sequence[float] = ()
) -> dict[str, float]:
    """Times and sizes of one step; `scores` may be fewer than `trajectories`.

    `queued` says how long trajectories waited for their rewards, by one clock; a step that is replayed from
    records alone has none of that.
    """
    if not trajectories or not scores:
        return {}
    latencies = np.array([score.latency_s for score in scores])
    generations = np.array([max(0.0, t.finished_at - t.started_at) for t in trajectories])
    waiting = {"stages/reward_queue_s": float(np.mean(queued))} if queued else {}
    return waiting | {
        "stages/generation_s": float(generations.mean()),
        "stages/generation_p95_s": float(np.quantile(generations, 0.95)),
        "stages/rollout_workers": float(len({trajectory.worker for trajectory in trajectories})),
        "stages/rollout_busy_s": _busy_s((t.worker, t.started_at, t.finished_at) for t in trajectories),
        "stages/score_s": float(latencies.mean()),
        "stages/score_p95_s": float(np.quantile(latencies, 0.95)),
        "stages/scores": float(len(scores)),
        "stages/reward_workers": float(len({score.worker for score in scores})),
        "stages/reward_busy_s": _busy_s((s.worker, s.scored_at - s.latency_s, s.scored_at) for s in scores),
        "stages/record_bytes": float(np.mean([record_bytes(trajectory) for trajectory in trajectories])),
    }


def record_bytes(trajectory: Trajectory) -> int:
    """What Redis holds for one trajectory and its score, about."""
    ids = BYTES_OF_A_TOKEN * (len(trajectory.prompt_ids) + 2 * trajectory.num_tokens)
    text = len(trajectory.text.encode()) + len(trajectory.prompt_text.encode())
    return ids + text + ENTRY_BYTES


def _busy_s(intervals: Iterable[tuple[str, float, float]]) -> float:
    """Seconds in which each worker had at least one of its intervals going, summed over the workers."""
    by_worker: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for worker, begun, ended in intervals:
        by_worker[worker].append((begun, ended))
    total_s = 0.0
    for spans in by_worker.values():
        covered_until = -np.inf
        for begun, ended in sorted(spans):
            total_s += max(0.0, ended - max(begun, covered_until))
            covered_until = max(covered_until, ended)
    return float(total_s)
