"""What a crash costs, in trajectory-seconds: time spent on trajectories that have to be made again.

    python -m benchmarks.deaths

The accounting is that of verl's issue 7579, at shapes like its two: completions of half a minute, and agents
of twenty turns. There a crash ends the job, and what was produced since the last checkpoint is gone: 2,400 to
4,000 trajectory-seconds, and 16,800 to 21,600 with agents. `theirs` is that sum at the very moment of each of
our crashes; `ours` is what our services make again. Last, the share of tokens that is generated again where a
thousand sessions are in flight, and each worker dies once in ten minutes.

Whole runs of the real services, in virtual time, as `tests/simulation` plays them: one process dies, or all.
Everything that takes time is played ten times as fast.
"""

import contextlib
import contextvars
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import mean
from typing import Any

import typer

from benchmarks.report import machine, print_result, print_table
from tests.simulation.fleet import Fleet, names
from tests.simulation.install import installed
from tests.simulation.loop import OWNER, START_S
from tests.simulation.process import Process
from tests.simulation.run import _end, _folder, _freeze, _without_complaints, inputs
from tests.simulation.schedule import Setup
from tests.simulation.watch import Watch
from tests.simulation.world import World
from tidemill.common.config import RunConfig
from tidemill.services.console.run.folder import RunFolder
from tidemill.services.rollout.worker import RolloutWorker

ENVIRONMENT = """
import asyncio
import random

class Working:
    resumable = True

    async def reset(self, row):
        self.left = {turns}

    async def step(self, text):
        await asyncio.sleep(random.uniform(0, 2 * {answer_s}))
        self.left -= 1
        return "w1", None, self.left <= 0

    def mark(self):
        return self.left

    def restore(self, mark):
        self.left = mark
"""


SCALE = 10
"""All durations are divided by this."""


@dataclass(frozen=True)
class Shape:
    """Two steps of tickets are out at once, on two rollout workers."""

    num_samples: int
    """Samples of a step."""
    turn_s: float
    """Seconds that the engine takes for one turn, on average."""
    turns: int = 1
    answer_s: float = 0.0
    """Seconds that the environment takes for an answer, on average."""
    verl: str = ""
    """Published trajectory-seconds lost in a crash."""

    @property
    def sample_s(self) -> float:
        """Seconds of a sample, in virtual time."""
        return self.turns * (self.turn_s + self.answer_s) / SCALE

    def config(self, world: World) -> RunConfig:
        """Checkpoints after each step, as verl's accounting has them."""
        setup = Setup(
            steps=1000, groups_per_step=self.num_samples // 8, group_size=8, checkpoint_every=1, sample_s=1.0
        )
        config = setup.config(inputs(), world.run_id, world.seed)
        rollout: dict[str, Any] = config.rollout.model_dump() | {"max_groups_in_flight": 64}
        rollout["simulated"] |= {"group_s": self.turn_s / SCALE, "jitter": 0.5}
        if self.turns > 1:
            file = world.folder / "working.py"
            file.write_text(ENVIRONMENT.format(turns=self.turns, answer_s=self.answer_s / SCALE))
            rollout["environment"] |= {"use": f"{file}:Working", "max_turns": self.turns}
        tree = config.model_dump() | {"rollout": rollout}
        tree["model"] |= {"max_model_len": 1024}
        return RunConfig.model_validate(tree)


SHAPES = {
    "completions": Shape(64, turn_s=30.0, verl="2,400 to 4,000"),
    "agents": Shape(64, turn_s=10.0, turns=20, answer_s=10.0, verl="16,800 to 21,600"),
}
MANY = replace(SHAPES["agents"], num_samples=512)
CRASHES: dict[str, Callable[[str], bool]] = {
    "a rollout worker": "rollout-0".__eq__,
    "the trainer": "trainer".__eq__,
    "everything": lambda name: True,
}


@dataclass
class Account:
    """Every play of a sample, and what a crash loses."""

    world: World
    playing: dict[Any, tuple[Process, float]] = field(default_factory=dict)
    """By sample: the process that plays it, and its start or last kept part: a crash loses all since then."""
    started: dict[Any, float] = field(default_factory=dict)
    """By sample: its first start, in any worker."""
    done: dict[Any, tuple[float, float]] = field(default_factory=dict)
    """By sample: its start and its end."""
    again_s: float = 0.0
    """Seconds of complete samples that were made again."""
    checkpoint_at: float = 0.0
    theirs: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    asking: dict[Any, float] = field(default_factory=dict)
    """By sample: the start of the turn that an engine generates now."""
    turns: Counter[Any] = field(default_factory=Counter)
    """By sample: turns that engines have generated, and the fraction of a turn that a crash has cut off."""

    def see(self, record: Any) -> None:
        """Take an appended entry: with a commit, all before it is in a checkpoint."""
        if record.stream == "commits":
            self.checkpoint_at = self.world.loop.now

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Note each play of a sample."""
        generate, keep, account = RolloutWorker._generate_sample, RolloutWorker._keep_part, self
        ask = RolloutWorker._ask

        async def noted(worker: RolloutWorker, delivery: Any, *rest: Any) -> None:
            index = next(each for each in rest if isinstance(each, int))
            key, begun = (worker.lane, delivery.message.ticket, index), account.world.loop.now
            if key in account.done:
                account.again_s += account.done[key][1] - account.done[key][0]
                account.started.pop(key)
            account.started.setdefault(key, begun)
            account.playing[key] = (OWNER.get(), begun)
            await generate(worker, delivery, *rest)
            del account.playing[key]
            account.done[key] = (account.started[key], account.world.loop.now)

        async def keeps(worker: RolloutWorker, delivery: Any, index: int, *rest: Any) -> bool:
            is_kept = await keep(worker, delivery, index, *rest)
            key = (worker.lane, delivery.message.ticket, index)
            if is_kept and key in account.playing:
                account.playing[key] = (OWNER.get(), account.world.loop.now)
            return is_kept

        async def asks(worker: RolloutWorker, ticket: int, name: str, *rest: Any) -> Any:
            key = (worker.lane, ticket, int(name.split("-")[2]))
            account.asking[key] = account.world.loop.now
            made = await ask(worker, ticket, name, *rest)
            del account.asking[key]
            account.turns[key] += 1
            return made

        RolloutWorker._generate_sample = noted  # type: ignore[method-assign]
        RolloutWorker._keep_part = keeps  # type: ignore[method-assign]
        RolloutWorker._ask = asks  # type: ignore[method-assign]
        try:
            yield
        finally:
            RolloutWorker._generate_sample = generate  # type: ignore[method-assign]
            RolloutWorker._keep_part = keep  # type: ignore[method-assign]
            RolloutWorker._ask = ask  # type: ignore[method-assign]

    def crash(self, fleet: Fleet, shape: Shape, dies: Callable[[str], bool]) -> None:
        """Kill the processes that `dies` selects, and add up what is lost."""
        now = self.world.loop.now
        fresh = [end - begun for begun, end in self.done.values() if end > self.checkpoint_at]
        self.theirs.append(sum(now - self.started[key] for key in self.playing) + sum(fresh))
        killed = [process for name in fleet.members if dies(name) and (process := fleet.find(name))]
        lost = {key: begun for key, (process, begun) in self.playing.items() if process in killed}
        self.ours.append(sum(now - begun for begun in lost.values()))
        for key in lost:
            del self.playing[key]
            if begun := self.asking.pop(key, 0.0):
                self.turns[key] += min(1.0, (now - begun) * SCALE / shape.turn_s)
        for process in killed:
            self.world.kill(process)


def account_of(
    shape: Shape, crashes: Sequence[tuple[float, Callable[[str], bool]]], length_s: float, seed: int
) -> Account:
    """One run of `length_s` virtual seconds, with crashes at these times after its start."""
    with _folder() as folder, _without_complaints():
        _freeze()
        world = World(seed, folder)
        account = Account(world)
        with installed(world, Watch(world)), account.kept():
            fleet, config = Fleet(world), shape.config(world)
            world.on_append = account.see
            RunFolder(folder, world.run_id).create(config)
            value = config.model_dump_json().encode()
            world.cluster.server.apply([[b"SET", world.keys.config.encode(), value]])
            context = contextvars.Context()
            for name, role in names(config):
                context.run(fleet.add, name, role)
            for at, dies in crashes:
                crash = partial(account.crash, fleet, shape, dies)
                world.loop.call_at(START_S + at, crash, context=contextvars.Context())
            world.loop.run(lambda: bool(fleet.outcome), START_S + length_s)
            problem, fleet.outcome = fleet.outcome, "over"
            _end(world)
    if problem:
        raise SystemExit(f"the run ended: {problem}; {fleet.exit_errors} {fleet.crashes}")
    return account


def measure(shape: Shape, dies: Callable[[str], bool], crashes: int, seed: int) -> tuple[float, float]:
    """One run; returns the trajectory-seconds lost in a crash, by verl's accounting and with our services."""
    # Each at another moment of a step, when the effects of the last one are over.
    times = [shape.sample_s * (4 + 5.3 * number) for number in range(crashes)]
    account = account_of(shape, [(at, dies) for at in times], times[-1] + 5 * shape.sample_s, seed)
    ours = mean(account.ours) + account.again_s / crashes
    return mean(account.theirs) * SCALE, ours * SCALE


def waste(seed: int) -> float:
    """Share of the turns of ten minutes that was generated again, where each worker dies once in them."""
    # Early enough that every session which was cut off is whole before the end.
    crashes = [(12.0, "rollout-0".__eq__), (20.0, "rollout-1".__eq__)]
    account = account_of(MANY, crashes, 600.0 / SCALE, seed)
    again = sum(account.turns[key] - MANY.turns for key in account.done)
    return again / account.turns.total()


def main(crashes: int = 5, seed: int = 0) -> None:
    """Measure, print a table, and end with one line of JSON."""
    rows, result = [], {}
    for name, shape in SHAPES.items():
        for what, dies in CRASHES.items():
            theirs, ours = measure(shape, dies, crashes, seed)
            rows.append((f"{name}: {what} dies", f"{ours:,.0f}", f"{theirs:,.0f}", shape.verl))
            result[f"{name}_{what.rpartition(' ')[2]}"] = round(ours)
        result[f"{name}_theirs"] = round(theirs)
    result["waste"] = round(waste(seed), 4)
    note = f"{machine()}. Of {2 * MANY.num_samples:,} agents, each worker killed once in ten minutes: "
    columns = ("crash", "ours", "all since the checkpoint", "published by verl")
    note += f"{result['waste']:.2%} of the tokens were generated again"
    print_table("Trajectory-seconds made again, a crash", columns, rows, note)
    print_result(result)


if __name__ == "__main__":
    typer.run(main)
