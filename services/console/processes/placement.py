"""Which GPUs of this machine the processes of `tidemill up` get, where the config names none.

Every rank of the trainer, every engine (`rollout.vllm.tensor_parallel_size` each) and every local server gets
GPUs of its own, in this order, from those that nobody has named. What is named stays. On a machine
with one GPU the trainer and vLLM take turns on it (`rollout.trainer_gpus`).
"""

import os
from collections.abc import Sequence
from typing import Any

from tidemill.common.config import RunConfig
from tidemill.common.errors import ConfigError
from tidemill.services.console.processes.service import VISIBLE

TRAINER, ROLLOUT = ("trainer", "gpus"), ("rollout", "gpus")


def gpus_here(count: int | None) -> list[int]:
    """Numbers of the GPUs that may be handed out: CUDA_VISIBLE_DEVICES, else all; none where it is not known,
    or names them otherwise than by number."""
    named = os.environ.get(VISIBLE)
    if named is None:
        return list(range(count or 0))
    numbers = [name.strip() for name in named.split(",") if name.strip()]
    return [int(number) for number in numbers] if all(number.isdigit() for number in numbers) else []


Field = tuple[str, ...]
"""The path to a list of GPUs in the config."""


def named_gpus(config: RunConfig) -> dict[Field, tuple[int, ...]]:
    """GPUs of each field that can name some."""
    named: dict[Field, tuple[int, ...]] = {TRAINER: config.trainer.gpus, ROLLOUT: config.rollout.gpus}
    for name, servers in config.servers.items():
        if servers.local is not None:
            named["servers", name, "local", "gpus"] = servers.local.gpus
    return named


def wanted_gpus(config: RunConfig) -> dict[Field, int]:
    """How many GPUs each of these fields should have, for processes that use any."""
    trainer, rollout = config.trainer, config.rollout
    wanted: dict[Field, int] = {}
    if trainer.policy == "transformers" and not trainer.device.startswith("cpu"):
        wanted[TRAINER] = trainer.num_ranks
    if rollout.engine_traits.loads_model:
        wanted[ROLLOUT] = rollout.workers * rollout.vllm.tensor_parallel_size
    for name, servers in config.servers.items():
        local = servers.local
        # Whether another server's command uses GPUs is not known.
        if local and not local.shares_rollout_gpus and not local.command and VISIBLE not in local.env:
            wanted["servers", name, "local", "gpus"] = local.count
    return wanted


def find_overlaps(config: RunConfig) -> list[str]:
    """GPUs that two processes are given, where no sharing is asked for."""
    owners: dict[int, Field] = {}
    problems = []
    for field, gpus in named_gpus(config).items():
        if field == TRAINER and len(set(gpus)) < len(gpus):
            problems.append("trainer.gpus names a GPU twice")
        for gpu in dict.fromkeys(gpus):
            owner = owners.setdefault(gpu, field)
            is_asked = (owner, field) == (TRAINER, ROLLOUT) and config.rollout.trainer_gpus != "auto"
            if owner != field and not is_asked:
                problems.append(f"GPU {gpu} is in {_dotted(owner)} and in {_dotted(field)}")
    return problems


def place(config: RunConfig, here: Sequence[int]) -> tuple[RunConfig, list[str]]:
    """The config with GPUs for every process, and what there is to say of them.

    Raises:
        ConfigError: there are several GPUs, and still too few.
    """
    named, wanted = named_gpus(config), wanted_gpus(config)
    if config.trainer.gpus and len(config.trainer.gpus) < wanted.get(TRAINER, 0):
        raise ConfigError(
            f"trainer.gpus names {len(config.trainer.gpus)} GPUs for {config.trainer.num_ranks} ranks "
            "(trainer.num_ranks): each has one of its own"
        )
    if _has_one_for_both(config, here, wanted):
        config = _with(config, ("rollout", "trainer_gpus"), "turns")
    elif len(here) == 1 and {TRAINER, ROLLOUT} <= wanted.keys() and config.rollout.trainer_gpus == "auto":
        # The trainer cannot see which processes share its GPU.
        config = _with(config, ("rollout", "trainer_gpus"), "shared") if not named[ROLLOUT] else config
    if config.rollout.trainer_gpus != "auto":
        wanted.pop(ROLLOUT, None)
    missing = {field: count for field, count in wanted.items() if count and not named.get(field)}
    free = [gpu for gpu in here if not any(gpu in gpus for gpus in named.values())]
    needed = sum(missing.values())
    if not here or needed > len(free):
        return config, _too_few(config, here, missing, len(free))
    for field, count in missing.items():
        config, free = _with(config, field, tuple(free[:count])), free[count:]
    if config.rollout.trainer_gpus != "auto":
        config = _shared(config)
    given = [f"{_dotted(field[:-1])} {_list(gpus)}" for field, gpus in named_gpus(config).items() if gpus]
    unused = [f"{_list(free)} unused"] if free else []
    turns = [TURNS] if config.rollout.trainer_gpus == "turns" else []
    return config, [f"GPUs: {', '.join([*given, *unused])}", *turns] if given else []


TURNS = "trainer and rollout workers take turns on the trainer's GPUs: one computes, the other sleeps"


def _has_one_for_both(config: RunConfig, here: Sequence[int], wanted: dict[Field, int]) -> bool:
    """Whether trainer and engines have one GPU in all, and nothing is said of how they share it."""
    rollout = config.rollout
    are_small = wanted.get(TRAINER) == 1 == rollout.vllm.tensor_parallel_size and rollout.workers > 0
    is_one = len(here) == 1 and rollout.engine_traits.reserves_gpu_memory
    return rollout.trainer_gpus == "auto" and is_one and are_small and not rollout.gpus


def _too_few(config: RunConfig, here: Sequence[int], missing: dict[Field, int], num_free: int) -> list[str]:
    """What to say where nothing is handed out."""
    if not here or not missing:
        return []
    if len(here) == 1:
        if config.rollout.trainer_gpus == "turns":
            others = ", ".join(_dotted(field[:-1]) for field in missing if field != TRAINER)
            return [f"one GPU: {TURNS}; {others} on it at once with either"]
        share = config.rollout.vllm.gpu_memory_utilization
        left = f"; rollout.vllm.gpu_memory_utilization leaves {1.0 - share:.0%} of its memory to the others"
        text = f"one GPU: all processes are on GPU {here[0]} at once"
        return [text + (left if config.rollout.engine_traits.reserves_gpu_memory else "")]
    parts = ", ".join(f"{count} for {_dotted(field[:-1])}" for field, count in missing.items())
    raise ConfigError(
        f"the run wants {sum(missing.values())} GPUs ({parts}), and {num_free} of the {len(here)} here are "
        "free. Lower trainer.num_ranks, rollout.workers or rollout.vllm.tensor_parallel_size, or set "
        "rollout.trainer_gpus; `tidemill check` says what fits"
    )


def _shared(config: RunConfig) -> RunConfig:
    """Rollout workers on the trainer's GPUs, dealt out in turn."""
    rollout, gpus = config.rollout, config.trainer.gpus
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


def _with(section: Any, path: Sequence[str], given: Any) -> Any:
    """A copy with one field changed; sections within mappings are found by their keys."""
    name, *rest = path
    if isinstance(section, dict):
        return {**section, name: _with(section[name], rest, given)}
    value = _with(getattr(section, name), rest, given) if rest else given
    return section.model_copy(update={name: value})


def _dotted(field: Field) -> str:
    return ".".join(field)


def _list(gpus: Sequence[int]) -> str:
    return ",".join(map(str, gpus))
