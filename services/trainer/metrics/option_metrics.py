"""Metrics of a step that only some runs have: of sessions, of sources of `data.train`, and of teachers."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from tidemill.common.wire.messages import Trajectory
from tidemill.common.wire.segments import SessionEnd
from tidemill.services.trainer.groups.group import Group
from tidemill.services.trainer.groups.sample import Sample, num_sampled
from tidemill.services.trainer.metrics.step_metrics import count_staleness, mean_staleness


def session_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means over sessions, and shares over all their tokens, calls or prompts; nothing without sessions.

    The share of cached prompt tokens is over turns whose engine reports it, and left out without any.
    """
    played = [(t, t.session) for t in trajectories if t.session is not None]
    if not played:
        return {}
    segments = [segment for t, _ in played for segment in t.segments]
    turns = [turn for segment in segments for turn in segment.turns]
    num_completion = sum(len(segment.completion_ids) for segment in segments)
    num_calls = sum(turn.num_calls for turn in turns)
    reporting = [turn for turn in turns if turn.num_cached_tokens >= 0]
    num_known = sum(turn.num_prompt_tokens for turn in reporting)
    numbers = {
        "sessions/mean_turns": len(turns) / len(played),
        "sessions/mean_segments": len(segments) / len(played),
        "sessions/environment_tokens_share": 1.0
        - sum(num_sampled(t) for t, _ in played) / max(num_completion, 1),
        "sessions/tool_calls": num_calls / len(played),
        "sessions/wrong_calls_share": sum(turn.num_wrong_calls for turn in turns) / max(num_calls, 1),
        "sessions/faults": float(sum(session.num_faults for _, session in played)),
        "sessions/engine_s": sum(turn.engine_s for turn in turns) / len(played),
        "sessions/environment_s": sum(turn.environment_s for turn in turns) / len(played),
    }
    for end in get_args(SessionEnd):
        numbers[f"sessions/ended_{end}"] = float(np.mean([session.end == end for _, session in played]))
    if num_known:
        numbers["sessions/cached_prompt_share"] = (
            sum(turn.num_cached_tokens for turn in reporting) / num_known
        )
    return numbers


def source_metrics(step: int, groups: Sequence[Group], success_threshold: float) -> dict[str, float]:
    """For each source that the step trained on: groups, means over completions, staleness of trained tokens;
    for demonstrations only groups and length. A run of one training set without a name has none.

    A pass rate is the share of rewards of at least `success_threshold`, over the samples that have one.
    """
    by_source: defaultdict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_source[next(iter(group.trajectories.values())).source].append(group)
    by_source.pop("", None)
    numbers: dict[str, float] = {}
    for name, of_source in sorted(by_source.items()):
        numbers[f"source/{name}/groups"] = float(len(of_source))
        if of_source[0].is_demonstration:
            completions = [t for group in of_source for t in group.trajectories.values()]
            numbers[f"source/{name}/mean_length"] = float(np.mean(list(map(num_sampled, completions))))
            continue
        rewards = np.concatenate([group.rewards for group in of_source])
        staleness = count_staleness(step, of_source)
        numbers |= {
            f"source/{name}/reward": float(rewards.mean()),
            f"source/{name}/pass_rate": float((rewards >= success_threshold).mean()),
            f"source/{name}/mean_length": float(
                np.mean([num_sampled(t) for group in of_source for t in group.sampled])
            ),
            f"source/{name}/staleness": mean_staleness(staleness),
        }
    return numbers


def teacher_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """`teacher/<name>/reverse_kl` of each teacher: the mean of log p_rollout - log p_teacher over the trained
    tokens of its samples, an estimate of KL(rollout || teacher) a token; and the number of these tokens.

    Samples with sampling masks are left out of the mean: their rollout logprobs are over other ids than the
    teacher's. `teacher_kl` of the loss has them.
    """
    taught = [sample for sample in samples if sample.teacher]
    if not taught:
        return {}
    from tidemill.services.trainer.algorithm.advantages.teacher import log_ratios  # few runs have teachers

    gaps: defaultdict[str, list[NDArray[np.float64]]] = defaultdict(list)
    num_tokens: Counter[str] = Counter()
    for sample in taught:
        num_tokens[sample.teacher] += sample.num_trained
        if sample.kept is None:
            gaps[sample.teacher].append(log_ratios(sample))
    metrics: dict[str, float] = {}
    for name in sorted(num_tokens):
        metrics[f"teacher/{name}/tokens"] = float(num_tokens[name])
        if name in gaps:
            gap_N = np.concatenate(gaps[name])
            metrics[f"teacher/{name}/reverse_kl"] = float(gap_N.mean()) if len(gap_N) else 0.0
    return metrics
