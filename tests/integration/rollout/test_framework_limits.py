"""Public agents and frameworks at a session's limit: each ends soon, and its own reward is kept.

They are installed into folders below build/. Where they cannot be, the tests are skipped.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import framework_programs
from tests.support.scripted_model import ScriptedModel, agent_player, call_line, make_ticket
from tests.support.venvs import BUILD, python_with
from tidemill.common.wire.messages import SamplingParams

PROGRAMS = Path(framework_programs.__file__)
PACKAGES = [
    *("openai", "anthropic", "litellm", "mini-swe-agent>=2.4,<3", "langchain-openai", "smolagents[openai]"),
    *("agno>=3,<4", "pydantic-ai-slim[openai]>=2,<3", "openai-agents"),
]
NPM = {"codex": "@openai/codex@0.171.0", "claude": "@anthropic-ai/claude-code@2"}
CODEX = (
    "codex exec --skip-git-repo-check -m m -c model_provider=t -c \"model_providers.t={name='t', "
    "base_url='$OPENAI_BASE_URL', env_key='OPENAI_API_KEY', wire_api='responses'}\" 'Go on.'"
)
COMMANDS = {"codex": CODEX, "claude": "claude -p 'Go on.' --model m"}
NOOP = call_line("noop", number=1)
LINES = {
    "mini_swe_agent": call_line("bash", command="true"),
    **dict.fromkeys(("pydantic_ai", "smolagents", "agno", "openai_agents"), NOOP),
    "codex": call_line("exec_command", cmd="echo 7"),
    "claude": call_line("Bash", command="echo 7", description="Print 7."),
}
ENDS_S = 15.0
MAX_TURNS = 2

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def python() -> Path:
    """An interpreter that has the frameworks."""
    return python_with("agent-clients", "minisweagent, agno, agents, smolagents", PACKAGES)


@pytest.fixture(scope="module")
def programs() -> Path:
    """A folder with the commands of npm's packages."""
    folder = BUILD / "agent-programs"
    commands = folder / "node_modules" / ".bin"
    if not shutil.which("npm"):
        pytest.skip("npm is not there: apt-get install npm")
    if not all((commands / name).exists() for name in NPM):
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(["npm", "install", *NPM.values()], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{folder} cannot be made: {done.stderr.strip()[-200:]}")
    return commands


async def play(command: str, line: str, max_turns: int) -> tuple[Any, float]:
    """The session, and how long its program went on after the model's last turn."""
    model = ScriptedModel(*[line] * max_turns)
    answered_at = 0.0

    async def ask(ids: Sequence[int], sampling: SamplingParams) -> Any:
        nonlocal answered_at
        answered_at = time.monotonic()
        return await model.ask(ids, sampling)

    ticket = make_ticket(max_tokens=500)
    async with agent_player(f"$ {command}", max_model_len=1 << 18, max_turns=max_turns) as player:
        played = await player.play(ticket, "s", ask)
    return played.session, time.monotonic() - answered_at


FRAMEWORKS = [
    *("openai_chat", "openai_responses", "anthropic_messages", "litellm_openai", "litellm_retries"),
    *("litellm_anthropic", "mini_swe_agent", "langchain", "pydantic_ai", "smolagents", "agno"),
    "openai_agents",
]


@pytest.mark.parametrize("name", FRAMEWORKS)
async def test_a_framework_that_meets_a_limit_ends_soon_with_its_reward(python: Path, name: str) -> None:
    session, ending_s = await play(f"{python} -P {PROGRAMS} {name}", LINES.get(name, "ok"), MAX_TURNS)
    turns = sum(len(segment.turns) for segment in (session, *session.forks))
    assert (session.end, session.reward, turns, session.unread) == ("max_turns", 0.5, MAX_TURNS, ())
    assert ending_s < ENDS_S


@pytest.mark.parametrize("name", list(NPM))
async def test_a_coding_agent_plays_a_session_and_meets_a_limit(programs, name, monkeypatch, tmp_path):
    for variable in ("HOME", "CODEX_HOME", "CLAUDE_CONFIG_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setenv("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    command = f"cd {tmp_path}; {COMMANDS[name]} </dev/null >&2; echo '{{\"reward\": 0.5}}'"
    session, ending_s = await play(command, LINES[name], MAX_TURNS)
    assert (session.end, session.reward, session.histories) == ("max_turns", 0.5, {"clean": 1})
    assert any("7" in str(message["content"]) for message in session.messages if message["role"] == "tool")
    assert ending_s < ENDS_S
