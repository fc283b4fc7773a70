"""Whole runs for tests: real services as the processes that users run, on a real Redis."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.preloaded import Process, start_module, start_plain
from tests.support.waiting import PATIENCE_S, wait_until
from tidemill.common.config import RunConfig
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.embedded import EmbeddedRedis
from tidemill.common.run.state import publish_config
from tidemill.common.streams import id_order, last_id
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Commit

SERVICES = ("rollout", "reward", "trainer")
GATED = """
import time
from pathlib import Path

num_calls = 0


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global num_calls
    num_calls += 1
    while num_calls > {num_free} and not Path({gate!r}).exists():
        time.sleep(0.01)
    return float(len(solution_str) % 2)
"""


class ServiceRun:
    """One run: its Redis, its folder, and the service processes that the test starts."""

    def __init__(
        self, folder: Path, config: RunConfig, run_id: str = "test", url: str = "", is_forked: bool = True
    ) -> None:
        """`url` is a server that the test has started; empty starts one of the run's own.

        `is_forked` spares processes their imports: without it, they start exactly as users start them.
        """
        self.folder = folder
        self.config = config
        self.keys = Keys(run_id)
        self.redis = EmbeddedRedis(folder / "redis")
        self._url = url
        self._is_forked = is_forked
        self.processes: dict[str, Process] = {}
        self.variables: dict[str, dict[str, str]] = {}
        """Further environment variables of each role's processes."""

    @property
    def url(self) -> str:
        """Address of the run's Redis."""
        return self._url or self.redis.url

    @property
    def run_dir(self) -> Path:
        """The folder that the services write into."""
        return self.folder / self.keys.run_id

    async def __aenter__(self) -> "ServiceRun":
        if not self._url:
            self.redis.start()
        self.broker = await Broker.connect(self.url)
        await publish_config(self.broker, self.keys, self.config)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        await self.broker.close()
        self.redis.stop()
        if error is not None:
            for log in sorted(self.folder.glob("*.log")):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")

    def start_all(self) -> None:
        """One process of each service."""
        for role in SERVICES:
            self.start(role)

    async def reach(self, version: int, timeout_s: float = PATIENCE_S) -> None:
        """Wait for `version` commits."""

        async def is_reached() -> bool:
            return id_order(await last_id(self.broker, self.keys.commits))[0] >= version

        await wait_until(is_reached, timeout_s, f"version {version}")

    async def stop_all(self, *names: str) -> None:
        """Stop these processes; each must end with exit code 0."""
        for name in names:
            assert await self.stop(name) == 0, self.log_of(name)

    def start(
        self,
        role: str,
        name: str = "",
        *overrides: str,
        arguments: tuple[str, ...] = (),
        within: tuple[str, ...] = (),
    ) -> Process:
        """Start one service process; its output goes into `<name>.log`. `within` is a command that runs it.

        `role` may be a module of tests or benchmarks that does a role's work.
        """
        is_own = role.startswith(("tests.", "benchmarks."))
        name = name or role
        module = role if is_own else f"tidemill.services.{role}"
        words = ["--run", self.keys.run_id, "--name", name]
        words += [word for override in overrides for word in ("--set", override)]
        words += arguments
        variables = {
            "TIDEMILL_REDIS_URL": self.url,
            "TIDEMILL_RUNS_DIR": str(self.folder),
            "OMP_NUM_THREADS": "1",
            **self.variables.get(role, {}),
        }
        log = self.folder / f"{name}.log"
        environment = os.environ | variables
        if self._is_forked and not within:
            self.processes[name] = start_module(module, words, log, environment)
        else:
            command = [*within, sys.executable, "-m", module, *words]
            self.processes[name] = start_plain(command, log, environment)
        return self.processes[name]

    def kill(self, name: str) -> None:
        """SIGKILL: the process gets no chance to clean up."""
        self.processes[name].kill()
        self.processes[name].wait()

    async def stop(self, name: str, timeout_s: float = 30.0) -> int:
        """SIGTERM, and wait for the exit code."""
        self.processes[name].send_signal(signal.SIGTERM)
        return await self.wait(name, timeout_s)

    async def wait(self, name: str, timeout_s: float = PATIENCE_S) -> int:
        """Wait for a process to end; returns its exit code."""
        return await asyncio.to_thread(self.processes[name].wait, timeout_s)

    async def trained(self) -> list[Commit]:
        """The commits of a trainer that has ended well: one for each step, and every ticket trained once."""
        from tests.support.training import assert_nothing_lost

        assert await self.wait("trainer") == 0, self.log_of("trainer")
        trainer = self.config.trainer
        commits = await assert_nothing_lost(self.broker, self.keys, trainer.steps * trainer.groups_per_step)
        assert len(commits) == trainer.steps
        return commits

    def log_of(self, name: str) -> str:
        """What a process has printed so far."""
        return (self.folder / f"{name}.log").read_text(errors="replace")


def simulated_config(folder: Path, **overrides: Any) -> RunConfig:
    """A run without models: delays in the engine and in the trainer. Dotted names set single fields."""
    from tests.support.models import tiny_model

    model = tiny_model(folder / "model")
    data = folder / "train.jsonl"
    rows = [
        f'{{"prompt": "w{i % 29} w{i // 29 % 29}", "reward_model": {{"ground_truth": "{i}"}}}}'
        for i in range(64)
    ]
    data.write_text("\n".join(rows) + "\n")
    reward = folder / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(len(solution_str) % 2)\n"
    )
    tree: dict[str, Any] = {
        "model": {"path": str(model), "max_model_len": 64},
        "data": {"train": str(data), "max_prompt_tokens": 16},
        "rollout": {
            "engine": "simulated",
            "sampling": {"max_tokens": 16},
            "simulated": {"tokens": 8, "vocab_size": 32},
        },
        "reward": {"function": f"{reward}:compute_score", "processes": 1},
        "trainer": {
            "policy": "simulated",
            "steps": 4,
            "groups_per_step": 4,
            "group_size": 4,
            "checkpoint_every": 2,
            "loggers": [],
        },
        "streams": {"lease_s": 2.0, "trim": False, "archive": {"enabled": False}},
    }
    for dotted, value in overrides.items():
        node = tree
        *parents, last = dotted.split("__")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return RunConfig.model_validate(tree)


def hold_scores(folder: Path, num_free: int) -> Path:
    """Have the reward of `simulated_config` score so many samples, and the others once the returned file is
    there.

    For what has to happen in the middle of a run: one that goes on may be over before its test has a core.
    Give the run a `reward__timeout_s` above the wait.
    """
    gate = folder / "gate"
    (folder / "reward.py").write_text(GATED.format(num_free=num_free, gate=str(gate)))
    return gate
