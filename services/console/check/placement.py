"""Which GPUs each process of a run gets on this machine.

Every rank of the trainer, every engine (`rollout.vllm.tensor_parallel_size` each) and every local server gets
GPUs of its own, in this order, from those that no field names. Fields that name GPUs keep them. On a machine
with one GPU the trainer and vLLM take turns on it (`rollout.trainer_gpus`).
"""

import os
from collections.abc import Sequence
from typing import Any

from tidemill.common.command_line import command_line
from tidemill.common.config import RunConfig
from tidemill.common.config.servers import LocalServersConfig
from tidemill.common.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
TRAINER = "trainer.gpus"
ROLLOUT = "rollout.gpus"
TURNS = "trainer and rollout workers take turns on the trainer's GPUs: one computes, the other sleeps"


def local_servers(config: RunConfig) -> dict[str, LocalServersConfig]:
    """The servers of rewards that the run itself starts."""
    return {name: servers.local for name, servers in config.servers.items() if servers.local}


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
    of_servers = {f"servers.{name}.local.gpus": local.gpus for name, local in local_servers(config).items()}
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
    for name, local in local_servers(config).items():
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
    have_one_gpu = wanted.get(TRAINER) == 1 and rollout.vllm.tensor_parallel_size == 1
    if len(here) == 1 and rollout.trainer_gpus == "auto" and not rollout.gpus:
        if have_one_gpu and wanted.get(ROLLOUT) and rollout.engine_traits.reserves_gpu_memory:
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
        f"{name.removesuffix('.gpus')} {in_words(gpus)}" for name, gpus in named_gpus(config).items() if gpus
    ]
    unused = [f"{in_words(free)} unused"] if free else []
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


def in_words(gpus: Sequence[int]) -> str:
    """As CUDA_VISIBLE_DEVICES takes them."""
    return ",".join(map(str, gpus))
