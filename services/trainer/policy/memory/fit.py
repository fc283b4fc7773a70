"""Holds what a run takes against a machine's memory, and finds what to set where it does not fit.

`choose_passes` is what `auto` means on a GPU: the tokens of a forward pass and whether layers are computed
again, tried from fast to small. `examine_fit` is what `tidemill check` says; `find_settings` looks for the
first settings that fit, from what costs least to what changes the training.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import reduce
from typing import Any

from tidemill.common.config import RunConfig
from tidemill.common.config.trainer import DEFAULT_TILE_TOKENS, LoraConfig
from tidemill.services.trainer.policy.memory.estimate import (
    ASLEEP_BYTES,
    CONTEXT_BYTES,
    GIB,
    EngineTake,
    Parts,
    Take,
    engine_take,
    host_take,
    trainer_take,
    usable,
)
from tidemill.services.trainer.policy.memory.sizes import Model

Settings = dict[str, Any]
"""Fields of the config, and values."""
SMALLEST_TILE = 1024
"""Tokens of a forward pass below which a GPU has too little to do."""
ENOUGH_SEQUENCES = 16
"""Of full length in an engine's KV cache: with fewer, more GPUs hold an engine together."""
WAYS = (1, 2, 4, 8)
AUTO: Settings = {"trainer.micro_batch_tokens": "auto", "trainer.gradient_checkpointing": "auto"}
GPUS_OF_A_HOST = 8


@dataclass(frozen=True, slots=True)
class Machine:
    """What a run is to be held against."""

    gpus: int
    """Of the whole run, over all hosts."""
    gpu_bytes: float
    host_bytes: float | None = None
    """Of each host; null compares nothing."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What the processes of a run take, and what is wrong with that."""

    ranks: int
    tokens: int
    recomputed: bool
    trainer: Take | None
    """None where no model is trained."""
    engine: EngineTake | None
    """None where no vLLM generates."""
    engines: int
    ways: int
    host: Take
    takes_turns: bool
    """Trainer and engines have GPUs in turn."""
    problems: tuple[str, ...] = ()
    settings: Settings = field(default_factory=dict)
    """What to set, where that helps."""

    def as_json(self) -> dict[str, Any]:
        """For another process."""
        trainer, engine = self.trainer, self.engine
        changed = {
            "trainer": trainer and trainer.as_json(),
            "host": self.host.as_json(),
            "engine": engine and {**asdict(engine), "num_sequences": engine.num_sequences},
        }
        return {item.name: getattr(self, item.name) for item in fields(self)} | changed


def choose_passes(config: RunConfig, model: Model, gpu_bytes: float, room: float) -> tuple[int, bool, Take]:
    """Tokens of a forward pass, whether layers are computed again, and what that takes: the first choice that
    fits into `room`, else the smallest. What the config names is kept."""
    found = None
    for num_tokens, recomputed in _choices(config, model):
        take = trainer_take(config, model, gpu_bytes, num_tokens, recomputed)
        if found is None or take.running < found[2].running:
            found = (num_tokens, recomputed, take)
        if take.running <= room:
            break
    assert found is not None, "there is always a choice"
    return found


def _choices(config: RunConfig, model: Model) -> Iterator[tuple[int, bool]]:
    """From fast to small. A pass holds the longest sequence anyway."""
    trainer, longest = config.trainer, config.model.max_model_len
    sizes = [trainer.micro_batch_tokens] if isinstance(trainer.micro_batch_tokens, int) else []
    if not sizes:
        size = max(DEFAULT_TILE_TOKENS, longest)
        while size >= max(SMALLEST_TILE, longest):
            sizes.append(size)
            size //= 2
    given = trainer.gradient_checkpointing
    possible = (False, True) if model.sizes.can_recompute else (False,)
    for recomputed in possible if given == "auto" else (given,):
        # Half of the work of a pass is worth more than computing layers again; less is not.
        limited = sizes[:2] if given == "auto" and not recomputed else sizes
        yield from ((size, recomputed) for size in limited)


def examine_fit(config: RunConfig, model: Model, machine: Machine) -> Fit:
    """The run as it is configured, with its problems and what to set against them."""
    fit = _fit(config, model, machine)
    if not fit.problems:
        return fit
    found = find_settings(config, model, machine, [{}, *_placements(config, model, machine)])
    if not found.problems:
        return replace(fit, settings=found.settings)
    return replace(fit, problems=(*fit.problems, f"the closest that was found: {found.problems[0]}"))


def find_settings(
    config: RunConfig, model: Model, machine: Machine, placements: Sequence[Settings] | None = None
) -> Fit:
    """The run with the first settings with which it fits, else the closest, with its problems. `placements`
    are tried in turn; null are those that use all GPUs."""
    closest: Fit | None = None
    for settings in _settings(config, placements or list(_placements(config, model, machine))):
        fit = _fit(_changed(config, settings), model, machine)
        if fit.trainer is not None:
            chosen = (fit.tokens, fit.recomputed)
            settings = settings | dict(zip(AUTO, chosen, strict=True))
        changed = {
            name: value
            for name, value in settings.items()
            if reduce(getattr, name.split("."), config) != value
        }
        fit = replace(fit, settings=changed)
        if not fit.problems:
            return fit
        if closest is None or (fit.trainer and closest.trainer and fit.trainer.peak < closest.trainer.peak):
            closest = fit
    assert closest is not None, "there is always a placement"
    return closest


def _fit(config: RunConfig, model: Model, machine: Machine) -> Fit:
    trainer, vllm = config.trainer, config.rollout.vllm
    trains, generates = trains_on_gpus(config), config.rollout.engine_traits.reserves_gpu_memory
    ranks, ways = trainer.num_ranks if trains else 0, vllm.tensor_parallel_size
    engines = config.rollout.workers if generates else 0
    is_crowded = machine.gpus == 1 and ranks == 1 and engines == 1 == ways
    turns = ranks > 0 and engines > 0 and takes_turns(config, is_crowded)
    shares = generates and not turns and (config.rollout.trainer_gpus == "shared" or is_crowded)
    engine = engine_take(config, model, machine.gpu_bytes) if generates else None
    room = usable(machine.gpu_bytes)
    if shares:
        room -= vllm.gpu_memory_utilization * machine.gpu_bytes
    if turns:
        room -= ASLEEP_BYTES
    tokens, recomputed, take = choose_passes(config, model, machine.gpu_bytes, room)
    host = _fullest_host(config, model, ranks, engines, ways, turns)
    fit = Fit(ranks, tokens, recomputed, take if trains else None, engine, engines, ways, host, turns)
    problems = []
    if (wanted := ranks + engines * ways) > machine.gpus and not shares and not turns:
        problems.append(
            f"the run wants {wanted} GPUs ({ranks} for the trainer, {engines * ways} for engines), and there "
            f"are {machine.gpus}"
        )
    if fit.trainer is not None and fit.trainer.peak > room:
        problems.append(_trainer_problem(fit, fit.trainer, room, machine, shares))
    if turns and vllm.gpu_memory_utilization * machine.gpu_bytes > machine.gpu_bytes - 2 * CONTEXT_BYTES:
        problems.append(
            f"rollout.vllm.gpu_memory_utilization {vllm.gpu_memory_utilization:g} leaves less than "
            f"{_gib(2 * CONTEXT_BYTES)} GiB of {_gib(machine.gpu_bytes)} to a trainer that waits: "
            "lower it"
        )
    if engine is not None and engine.num_sequences < 1:
        problems.append(
            f"an engine takes {_gib(sum(engine.parts.values()))} GiB of each of its GPUs ({ways}) without a "
            f"KV cache; rollout.vllm.gpu_memory_utilization {vllm.gpu_memory_utilization:g} leaves "
            f"{_gib(engine.room)} GiB for it, and a sequence of {config.model.max_model_len:,} tokens takes "
            f"{_gib(engine.sequence)}"
        )
    if machine.host_bytes is not None and fit.host.peak > machine.host_bytes:
        problems.append(
            f"a host takes {_gib(fit.host.peak)} GiB of its {_gib(machine.host_bytes)}: "
            f"{_list(fit.host.largest)}"
        )
    return replace(fit, problems=tuple(problems))


def takes_turns(config: RunConfig, has_one: bool) -> bool:
    """Whether trainer and engines have their GPUs in turn; `has_one`, where there is one for both."""
    asked = config.rollout.trainer_gpus
    return asked == "turns" or (has_one and asked == "auto")


def _fullest_host(config: RunConfig, model: Model, ranks: int, engines: int, ways: int, turns: bool) -> Take:
    """Of the first host, which has ranks and on its other GPUs engines, and one that has engines alone."""
    own = min(ranks, GPUS_OF_A_HOST)
    beside = min(engines, (GPUS_OF_A_HOST - (0 if turns else own)) // ways)
    hosts = [(own, beside), (0, min(engines - beside, GPUS_OF_A_HOST // ways))]
    return max((host_take(config, model.sizes, *host, turns) for host in hosts), key=lambda take: take.peak)


def trains_on_gpus(config: RunConfig) -> bool:
    """Whether the trainer has a model, and is not told to train it on the CPU."""
    return config.trainer.policy == "transformers" and not config.trainer.device.startswith("cpu")


def _trainer_problem(fit: Fit, take: Take, room: float, machine: Machine, shares: bool) -> str:
    beside = " beside the engine" if shares else ""
    where = f"{_gib(max(room, 0.0))} GiB of {_gib(machine.gpu_bytes)} can be used{beside}"
    if take.peak > take.running:
        return (
            f"each GPU of the trainer holds {_gib(take.peak)} GiB when it starts, where {where}: "
            f"{_list(take.largest)}"
        )
    again = ", which computes layers again" if fit.recomputed else ""
    return (
        f"the trainer takes {_gib(take.peak)} GiB of each GPU with passes of {fit.tokens:,} tokens{again}, "
        f"where {where}: {_list(take.largest)}"
    )


def _settings(config: RunConfig, placements: Sequence[Settings]) -> Iterator[Settings]:
    """From what costs least to what changes the training: passes, ranks and engines, moments on the host, the
    reference's dtype, adapters."""
    trainer, reference = config.trainer, config.trainer.algorithm.reference
    dtype = {"trainer.algorithm.reference.dtype": "bfloat16"} if reference.model != "off" else {}
    steps: list[Settings] = [{}]
    if trainer.lora is None:
        if not trainer.offload_optimizer:
            steps.append({"trainer.offload_optimizer": True})
        if reference.dtype == "float32" and dtype:
            steps += [{**step, **dtype} for step in steps]
        if trainer.algorithm.value.model != "own" and reference.model != "updated":
            steps.append({"trainer.lora": {}} | dict.fromkeys(dtype, "float32"))
    for step in steps:
        yield from ({**AUTO, **step, **placement} for placement in placements)


def _placements(config: RunConfig, model: Model, machine: Machine) -> Iterator[Settings]:
    """Ranks of the trainer and GPUs of an engine: half of the GPUs for each, then more for the trainer. On
    one GPU the engine leaves what the trainer needs."""
    trains, generates = (
        trains_on_gpus(config),
        config.rollout.engine_traits.reserves_gpu_memory and config.rollout.workers > 0,
    )
    if machine.gpus == 1:
        if takes_turns(config, has_one=True) or not (trains and generates):
            yield _shared(config)
            return
        for percent in range(80, 5, -5):
            yield {**_shared(config), "rollout.vllm.gpu_memory_utilization": percent / 100}
        yield {**_shared(config), "rollout.trainer_gpus": "turns"}
        return
    ways = _ways(config, model, machine) if generates else 0
    half, most = machine.gpus // 2, machine.gpus - ways
    possible = sorted({n for n in (half, machine.gpus * 3 // 4, most) if 0 < n <= most})
    for ranks in possible if trains else [0]:
        placement: Settings = {"trainer.num_ranks": ranks, "trainer.shard_ranks": None} if ranks else {}
        if generates:
            placement["rollout.vllm.tensor_parallel_size"] = ways
            placement["rollout.workers"] = (machine.gpus - ranks) // ways
        yield placement


def _shared(config: RunConfig) -> Settings:
    """One GPU for the trainer and an engine."""
    return {
        "trainer.num_ranks": 1,
        "trainer.shard_ranks": None,
        "rollout.workers": min(1, config.rollout.workers),
        "rollout.vllm.tensor_parallel_size": 1,
    }


def _ways(config: RunConfig, model: Model, machine: Machine) -> int:
    """GPUs of an engine: the fewest with enough KV cache, else those with the most."""
    heads = int(model.config.get_text_config().num_attention_heads)
    possible = [ways for ways in WAYS if ways < machine.gpus and heads % ways == 0]
    counts = {ways: engine_take(config, model, machine.gpu_bytes, ways).num_sequences for ways in possible}
    most = max(possible, key=counts.__getitem__)
    return next((ways for ways in possible if counts[ways] >= ENOUGH_SEQUENCES), most)


def _changed(section: Any, settings: Settings) -> Any:
    """The section with fields replaced, unchecked: they are estimated, not run."""
    for path, value in settings.items():
        name, _, rest = path.partition(".")
        if rest:
            value = _changed(getattr(section, name), {rest: value})
        elif path == "lora":
            value = LoraConfig()
        section = section.model_copy(update={name: value})
    return section


def _gib(value: float) -> str:
    return f"{value / GIB:.1f}"


def _list(parts: Parts) -> str:
    """The largest first; what is below a hundredth of all is left out."""
    total = sum(parts.values())
    shown = sorted(((value, name) for name, value in parts.items() if value >= total / 100), reverse=True)
    return ", ".join(f"{name} {_gib(value)}" for value, name in shown)
