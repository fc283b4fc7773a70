"""Which processes a run has on this machine, and which GPUs each of them gets.

Every rank of the trainer, every engine (`rollout.vllm.tensor_parallel_size` each) and every local server gets
GPUs of its own, in this order, from those that no field names. Fields that name GPUs keep them. On a machine
with one GPU the trainer and vLLM take turns on it (`rollout.trainer_gpus`).
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidemill.common.command_line import command_line
from tidemill.common.config import LocalServersConfig, RunConfig
from tidemill.common.errors import ConfigError
from tidemill.common.process.programs import Program, run_own
from tidemill.common.redis.broker import WAIT_VARIABLE
from tidemill.common.redis.client import URL_VARIABLE
from tidemill.common.run.state import RUNS_DIR_VARIABLE

VISIBLE = "CUDA_VISIBLE_DEVICES"
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
    for name, local in _local_servers(config).items():
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


def _local_servers(config: RunConfig) -> dict[str, LocalServersConfig]:
    return {name: servers.local for name, servers in config.servers.items() if servers.local}


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
    return {VISIBLE: _list(gpus)} if gpus else {}


TRAINER = "trainer.gpus"
ROLLOUT = "rollout.gpus"
TURNS = "trainer and rollout workers take turns on the trainer's GPUs: one computes, the other sleeps"


def gpus_here(count: int | None) -> list[int]:
    """Numbers of the GPUs that may be handed out: CUDA_VISIBLE_DEVICES, else all; none where the count is not
    known, or the variable does not name them by number."""
    named = os.environ.get(VISIBLE)
    if named is None:
        return list(range(count or 0))
    numbers = [name.strip() for name in named.split(",") if name.strip()]
    return [int(number) for number in numbers] if all(number.isdigit() for number in numbers) else []


def named_gpus(config: RunConfig) -> dict[str, tuple[int, ...]]:
    """GPUs of each field that can name some."""
    of_servers = {f"servers.{name}.local.gpus": local.gpus for name, local in _local_servers(config).items()}
    return {TRAINER: config.trainer.gpus, ROLLOUT: config.rollout.gpus, **of_servers}


def _wanted_gpus(config: RunConfig) -> dict[str, int]:
    """How many GPUs each of these fields should have, for processes that use any."""
    trainer = config.trainer
    rollout = config.rollout
    wanted: dict[str, int] = {}
    if trainer.policy == "transformers" and not trainer.device.startswith("cpu"):
        wanted[TRAINER] = trainer.num_ranks
    if rollout.engine_traits.loads_model:
        wanted[ROLLOUT] = rollout.workers * rollout.vllm.tensor_parallel_size
    for name, local in _local_servers(config).items():
        # Whether another server's command uses GPUs is not known.
        if not local.shares_rollout_gpus and not local.command and VISIBLE not in local.env:
            wanted[f"servers.{name}.local.gpus"] = local.count
    return wanted if config.generates else {name: n for name, n in wanted.items() if name == TRAINER}


def find_overlaps(config: RunConfig) -> list[str]:
    """GPUs that two processes are given, where no sharing is asked for."""
    owners: dict[int, str] = {}
    problems = []
    for name, gpus in named_gpus(config).items():
        if name == TRAINER and len(set(gpus)) < len(gpus):
            problems.append("trainer.gpus names a GPU twice")
        for gpu in dict.fromkeys(gpus):
            owner = owners.setdefault(gpu, name)
            is_asked = (owner, name) == (TRAINER, ROLLOUT) and config.rollout.trainer_gpus != "auto"
            if owner != name and not is_asked:
                problems.append(f"GPU {gpu} is in {owner} and in {name}")
    return problems


def place(config: RunConfig, here: Sequence[int]) -> tuple[RunConfig, list[str]]:
    """The config with GPUs for every process, and lines that say which GPUs each has."""
    wanted = _wanted_gpus(config)
    named = named_gpus(config)
    rollout = config.rollout
    if config.trainer.gpus and len(config.trainer.gpus) < wanted.get(TRAINER, 0):
        raise ConfigError(
            f"trainer.gpus names {len(config.trainer.gpus)} GPUs for {config.trainer.num_ranks} ranks "
            "(trainer.num_ranks): each has one of its own"
        )
    are_small = wanted.get(TRAINER) == 1 == rollout.vllm.tensor_parallel_size and wanted.get(ROLLOUT)
    if len(here) == 1 and rollout.trainer_gpus == "auto" and not rollout.gpus:
        if are_small and rollout.engine_traits.reserves_gpu_memory:
            config = _with(config, "rollout.trainer_gpus", "turns")
        elif {TRAINER, ROLLOUT} <= wanted.keys():
            # The trainer cannot see which processes share its GPU.
            config = _with(config, "rollout.trainer_gpus", "shared")
    if config.rollout.trainer_gpus != "auto":
        wanted.pop(ROLLOUT, None)
    missing = {name: count for name, count in wanted.items() if count and not named.get(name)}
    in_use = {gpu for gpus in named.values() for gpu in gpus}
    free = [gpu for gpu in here if gpu not in in_use]
    if not here or sum(missing.values()) > len(free):
        return config, _too_few(config, here, missing, len(free))
    for name, count in missing.items():
        config = _with(config, name, tuple(free[:count]))
        free = free[count:]
    if config.rollout.trainer_gpus != "auto":
        config = _shared(config)
    assignments = [
        f"{name.removesuffix('.gpus')} {_list(gpus)}" for name, gpus in named_gpus(config).items() if gpus
    ]
    unused = [f"{_list(free)} unused"] if free else []
    turns = [TURNS] if config.rollout.trainer_gpus == "turns" else []
    return config, [f"GPUs: {', '.join([*assignments, *unused])}", *turns] if assignments else []


def _too_few(config: RunConfig, here: Sequence[int], missing: dict[str, int], num_free: int) -> list[str]:
    """The lines, or the error, where no GPUs are handed out."""
    if not here or not missing:
        return []
    counts = {name.removesuffix(".gpus"): count for name, count in missing.items()}
    if len(here) > 1:
        parts = ", ".join(f"{count} for {name}" for name, count in counts.items())
        raise ConfigError(
            f"the run wants {sum(missing.values())} GPUs ({parts}), and {num_free} of the {len(here)} here "
            "are free. Lower trainer.num_ranks, rollout.workers or rollout.vllm.tensor_parallel_size, or set "
            f"rollout.trainer_gpus; `{command_line('check')}` says what fits"
        )
    if config.rollout.trainer_gpus == "turns":
        others = ", ".join(name for name in counts if name != "trainer")
        return [f"one GPU: {TURNS}; {others} on it at once with either"]
    share = config.rollout.vllm.gpu_memory_utilization
    share_words = (
        f"; rollout.vllm.gpu_memory_utilization leaves {1.0 - share:.0%} of its memory to the others"
    )
    text = f"one GPU: all processes are on GPU {here[0]} at once"
    return [text + (share_words if config.rollout.engine_traits.reserves_gpu_memory else "")]


def _shared(config: RunConfig) -> RunConfig:
    """Rollout workers on the trainer's GPUs, dealt out in turn."""
    rollout = config.rollout
    gpus = config.trainer.gpus
    count = rollout.workers * rollout.vllm.tensor_parallel_size
    if rollout.gpus or not gpus:
        return config
    if rollout.vllm.tensor_parallel_size > len(gpus):
        raise ConfigError(
            f"rollout.vllm.tensor_parallel_size is {rollout.vllm.tensor_parallel_size}, and the trainer, "
            f"whose GPUs rollout workers share, has {len(gpus)}: lower it"
        )
    shared: RunConfig = _with(config, ROLLOUT, tuple(gpus[i % len(gpus)] for i in range(count)))
    return shared


def _with(section: Any, path: str, new_value: Any) -> Any:
    """A copy with one field changed; sections within mappings are found by their keys."""
    name, _, inner_path = path.partition(".")
    before = section[name] if isinstance(section, dict) else getattr(section, name)
    value = _with(before, inner_path, new_value) if inner_path else new_value
    return {**section, name: value} if isinstance(section, dict) else section.model_copy(update={name: value})


def _list(gpus: Sequence[int]) -> str:
    return ",".join(map(str, gpus))
