"""What a rollout worker says it waits for."""

from types import SimpleNamespace
from typing import Any

import pytest

from tidemill.services.rollout.service import _state_of


def state(running: int = 0, waiting: int = 0, wanted: int = 0, held: int = 0, playing: int = 0) -> str:
    engine: Any = SimpleNamespace(num_running=running)
    follower: Any = SimpleNamespace(num_waiting=waiting)
    workers: Any = [
        SimpleNamespace(running=set(), num_wanted=0, num_playing=0),
        SimpleNamespace(running=set(range(held)), num_wanted=wanted, num_playing=playing),
    ]
    return _state_of(engine, follower, workers)[0]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({}, "wait:tickets"),
        ({"held": 2, "running": 1, "waiting": 1, "wanted": 1}, "generate"),
        ({"held": 2, "waiting": 1}, "wait:weights"),
        ({"held": 2, "wanted": 8}, "wait:device"),
        ({"held": 2, "playing": 1}, "wait:environment"),
        ({"held": 2}, "wait:redis"),
    ],
)
def test_the_cause_is_what_all_held_groups_lack(found: dict[str, int], expected: str) -> None:
    assert state(**found) == expected
