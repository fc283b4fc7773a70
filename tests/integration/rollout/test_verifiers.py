"""Environments of verifiers behind the gateway, by their own runner, in a virtual environment of its own: its
dependencies clash with ours."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripted_model import ScriptedModel, agent_player, call_line, make_ticket
from tests.support.venvs import python_with
from tidemill.common.errors import EnvironmentFaultError

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "verifiers"
HARNESS = "--env.agent.harness.id null --env.agent.runtime.type subprocess"
CALL = call_line("doubler_double", number=7)

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def python() -> Path:
    """An interpreter that has `verifiers`, whose harnesses can install what they need."""
    return python_with("verifiers", "verifiers.v1", ["verifiers>=0.4,<0.5", "uv"])


@pytest.fixture(autouse=True)
def index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Harnesses are installed by uv, which does not read pip's configuration."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    finished = subprocess.run(command, capture_output=True, text=True)
    if not finished.returncode and "UV_DEFAULT_INDEX" not in os.environ:
        monkeypatch.setenv("UV_DEFAULT_INDEX", finished.stdout.strip())
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLE))


async def play(command: str, row: dict[str, Any], *models: ScriptedModel) -> Sequence[Any]:
    ticket = make_ticket(row["prompt"], extra=row, ground_truth="")
    async with agent_player(f"$ {command}") as player:
        return await asyncio.gather(*(player.play(ticket, f"s{i}", m.ask) for i, m in enumerate(models)))


ROW = {"prompt": "Double 7.", "task": 6}


async def test_sessions_are_one_rollout_each_with_its_tools_and_the_runners_reward(python: Path) -> None:
    models = [ScriptedModel(CALL, "14"), ScriptedModel("13")]
    command = f"{python} {EXAMPLE / 'play.py'} doubling {HARNESS}"
    right, wrong = await play(command, ROW, *models)
    assert right.session.reward == 1.0 and wrong.session.reward == 0.0
    assert right.session.metrics == {"correct": 1.0} and right.session.histories == {"clean": 1}
    said = [(message["role"], message["content"]) for message in right.session.messages]
    assert said == [("assistant", ""), ("tool", "14"), ("assistant", "14")]
    assert not right.session.forks and right.first.prompt_ids.tolist() == models[0].seen[0]
    sampled = [token for line in models[0].said for token in line]
    assert right.first.completion_ids[right.first.mask].tolist() == sampled


@pytest.mark.parametrize(
    ("row", "options", "words"),
    [
        (ROW, "--client.base-url http://127.0.0.1:9", "the rollout failed: .*connection attempts"),
        (ROW, "--env.agent.harnes.id bash", "harnes"),
        ({"prompt": "Double 7."}, "", "play.py rows"),
    ],
)
async def test_a_rollout_that_fails_is_a_fault_and_never_a_reward(python, row, options, words):
    command = f"{python} {EXAMPLE / 'play.py'} doubling {HARNESS} {options}"
    with pytest.raises(EnvironmentFaultError, match=f"(?s){words}"):
        await play(command, row, ScriptedModel())
