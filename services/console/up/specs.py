"""Which processes a run has on this machine; `check/placement.py` says which GPUs each of them gets."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tidemill.common.config import RunConfig
from tidemill.common.config.servers import LocalServersConfig
from tidemill.common.process.programs import Program, run_own
from tidemill.common.redis.broker import WAIT_VARIABLE
from tidemill.common.redis.client import URL_VARIABLE
from tidemill.common.run.state import RUNS_DIR_VARIABLE
from tidemill.services.console.check.placement import VISIBLE, in_words, local_servers

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""For processes whose jobs start processes of their own."""


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """How to start one process of a run.

    Example: `name` "rollout-0", `role` "rollout", `command` (python, "-m", "tidemill.services.rollout",
    "--run", "a"), `env` {"CUDA_VISIBLE_DEVICES": "1"}.
    """

    name: str
    role: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    ends_run: bool = False
    """Whether the run may end with this process: true of the trainer only."""
    loads_torch: bool = False
    """Whether it computes with a model itself."""


def service_specs(config: RunConfig) -> list[ServiceSpec]:
    """The trainer, and as many rollout and reward workers, and servers of rewards, as the config wants: none
    where nothing is generated."""
    rollout = config.rollout
    reward = config.reward
    specs: list[ServiceSpec] = []
    with_torch = [Program.TRAINER] if config.trainer.policy == "transformers" else []
    if rollout.engine_traits.loads_model and not rollout.engine_traits.package:  # vLLM has its own processes
        with_torch.append(Program.ROLLOUT)

    def add(program: Program, role: str, name: str, env: Mapping[str, str], *words: str) -> None:
        command = run_own(program, "--run", config.run_id, "--name", name, *words)
        specs.append(ServiceSpec(name, role, tuple(command), env, role == "trainer", program in with_torch))

    def add_worker(role: str, name: str, threads: int, gpus: Sequence[int] = ()) -> None:
        env = {"OMP_NUM_THREADS": str(threads)} if threads else {}
        add(Program[role.upper()], role, name, env | _visible(gpus))

    add_worker("trainer", "trainer", config.trainer.num_threads, config.trainer.gpus)
    for index in range(rollout.workers):
        add_worker("rollout", f"rollout-{index}", rollout.num_threads, _engine_gpus(config, index))
    # Reward functions run in processes of their own: one thread each, so that they do not compete for cores.
    threads = 0 if "OMP_NUM_THREADS" in os.environ else 1
    for index in range(reward.workers):
        add_worker("reward", f"reward-{index}", threads)
    # All code rewards of a run share one queue, and the workers of the one that wants the most.
    sandboxes = [named.sandbox.workers for named in reward.named.values() if named.sandbox]
    for index in range(max(sandboxes, default=0)):
        add(Program.SANDBOX, "sandbox", f"sandbox-{index}", ONE_THREAD)
    for name, local in local_servers(config).items():
        for index in range(local.count):
            env = _visible(_server_gpus(config, local, index))
            words = ("--servers", name, "--index", str(index))
            add(Program.REPLICA, "replica", f"replica-{name}-{index}", env, *words)
    return specs if config.generates else specs[:1]


def exporter_spec(config: RunConfig, port: int) -> ServiceSpec:
    """The exporter of the whole run, where one is wanted."""
    command = run_own(Program.EXPORTER, config.run_id, "--port", str(port))
    return ServiceSpec("exporter", "exporter", tuple(command))


def service_environment(redis_url: str, runs: Path) -> dict[str, str]:
    """The environment variables of every service."""
    return {
        # A process that dies while Redis is away must not end the run for a mistake in the address.
        WAIT_VARIABLE: "300",
        # The user's own values win over what is above, and what is below over them.
        **os.environ,
        URL_VARIABLE: redis_url,
        RUNS_DIR_VARIABLE: str(runs),
        # The end of a log is shown as the reason of a death: nothing of it may be lost in a buffer.
        "PYTHONUNBUFFERED": "1",
    }


def _engine_gpus(config: RunConfig, index: int) -> Sequence[int]:
    size = config.rollout.vllm.tensor_parallel_size
    return config.rollout.gpus[index * size : (index + 1) * size]


def _server_gpus(config: RunConfig, local: LocalServersConfig, index: int) -> Sequence[int]:
    """A local server's own GPUs, or those of the rollout worker that it shares with."""
    if local.shares_rollout_gpus:
        return _engine_gpus(config, index % max(1, config.rollout.workers))
    if not local.gpus:
        return ()
    size = max(1, len(local.gpus) // local.count)
    first = index * size % len(local.gpus)
    return local.gpus[first : first + size]


def _visible(gpus: Sequence[int]) -> dict[str, str]:
    return {VISIBLE: in_words(gpus)} if gpus else {}
