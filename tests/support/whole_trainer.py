"""The whole trainer in the test's process, with workers that answer at once: run, stopped, crashed."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.training import assert_nothing_lost, make_context, messages, num_commits
from tidemill.common.config import RunConfig
from tidemill.common.process.service import ServiceContext
from tidemill.common.redis.broker import Broker
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Commit, Ticket
from tidemill.services.trainer import trainer as trainer_module
from tidemill.services.trainer.service import serve
from tidemill.services.trainer.step import StepResult, StepRunner

GROUPS = 2
SIZE = 2
"""Groups of a step, and samples of a group, in the contexts that `make` makes."""


def trainer_context(
    broker: Broker, keys: Keys, run_dir: Path, model: Path, **sections: dict[str, Any]
) -> ServiceContext:
    """The context of a trainer process with small steps; `sections` go over those of its config."""
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": str(model), "max_model_len": 64},
        "data": {"max_prompt_tokens": 8},
        "rollout": {"engine": "simulated", "sampling": {"max_tokens": 8}},
        "trainer": {
            "policy": "simulated",
            "groups_per_step": GROUPS,
            "group_size": SIZE,
            "checkpoint_every": 4,
            "loggers": [],
        },
        "streams": {"trim": False, "archive": {"enabled": False}},
    }
    for name, fields in sections.items():
        tree[name] = tree.get(name, {}) | fields
    return make_context(broker, keys, RunConfig.model_validate(tree), run_dir)


async def run(context: ServiceContext) -> None:
    await asyncio.wait_for(serve(context), 120)


class _Mortal:
    """A broker whose process dies with its n-th command, before or after Redis has done it."""

    def __init__(self, broker: Broker, num_commands: int, is_done: bool) -> None:
        self._broker = broker
        self._left = num_commands
        self._is_done = is_done
        self.process: asyncio.Future[None] | None = None

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._broker, name)
        if name not in ("execute", "pipeline", "script"):
            return method

        async def call(*args: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left == 0 and self._is_done:
                await method(*args, **options)
            if self._left <= 0 and self.process is not None:
                self.process.cancel()
                await asyncio.Event().wait()
            return await method(*args, **options)

        return call


async def run_killed(
    make: Callable[..., ServiceContext], broker: Broker, keys: Keys, steps: int, seed: int, **trainer: Any
) -> int:
    """Kill the trainer with its n-th command, again and again, until the run is over. Returns how often."""
    rng = random.Random(seed)
    num_deaths = 0
    while await num_commits(broker, keys) < steps:
        mortal = _Mortal(broker, rng.randrange(15, 120), rng.random() < 0.5)
        context = make(mortal, keys, **trainer)
        mortal.process = asyncio.ensure_future(serve(context))
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait_for(mortal.process, 120)
        # A process that is dead has no threads that go on writing.
        await asyncio.to_thread(context.outside.executor.shutdown)
        num_deaths += mortal.process.cancelled()
    await run(make(broker, keys, **trainer))
    return num_deaths


async def crash_after_commit(context: ServiceContext, step: int) -> None:
    """Run a trainer that dies when it has committed `step`, before it does anything else."""
    await _crash_at_commit(context, step, is_appended=True)


async def crash_before_commit(context: ServiceContext, step: int) -> None:
    """Run a trainer that dies when it is about to commit `step`: the version before is announced."""
    await _crash_at_commit(context, step, is_appended=False)


async def _crash_at_commit(context: ServiceContext, step: int, is_appended: bool) -> None:
    append_commit = trainer_module.append_commit

    async def append_and_die(broker: Broker, keys: Keys, commit: Commit, *mark: Any) -> None:
        if commit.step != step or is_appended:
            await append_commit(broker, keys, commit, *mark)
        if commit.step == step:
            raise InterruptedError

    trainer_module.append_commit = append_and_die
    try:
        with pytest.raises(InterruptedError):
            await run(context)
    finally:
        trainer_module.append_commit = append_commit


def after_training(
    monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[StepResult], Awaitable[object]]
) -> None:
    """Call `act` when this step is trained, and not yet committed."""
    train = StepRunner.run

    async def train_and_act(runner: StepRunner, number: int, assembler: Any) -> StepResult:
        result = await train(runner, number, assembler)
        if number == step:
            await act(result)
        return result

    monkeypatch.setattr(StepRunner, "run", train_and_act)


def assert_each_once(commits: list[Commit], steps: int) -> None:
    """Every step has its commit and all its places, and no sample was trained twice."""
    assert [commit.step for commit in commits] == list(range(steps))
    trained = [key for commit in commits for key in commit.trained_keys]
    assert len(trained) == len(set(trained)) == steps * GROUPS * SIZE


async def assert_trained_once(broker: Broker, keys: Keys, steps: int) -> list[Commit]:
    """Nothing was lost, and every step has its commit and all its places filled."""
    tickets = await messages(broker, keys.prompts(), Ticket)
    commits = await assert_nothing_lost(broker, keys, len(tickets))
    assert_each_once(commits, steps)
    return commits


async def has_tickets(broker: Broker, keys: Keys, count: int) -> bool:
    return int(await broker.execute("XLEN", keys.prompts())) == count


async def has_commits(broker: Broker, keys: Keys, count: int) -> bool:
    return await num_commits(broker, keys) >= count


async def empty(broker: Broker, keys: Keys) -> None:
    """FLUSHALL, as far as it concerns this run."""
    names = await broker.execute("KEYS", keys.config.replace(":config", ":*").replace("{", "[{]"))
    if names:
        await broker.execute("DEL", *names)


async def is_answered(broker: Broker, keys: Keys) -> bool:
    tickets = await broker.execute("XLEN", keys.prompts())
    return bool(await broker.execute("XLEN", keys.scores()) == tickets * SIZE)
