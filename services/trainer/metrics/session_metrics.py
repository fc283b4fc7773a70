"""The numbers of a step's sessions, `sessions/*`; a run of single turns has none of them."""

from collections.abc import Sequence
from typing import get_args

import numpy as np

from tidemill.common.wire.messages import Trajectory
from tidemill.common.wire.segments import SessionEnd
from tidemill.services.trainer.groups.samples import num_sampled


def session_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means over sessions, and shares over all their tokens, calls or prompts; nothing without sessions.

    A share of cached prompt tokens is that of turns of which the engine says it; without any it is not there.
    """
    played = [(t, t.session) for t in trajectories if t.session is not None]
    if not played:
        return {}
    segments = [segment for t, _ in played for segment in t.segments]
    turns = [turn for segment in segments for turn in segment.turns]
    num_completion = sum(len(segment.completion_ids) for segment in segments)
    num_calls = sum(turn.num_calls for turn in turns)
    known = [turn for turn in turns if turn.num_cached_tokens >= 0]
    num_known = sum(turn.num_prompt_tokens for turn in known)
    metrics = {
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
        metrics[f"sessions/ended_{end}"] = float(np.mean([session.end == end for _, session in played]))
    if num_known:
        metrics["sessions/cached_prompt_share"] = sum(turn.num_cached_tokens for turn in known) / num_known
    return metrics
