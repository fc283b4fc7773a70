"""What a crash costs, in trajectory-seconds: time spent on trajectories that have to be made again.

    python -m benchmarks.deaths

The accounting is that of verl's issue 7579, at shapes like its two: completions of half a minute, and agents
of twenty turns. There a crash ends the job, and what was produced since the last checkpoint is gone. Here one
process dies, or all. Last, the share of tokens that is generated again where a thousand sessions are in
flight, and each worker dies once in ten minutes.

Whole runs of the real services, in virtual time, as `tests/simulation` plays them. Everything that takes time
is played ten times as fast.
"""

import contextlib
import contextvars
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

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
Dies = Callable[[str], bool]
"""Whether a crash kills the process of this name."""


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
        tree = setup.config(inputs(), world.run_id, world.seed).model_dump()
        tree["model"]["max_model_len"] = 1024
        rollout = tree["rollout"]
        rollout["max_groups_in_flight"] = 64
        rollout["simulated"] |= {"group_s": self.turn_s / SCALE, "jitter": 0.5}
        if self.turns > 1:
            file = world.folder / "working.py"
            file.write_text(ENVIRONMENT.format(turns=self.turns, answer_s=self.answer_s / SCALE))
            rollout["environment"] |= {"use": f"{file}:Working", "max_turns": self.turns}
        return RunConfig.model_validate(tree)


SHAPES = {
    "completions": Shape(64, turn_s=30.0, verl="2,400 to 4,000"),
    "agents": Shape(64, turn_s=10.0, turns=20, answer_s=10.0, verl="16,800 to 21,600"),
}
MANY = replace(SHAPES["agents"], num_samples=512)
CRASHES: dict[str, Dies] = {
    "a rollout worker": "rollout-0".__eq__,
    "the trainer": "trainer".__eq__,
    "everything": lambda name: True,
}


@dataclass
class Account:
    """Every play of a sample, and what is made again."""

    world: World
    shape: Shape
    playing: dict[Any, tuple[Process, float]] = field(default_factory=dict)
    """By sample: the process that plays it, and its start or last kept part: a crash loses all since then."""
    done: set[Any] = field(default_factory=set)
    again_s: float = 0.0
    """Seconds that crashes have cut off, and those of samples that were complete once."""
    asking: dict[Any, float] = field(default_factory=dict)
    """By sample: the start of the turn that an engine generates now."""
    turns: Counter[Any] = field(default_factory=Counter)
    """By sample: turns that engines have generated, and the fraction of a turn that a crash has cut off."""

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Note each play of a sample."""
        worker_class = RolloutWorker
        loop = self.world.loop
        generate = worker_class._generate_sample
        keep = worker_class._keep_part
        ask = worker_class._ask

        async def generates(worker: Any, delivery: Any, play: Any, index: int, *arguments: Any) -> None:
            key = (worker.lane, delivery.message.ticket, index)
            begun = loop.now
            self.playing[key] = OWNER.get(), begun
            await generate(worker, delivery, play, index, *arguments)
            del self.playing[key]
            self.again_s += loop.now - begun if key in self.done else 0.0
            self.done.add(key)

        async def keeps(worker: Any, delivery: Any, index: int, *arguments: Any) -> bool:
            is_kept = await keep(worker, delivery, index, *arguments)
            key = (worker.lane, delivery.message.ticket, index)
            if is_kept and key in self.playing:
                self.playing[key] = OWNER.get(), loop.now
            return is_kept

        async def asks(worker: Any, ticket: int, name: str, *arguments: Any) -> Any:
            key = worker.lane, ticket, int(name.split("-")[2])
            self.asking[key] = loop.now
            answer = await ask(worker, ticket, name, *arguments)
            del self.asking[key]
            self.turns[key] += 1
            return answer

        with patch.multiple(worker_class, _generate_sample=generates, _keep_part=keeps, _ask=asks):
            yield

    def crash(self, fleet: Fleet, dies: Dies) -> None:
        """Kill the processes that `dies` selects, and add up what is lost."""
        now = self.world.loop.now
        killed = []
        for name in filter(dies, fleet.members):
            process = fleet.find(name)
            if process:
                killed.append(process)
        for key in [key for key, (process, _) in self.playing.items() if process in killed]:
            self.again_s += now - self.playing.pop(key)[1]
            if begun := self.asking.pop(key, 0.0):
                self.turns[key] += min(1.0, (now - begun) * SCALE / self.shape.turn_s)
        for process in killed:
            self.world.kill(process)


def account_of(shape: Shape, crashes: Sequence[tuple[float, Dies]], length_s: float, seed: int) -> Account:
    """One run of `length_s` virtual seconds, with crashes at these times after its start."""
    with _folder() as folder, _without_complaints():
        _freeze()
        world = World(seed, folder)
        account = Account(world, shape)
        with installed(world, Watch(world)), account.kept():
            fleet = Fleet(world)
            config = shape.config(world)
            RunFolder(folder, world.run_id).create(config)
            value = config.model_dump_json().encode()
            world.cluster.server.apply([[b"SET", world.keys.config.encode(), value]])
            context = contextvars.Context()
            for name, role in names(config):
                context.run(fleet.add, name, role)
            for at, dies in crashes:
                crash = partial(account.crash, fleet, dies)
                world.loop.call_at(START_S + at, crash, context=contextvars.Context())
            world.loop.run(lambda: bool(fleet.outcome), START_S + length_s)
            problem = fleet.outcome
            fleet.outcome = "over"
            _end(world)
    if problem:
        raise SystemExit(f"the run ended: {problem}; {fleet.exit_errors} {fleet.crashes}")
    return account


def main(crashes: int = 5, seed: int = 0) -> None:
    """Trajectory-seconds made again for each of some crashes, and the share of tokens."""
    rows = []
    result = {}
    for name, shape in SHAPES.items():
        # Each at another moment of a step, when the effects of the last one are over.
        times = [shape.sample_s * (4 + 5.3 * number) for number in range(crashes)]
        for crash, dies in CRASHES.items():
            account = account_of(shape, [(at, dies) for at in times], times[-1] + 5 * shape.sample_s, seed)
            seconds = account.again_s * SCALE / crashes
            rows.append((f"{name}: {crash} dies", f"{seconds:,.0f}", shape.verl))
            result[f"{name}_{crash.rpartition(' ')[2]}"] = round(seconds)
    # Early enough that every session which was cut off is whole before the end of the ten minutes.
    deaths: list[tuple[float, Dies]] = [(12.0, "rollout-0".__eq__), (20.0, "rollout-1".__eq__)]
    account = account_of(MANY, deaths, 600.0 / SCALE, seed)
    again = sum(account.turns[key] - MANY.turns for key in account.done)
    result["waste"] = round(again / account.turns.total(), 4)
    note = f"{machine()}. Of {2 * MANY.num_samples:,} agents, each worker killed once in ten minutes: "
    note += f"{result['waste']:.2%} of the tokens were generated again"
    title = "Trajectory-seconds made again, a crash"
    columns = "crash,ours,published by verl"
    print_table(title, columns, rows, note)
    print_result(result)


if __name__ == "__main__":
    typer.run(main)
