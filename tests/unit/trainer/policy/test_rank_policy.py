"""Calls of ranks that take each of them its own time."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tidemill.services.trainer.policy.fsdp.rank_policy import RankPolicy
from tidemill.services.trainer.policy.transformers_policy import TransformersPolicy


def test_ranks_meet_once_each_has_read_its_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else the fastest would wait for the others in a call on GPUs, which gives up after minutes."""
    events: list[str] = []
    monkeypatch.setattr(TransformersPolicy, "load_state", lambda *_: events.append("read"))
    policy = object.__new__(RankPolicy)
    policy.__dict__["_ranks"] = SimpleNamespace(meet=lambda: events.append("met"))
    policy.load_state(tmp_path)
    assert events == ["read", "met"]
