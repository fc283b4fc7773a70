"""Users' code that fails in a worker says so where people look, and ends the run where it always fails."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.runs import ServiceRun, simulated_config
from tests.support.waiting import PATIENCE_S
from tidemill.common.errors import ConfigError
from tidemill.services.console.look.snapshot import SnapshotReader
from tidemill.services.console.up.views import PlainView

HEAD = """def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if not solution_str:
        return 0.0
"""
ENVIRONMENT = """
class Broken:
    def reset(self, **row):
        return None

    def step(self, text):
        return self.board[text]
"""


async def first_line(run: ServiceRun, said: str) -> str:
    """The first line about a failure that the view without a terminal prints."""
    reader = await SnapshotReader.attach(run.broker, run.keys.run_id)
    console = Console(width=400, record=True)
    view = PlainView(console)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            view.show(await reader.read(), {}, 0.0)
            lines = [line for line in console.export_text(clear=False).splitlines() if said in line]
            if lines:
                return lines[0]
            await asyncio.sleep(0.2)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return {}['score']", "(error): KeyError: 'score' (reward.py, line 4)"),
        ("return None", "(error): returned None; expected a finite number"),
        ("while True: pass", "(timeout): no result within 2 s (timeout_s); it computed, in the end in"),
    ],
)
async def test_a_reward_that_fails_gives_its_reason_and_ends_the_run(tmp_path: Path, body: str, reason: str):
    limits: dict[str, Any] = {"reward__timeout_s": 2.0, "reward__max_attempts": 1, "reward__workers": 1}
    config = simulated_config(tmp_path, **limits)
    (tmp_path / "reward.py").write_text(f"{HEAD}    {body}\n")
    async with ServiceRun(tmp_path, config) as run:
        run.start_all()
        line = await first_line(run, "failing: ")
        assert "reward compute_score failed " in line and reason in line
        if "while" in body:  # 64 of them would take a minute and more
            return
        assert await run.wait("trainer") == ConfigError.exit_code
        last = run.log_of("trainer").strip().splitlines()[-1]
    assert "the reward's own code fails" in last and reason.partition(": ")[2] in last


@pytest.mark.parametrize("function", ["math", "gsm8k"])
async def test_ground_truths_that_no_built_in_reward_can_read_end_the_run(tmp_path: Path, function: str):
    config = simulated_config(tmp_path, reward__function=function, reward__workers=1)
    rows = [{"prompt": f"w{i % 29}", "ground_truth": "?"} for i in range(64)]
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    async with ServiceRun(tmp_path, config) as run:
        run.start_all()
        assert await run.wait("trainer") == ConfigError.exit_code
        last = run.log_of("trainer").strip().splitlines()[-1]
    assert "ground truth" in last and "'?'" in last and "then resume the run" in last


async def test_an_environment_that_fails_gives_its_reason_while_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "board.py").write_text(ENVIRONMENT)
    config = simulated_config(
        tmp_path,
        rollout__environment={"use": f"{tmp_path}/board.py:Broken", "processes": 1},
        reward__rewards={"environment": {"environment": True}},
        reward__function=None,
    )
    async with ServiceRun(tmp_path, config) as run:
        run.start_all()
        line = await first_line(run, "failing: ")
        assert "board.py:Broken failed" in line and "AttributeError" in line and "(board.py, line 7)" in line
        assert run.processes["trainer"].poll() is None
