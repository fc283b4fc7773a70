"""Public agents and frameworks as programs of sessions: how each is installed, started and answered.

Python's are functions of `framework_programs.py`, in virtual environments below build/; npm's are commands.
"""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.support.scripted_model import call_line
from tests.support.venvs import BUILD, python_with

PROGRAMS = Path(__file__).with_name("framework_programs.py")


@dataclass(frozen=True)
class Venv:
    """Packages that can be installed together."""

    folder: str
    modules: str
    packages: tuple[str, ...]
    python: str = sys.executable


NEWEST = Venv(
    "agent-clients",
    "minisweagent, agno, agents, smolagents, langgraph, inspect_ai",
    (
        *("openai==3.57.0", "anthropic==2.14.0", "litellm==1.110.2", "mini-swe-agent==2.4.6"),
        *("langchain==1.5.2", "langchain-openai==1.7.4", "langgraph==1.2.24", "smolagents[openai]==1.26.0"),
        *("agno==3.1.10", "pydantic-ai-slim[openai]==2.68.0", "openai-agents==0.24.0"),
        "inspect-ai==0.3.285",
    ),
)
OF_OPENAI_2 = Venv(
    "agent-clients-openai-2",
    "strands, autogen_agentchat, haystack, llama_index.llms.openai_like, dspy",
    (
        *("openai==2.54.0", "strands-agents[openai]==1.62.0", "autogen-agentchat==0.7.5"),
        *("autogen-ext[openai]==0.7.5", "haystack-ai==3.4.1", "llama-index-core==0.14.25"),
        *("llama-index-llms-openai-like==0.8.1", "dspy==3.4.1", "litellm==1.110.2"),
    ),
)
OF_CREWAI = Venv("agent-clients-crewai", "crewai", ("openai==2.54.0", "crewai==1.15.30"))
OF_OPENHANDS = Venv("agent-clients-openhands", "openhands.sdk", ("openhands-sdk==1.58.2",), "python3.12")
NPM = {"codex": "@openai/codex@0.171.0", "claude": "@anthropic-ai/claude-code@2.1.332"}
CODEX = (
    "codex exec --skip-git-repo-check -m m -c model_provider=t -c \"model_providers.t={name='t', "
    "base_url='$OPENAI_BASE_URL', env_key='OPENAI_API_KEY', wire_api='responses'}\" 'Go on.'"
)
COMMANDS = {"codex": CODEX, "claude": "claude -p 'Go on.' --model m"}

RAW = [
    *("openai_chat", "openai_stream", "openai_responses", "anthropic_messages", "litellm_openai"),
    *("litellm_retries", "litellm_anthropic", "langchain"),
]
"""Loops of a user around a client: they need no calls."""
VENVS = {
    **dict.fromkeys(RAW, NEWEST),
    **dict.fromkeys(("mini_swe_agent", "langgraph", "pydantic_ai", "smolagents"), NEWEST),
    **dict.fromkeys(("agno", "openai_agents", "inspect_ai"), NEWEST),
    **dict.fromkeys(("strands", "autogen", "haystack", "llama_index", "dspy"), OF_OPENAI_2),
    "crewai": OF_CREWAI,
    "openhands": OF_OPENHANDS,
}
"""Name of a program -> where its framework is installed."""


def line_of(name: str, mark: str = "7") -> str:
    """What the model says to keep this program going; the mark is in its text, and in its call."""
    if name in RAW:
        return mark
    if name == "dspy":
        fields = {"next_thought": mark, "next_tool_name": "noop", "next_tool_args": f'{{"text": "{mark}"}}'}
        blocks = [f"[[ ## {field} ## ]]\n{value}" for field, value in fields.items()]
        return "\n\n".join([*blocks, "[[ ## completed ## ]]"])
    calls = {
        "mini_swe_agent": call_line("bash", command=f"true {mark}"),
        "codex": call_line("exec_command", cmd=f"echo {mark}"),
        "openhands": call_line("think", thought=mark),
        "claude": call_line("Bash", command=f"echo {mark}", description="Print it."),
    }
    return mark + calls.get(name, call_line("noop", text=mark))


@cache
def python_in(venv: Venv) -> Path:
    """The interpreter of an environment; the test is skipped where it cannot be made."""
    return python_with(venv.folder, venv.modules, venv.packages, base=venv.python)


def npm_commands() -> Path:
    """A folder with the commands of npm's packages; the test is skipped where it cannot be made."""
    folder = BUILD / "agent-programs"
    commands = folder / "node_modules" / ".bin"
    if not shutil.which("npm"):
        pytest.skip("npm is not there: apt-get install npm")
    if not all(_is_installed(package, folder) for package in NPM.values()):
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(["npm", "install", *NPM.values()], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{folder} cannot be made: {done.stderr.strip()[-200:]}")
    return commands


def _is_installed(package: str, folder: Path) -> bool:
    """Whether the folder has npm's package in this version."""
    name, _, version = package.rpartition("@")
    description = folder / "node_modules" / name / "package.json"
    return description.exists() and json.loads(description.read_text())["version"] == version


def command_of(name: str, folder: Path, num_tries: int = 1, raises: bool = False) -> str:
    """The shell command of a session of this program, whose own files are in `folder`.

    It has a reward however its agent ends; with `raises`, which Python's have, it fails where its agent does.
    """
    if name not in NPM:
        return f"NUM_TRIES={num_tries} RAISES={int(raises)} {python_in(VENVS[name])} -P {PROGRAMS} {name}"
    variables = {"PATH": f"{npm_commands()}:$PATH"}
    variables |= dict.fromkeys(("HOME", "CODEX_HOME", "CLAUDE_CONFIG_DIR"), str(folder))
    exported = "; ".join(f'export {name}="{value}"' for name, value in variables.items())
    numbers = " ".join(str(number) for number in range(num_tries))
    tries = f"for number in {numbers}; do {COMMANDS[name]} </dev/null >&2 && break; done"
    return f"{exported}; cd {folder}; {tries}; echo '{{\"reward\": 0.5}}'"
