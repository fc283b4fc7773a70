"""Plays one trial of Harbor (0.26) as the agent program of a session, with a small agent of its own.

    python harbor_trial.py rows TASKS > harbor.jsonl    a folder of tasks as a dataset
    python harbor_trial.py TASKS [options of harbor]    the command of `rollout.environment.agent`

For the interpreter of the virtual environment that has `harbor`: Python 3.12 or newer. It needs Compose 2.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from openai import AsyncOpenAI

MAX_CHARACTERS = 8000
COMMAND_TIMEOUT_S = 60
COMMAND = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
SHELL = {"name": "shell", "description": "Run a command with bash.", "parameters": COMMAND}


class ShellAgent(BaseAgent):
    """Asks the model, runs what it calls, until it calls nothing."""

    @staticmethod
    def name() -> str:
        """As Harbor shows it."""
        return "shell"

    def version(self) -> str:
        """The same."""
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        """Needs nothing in the container."""

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Play the session."""
        client = AsyncOpenAI()
        messages: list[Any] = [{"role": "user", "content": instruction}]
        tools: Any = [{"type": "function", "function": SHELL}]
        model = os.environ["TIDEMILL_MODEL"]
        while True:
            answer = await client.chat.completions.create(model=model, messages=messages, tools=tools)
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return
            for call in message.tool_calls:
                text = await self._run(environment, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})

    async def _run(self, environment: BaseEnvironment, arguments: str) -> str:
        try:
            command = str(json.loads(arguments)["command"])
        except (ValueError, KeyError, TypeError) as error:
            return f"the call is no JSON with a command: {error!r}"
        limited = ["timeout", "-k", "1", str(COMMAND_TIMEOUT_S), "bash", "-c", command]
        ended = await environment.exec(shlex.join(limited))
        output = (ended.stdout or "") + (ended.stderr or "")
        return f"{output[-MAX_CHARACTERS:]}[exit code {ended.return_code}]"


def print_rows(tasks: str) -> None:
    """One row for each folder: its instruction, and its name."""
    for file in sorted(Path(tasks).glob("*/task.toml")):
        prompt = (file.parent / "instruction.md").read_text().strip()
        print(json.dumps({"prompt": prompt, "task": file.parent.name}))


def play(row: dict[str, Any], tasks: str, *options: str) -> dict[str, Any]:
    """Reward of the row's task. Exits where there is none: a trial that failed is no 0."""
    harbor = Path(sys.executable).with_name("harbor")
    with tempfile.TemporaryDirectory() as folder:
        command = [harbor, "trial", "start", "-p", Path(tasks) / row["task"], "-a", "harbor_trial:ShellAgent"]
        command += ["--trials-dir", folder, *options]
        session = os.environ.get("TIDEMILL_SESSION_NAME")
        if session:
            # Harbor names its Compose project by the trial's name.
            command += ["--trial-name", session]
        env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
        done = subprocess.run([*map(str, command)], stdout=subprocess.DEVNULL, env=env)
        if done.returncode:
            sys.exit(done.returncode)
        (file,) = Path(folder).glob("*/result.json")
        return result_of(json.loads(file.read_text()))


def result_of(trial: dict[str, Any]) -> dict[str, Any]:
    """That of a finished trial."""
    error = trial.get("exception_info") or {}
    is_late = error.get("exception_type") == "AgentTimeoutError"
    rewards = (trial.get("verifier_result") or {}).get("rewards") or {}
    if "reward" not in rewards or (error and not is_late):
        sys.exit(f"the trial failed: {error.get('exception_type')}: {error.get('exception_message')}")
    return {"reward": rewards["reward"], "timeout": is_late}


if __name__ == "__main__":
    if sys.argv[1:2] == ["rows"]:
        print_rows(*sys.argv[2:])
    else:
        print(json.dumps(play(json.load(sys.stdin), *sys.argv[1:])))
