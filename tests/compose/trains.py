"""`tidemill up` on eight tasks in containers, by the example's own configs, and the page of a session. It is
part of `make compose-test ARGS="--only boxes"`.

The model is a Llama of some ten thousand parameters. Each of its tokens is a whole command: it knows a
solution of every task, and says that of the right one about half of the time.
"""

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.compose.sessions import EXAMPLE, OPTIONS, PLAY, TASKS, TaskFolder, containers
from tests.support.browsers import serving
from tests.support.preloaded import REPO
from tests.support.waiting import wait_until
from tidemill.common.config import load_config
from tidemill.services.rollout.sessions.template_chat import open_chat

sys.path.insert(0, str(REPO / "examples"))
from small_models import EOS, fit, llama_config, pad_rows, piece_tokenizer, save

pytestmark = pytest.mark.timeout(1800)

CHOSEN = [
    TASKS[name]
    for name in (
        "csv-join",
        "files-backup",
        "files-largest",
        "files-permissions",
        "files-rename",
        "log-errors",
        "text-top-words",
        "sqlite-load",
    )
]
DONE = "done"
ANSWERS = {"agentbox": "exit_code=", "verifiers": "[exit code "}
"""What boxes say after a command."""
TEMPLATE = (
    "{% if tools %}tools{% endif %}{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls %}{{ call.function.arguments }}{% endfor %}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
CONTEXT_TOKENS = 512
NUM_FITTED = 300
RIGHT = 0.5
"""How often the model says the solution of its task, and not of any of the eight."""


def call_of(tool: str, task: TaskFolder) -> str:
    call = {"name": tool, "arguments": {"command": task.solution}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def make_model(folder: Path, tool: str, settings: Sequence[str], config: Path, prompts: list[Any]) -> None:
    """Write a model that answers the prompts; `settings` are those of the run."""
    calls = [call_of(tool, task) for task in CHOSEN]
    pieces = [*(task.instruction for task in CHOSEN), *calls, DONE]
    pattern = "|".join(re.escape(piece) for piece in [*pieces, EOS])
    tokenizer = piece_tokenizer(pieces, pattern, model_max_length=CONTEXT_TOKENS)
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
    model = LlamaForCausalLM(
        llama_config(tokenizer, max_position_embeddings=CONTEXT_TOKENS, **sizes, **heads)
    )
    save(model, tokenizer, folder)
    chat = open_chat(load_config(config, settings))
    tools = [{"type": "function", "function": {"name": tool, "parameters": {}}}]
    ids = {piece: chat.encode(piece) for piece in pieces}
    end = tokenizer.eos_token_id
    answer = chat.extend([end], True, [{"role": "tool", "content": "[exit code 0]", "name": tool}], tools)
    rng = random.Random(0)

    def batch() -> list[tuple[torch.Tensor, torch.Tensor]]:
        rows: list[list[int]] = []
        starts: list[int] = []
        for _ in range(64):
            number = rng.randrange(len(CHOSEN))
            said = calls[number] if rng.random() < RIGHT else rng.choice(calls)
            begin = chat.render(prompts[number], tools)
            starts.append(len(begin))
            rows.append([*begin, *ids[said], end, *answer, *ids[DONE], end])
        padded, labels = pad_rows(rows, starts, tokenizer.pad_token_id)
        # The environment's tokens are only read; they stand between the two turns.
        for row, start in enumerate(starts):
            labels[row, start + 2 : start + 2 + len(answer)] = -100
        return [(padded, labels)]

    fit(model, NUM_FITTED, 3e-3, batch)
    save(model, tokenizer, folder)


def chat_of(prompt: Any) -> Any:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def rows_of(name: str) -> list[dict[str, Any]]:
    """The example's rows of the chosen tasks."""
    rows = [json.loads(line) for line in (EXAMPLE / f"{name}.jsonl").read_text().splitlines()]
    of_instruction = {chat_of(row["prompt"])[-1]["content"]: row for row in rows}
    return [of_instruction[task.instruction] for task in CHOSEN]


@pytest.mark.parametrize(
    ("way", "tool", "steps", "group_size"), [("agentbox", "run_command", 8, 4), ("verifiers", "shell", 1, 2)]
)
async def test_up_trains_on_eight_tasks_and_the_page_of_a_session_has_commands_and_answers(
    way: str, tool: str, steps: int, group_size: int, tmp_path: Path
) -> None:
    config = EXAMPLE / f"{way}.yaml"
    model = tmp_path / "model"
    data = tmp_path / "train.jsonl"
    rows = rows_of(way)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows * 2))
    settings = [
        f"model.path={model}",
        "model.dtype=float32",
        f"model.max_model_len={CONTEXT_TOKENS}",
        f"data.train={data}",
        "data.max_prompt_tokens=64",
        "data.shuffle=false",
        "rollout.engine=transformers",
        "rollout.num_threads=1",
        "rollout.max_groups_in_flight=4",
        "rollout.sampling.max_tokens=8",
        "rollout.environment.max_turns=3",
        "rollout.environment.max_tokens=128",
        "rollout.environment.call_format=hermes",
        "rollout.environment.processes=1",
        "reward.workers=1",
        f"trainer.steps={steps}",
        f"trainer.groups_per_step={len(CHOSEN)}",
        f"trainer.group_size={group_size}",
        "trainer.num_threads=1",
        "trainer.micro_batch_tokens=4096",
        "trainer.optimizer.lr=1e-3",
    ]
    if way == "verifiers":
        settings.append(f"rollout.environment.agent={PLAY} {OPTIONS}")
    make_model(model, tool, settings, config, [chat_of(row["prompt"]) for row in rows])
    command = [sys.executable, "-m", "tidemill", "up", str(config), "--no-live", "--run-id", way]
    command += [word for setting in settings for word in ("--set", setting)]
    env = os.environ | {"TIDEMILL_RUNS_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = await asyncio.to_thread(subprocess.run, command, cwd=REPO, env=env, capture_output=True, text=True)
    print(done.stdout[-6000:])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert containers() == set()
    async with serving(tmp_path, "", way) as base:
        address = f"http://{base.partition('/')[0]}/run/{way}/groups"
        groups = json.loads(await read_settled(f"{address}.json"))
        page = unescape(await read_settled(f"{address}/0"))
    means = [mean_reward(groups, step) for step in range(steps)]
    print(f"mean rewards of the steps: {means}")
    assert len(groups) >= steps * len(CHOSEN)
    # Each step has few samples: the second half is compared with the first two steps.
    assert steps == 1 or mean(means[steps // 2 :]) > mean(means[:2])
    for words in ("set -e", ANSWERS[way], DONE):
        assert words in page


def mean_reward(groups: list[dict[str, Any]], step: int) -> float:
    return mean(group["reward_mean"] for group in groups if group["step"] == step)


async def read_settled(address: str) -> str:
    """The text of a page, once the server has read the run."""

    async def look() -> str:
        text = await asyncio.to_thread(read, address)
        return "" if "still being read" in text else text

    return await wait_until(look)


def read(address: str) -> str:
    with urllib.request.urlopen(address, timeout=60) as response:
        return str(response.read().decode())
