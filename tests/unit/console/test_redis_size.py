"""Memory of a run in Redis, with numbers worked out by hand."""

from typing import Any

import pytest

from tests.support.trajectories import make_config
from tidemill.services.console.check.explain import redis_bytes

NO_ARCHIVE = {"archive": {"enabled": False}}
RECORD = 4 * (2 * 100 + 3 * 200) + 500
"""Twice the prompt, three times the completion, and the entry's own fields."""


def held(streams: Any, **trainer: Any) -> Any:
    """A step has 4 groups of 5; two checkpoints are kept, three steps apart."""
    shape = {
        "groups_per_step": 4,
        "group_size": 5,
        "steps": 100,
        "checkpoint_every": 3,
        "keep_checkpoints": 2,
    }
    sections: dict[str, Any] = {"rollout": {"sampling": {"max_tokens": 200}}}
    sections |= {"data": {"train": "t.jsonl", "max_prompt_tokens": 100}, "streams": streams}
    return redis_bytes(make_config(trainer=shape | trainer, **sections))


@pytest.mark.parametrize(
    ("streams", "trainer", "steps", "commits"),
    [
        # This step, the one ahead, and those since the oldest kept checkpoint; 32 commits stay beside them.
        (NO_ARCHIVE, {}, 1 + 1 + 3 * 2, 6 + 32),
        (NO_ARCHIVE, {"max_staleness": 0}, 1 + 6, 6 + 32),
        (NO_ARCHIVE, {"steps": 4}, 2 + 4, 4),
        (NO_ARCHIVE, {"checkpoint_every": 0}, 2 + 100, 100),
        ({"trim": False}, {}, 2 + 100, 100),
        # The archive has the rest, but for what waits to be written: here all of it.
        ({}, {}, 2 + 100, 32),
    ],
)
def test_redis_holds_what_is_under_way_and_what_the_oldest_checkpoint_needs(
    streams: Any, trainer: dict[str, Any], steps: int, commits: int
) -> None:
    assert held(streams, **trainer) == steps * 20 * RECORD + commits * (2000 + 16 * 20)


def test_what_waits_for_the_archive_is_one_and_a_half_files() -> None:
    streams = {"archive": {"segment_mb": 0.25}}
    assert held(streams) == 2 * 20 * RECORD + 32 * (2000 + 16 * 20) + int(1.5 * 2**18)
