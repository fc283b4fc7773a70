"""`python -m tidemill.services.trainer.policy.memory.fit REQUEST`: whether a run fits into memory.

`choose_passes` is what `auto` means on a GPU: the tokens of a forward pass and whether layers are computed
again, tried from fast to small. `examine_fit` is what `tidemill check` says; `find_settings` looks for the
first settings that fit, from what costs least to what changes the training.

The request is JSON: `config`, a whole run's; `machines`, a list of `gpus`, `gpu_bytes` and `host_bytes`; and
`finds`, whether settings that use all GPUs are looked for, whatever the config's are. The answer has a `Fit`
for each machine. A process of its own, because it imports torch and transformers.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import reduce
from itertools import product
from math import gcd
from pathlib import Path
from typing import Any

import structlog
import torch

from tidemill.common.config import RunConfig
from tidemill.common.config.trainer import DEFAULT_RANK_TOKENS, LoraConfig
from tidemill.common.errors import ConfigError
from tidemill.common.files import write_atomically
from tidemill.common.process.checks import Answer, answer_check, gib, listed
from tidemill.common.run.model_config import has_capped_attention
from tidemill.services.trainer.policy.attention import layer_configs
from tidemill.services.trainer.policy.memory.estimate import (
    ASLEEP_BYTES,
    CONTEXT_BYTES,
    GIB,
    EngineTake,
    Take,
    engine_take,
    host_take,
    longest_part,
    num_shards,
    trainer_take,
    usable,
)
from tidemill.services.trainer.policy.memory.sizes import ModelSizes, read_model
from tidemill.services.trainer.policy.model_loading import pick_device
from tidemill.services.trainer.policy.packing import SOFTMAX_ATTENTION, kinds_of_layers

log = structlog.get_logger(__name__)


Settings = dict[str, Any]
"""Fields of the config, and values."""
TOKENS = "trainer.micro_batch_tokens"
RECOMPUTES = "trainer.gradient_checkpointing"
CONTEXT = "trainer.context_ranks"
EXPERTS = "trainer.expert_ranks"
PASSES_FILE = "passes.json"
"""File in the run's folder with the sizes of passes that the run started with. Another GPU would choose
others, and sum gradients in another order: a replay there would not give the recorded bits."""


def with_fitting_passes(config: RunConfig, folder: Path | None = None) -> RunConfig:
    """`auto` of the trainer's passes and ranks replaced by what fits on this GPU; on a CPU, and where the
    model cannot be measured, it stays. With the run's folder, tokens and ranks are those that the run has had
    from its start."""
    device = pick_device(config.trainer.device)
    fields = (TOKENS, RECOMPUTES, *((CONTEXT, EXPERTS) if config.trainer.num_ranks > 1 else ()))
    autos = [field for field in fields if _value(config, field) == "auto"]
    if device.type != "cuda" or not autos:
        return config
    kept = {field: field.rpartition(".")[2] for field in autos if field != RECOMPUTES}
    record = None if folder is None or not kept else folder / PASSES_FILE
    if record is not None and record.exists():
        # Runs that began before ranks were chosen have had 1.
        known = {"context_ranks": 1, "expert_ranks": 1, **json.loads(record.read_text())}
        config = _changed(config, {field: known[name] for field, name in kept.items() if name in known})
    try:
        sizes = read_model(config)
    except ConfigError as error:
        log.warning("passes are not fitted to the GPU's memory", reason=str(error))
        return config
    gpu_bytes = float(torch.cuda.get_device_properties(device).total_memory)
    placed = config.rollout.trainer_gpus
    is_shared = placed == "shared" and num_engines(config) > 0
    room = trainer_room(config, gpu_bytes, placed == "turns", is_shared)
    width = int(os.environ.get("LOCAL_WORLD_SIZE", config.trainer.num_ranks))
    config = choose_ranks(config, sizes, gpu_bytes, room, width)
    tokens, recomputed, take = choose_passes(config, sizes, gpu_bytes, room)
    config = _changed(config, {TOKENS: tokens, RECOMPUTES: recomputed})
    chosen = {name: _value(config, field) for field, name in kept.items()}
    report = log.info if take.running <= room else log.warning
    report(
        "passes are fitted to the GPU's memory",
        **{field.rpartition(".")[2]: _value(config, field) for field in fields},
        estimated_gib=round(take.running / GIB, 1),
        usable_gib=round(room / GIB, 1),
    )
    if record is not None and not record.exists():
        write_atomically(record, json.dumps(chosen) + "\n")
    return config


SMALLEST_TILE = 1024
"""Tokens of a forward pass below which a GPU has too little to do."""
ENOUGH_SEQUENCES = 16
"""Sequences of full length in an engine's KV cache: with fewer, more GPUs hold an engine together."""
WAYS = (1, 2, 4, 8)
CONTEXT_SIZES = (2, 4, 8, 16, 32)
"""Ranks that share passes; more than a host has only where nothing else fits."""
GPUS_OF_A_HOST = 8


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware that a run has to fit on."""

    gpus: int
    """GPUs of the whole run, over all hosts."""
    gpu_bytes: float
    host_bytes: float | None = None
    """Memory of each host; None: not compared."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What the processes of a run take, and what is wrong with that."""

    ranks: int
    tokens: int
    recomputed: bool
    context: int
    experts: int
    """Ranks that share passes (`context`), and that divide experts."""
    trainer: Take | None
    """None where no model is trained."""
    engine: EngineTake | None
    """None where no vLLM generates."""
    engines: int
    ways: int
    host: Take
    takes_turns: bool
    """Trainer and engines have GPUs in turn."""
    problems: tuple[str, ...]
    settings: Settings
    """Settings with which the run fits, where some were found."""


def trainer_room(config: RunConfig, gpu_bytes: float, takes_turns: bool, is_shared: bool) -> float:
    """Bytes of a GPU that the trainer can use, where it may use it in turn with an engine, or share it."""
    if takes_turns:
        return usable(gpu_bytes) - ASLEEP_BYTES
    return usable(gpu_bytes) - (config.rollout.vllm.gpu_memory_utilization * gpu_bytes if is_shared else 0.0)


def choose_passes(
    config: RunConfig, sizes: ModelSizes, gpu_bytes: float, room: float
) -> tuple[int, bool, Take]:
    """Tokens of a forward pass, whether layers are computed again, and what that takes: the first choice that
    fits into `room`, else the smallest. What the config names is kept."""
    takes = [
        (num_tokens, recomputed, trainer_take(config, sizes, gpu_bytes, num_tokens, recomputed))
        for num_tokens, recomputed in _choices(config, sizes)
    ]
    fitting = (choice for choice in takes if choice[2].running <= room)
    return next(fitting, min(takes, key=lambda choice: choice[2].running))


def choose_ranks(
    config: RunConfig, sizes: ModelSizes, gpu_bytes: float, room: float, width: int
) -> RunConfig:
    """Replace `auto`: of ranks that share a pass by the fewest with which one fits into `room`, else by 1; of
    ranks that divide experts by `experts_apart` over several hosts of `width` ranks, else by 1."""
    trainer = config.trainer
    if trainer.expert_ranks == "auto":
        size = experts_apart(config, sizes, width) if trainer.num_ranks > width else 1
        config = _changed(config, {EXPERTS: size})
    if trainer.context_ranks != "auto":
        return config
    possible = [n for n in _context_sizes(config, sizes) if trainer.num_ranks % n == 0]
    tried: list[RunConfig] = [_changed(config, {CONTEXT: size}) for size in (1, *possible)]
    fitting = (one for one in tried if choose_passes(one, sizes, gpu_bytes, room)[2].running <= room)
    return next(fitting, tried[0])


def experts_apart(config: RunConfig, sizes: ModelSizes, width: int) -> int:
    """The most of a host's `width` ranks that can divide the experts; 1 where there are none."""
    return gcd(width, num_shards(config), sizes.num_experts) if sizes.num_experts else 1


def _choices(config: RunConfig, sizes: ModelSizes) -> list[tuple[int, bool]]:
    """Tokens of a pass, and whether layers are computed again, from fast to small. A pass holds a rank's part
    of the longest sequence in any case."""
    tokens = config.trainer.micro_batch_tokens
    recomputed = config.trainer.gradient_checkpointing
    if isinstance(tokens, int):
        tiles = [tokens]
    else:
        longest = longest_part(config)
        tiles = [max(DEFAULT_RANK_TOKENS, longest)]
        while tiles[-1] // 2 >= max(SMALLEST_TILE, longest):
            tiles.append(tiles[-1] // 2)
    if recomputed != "auto":
        return [(size, recomputed) for size in tiles]
    # Half of the work of a pass is worth more than computing layers again; less is not.
    kept = [(size, False) for size in tiles[:2]]
    return kept + [(size, True) for size in tiles] if sizes.can_recompute else kept


def examine_fit(config: RunConfig, sizes: ModelSizes, machine: Machine) -> Fit:
    """The run as it is configured, with its problems and what to set against them."""
    fit = _fit(config, sizes, machine)
    if not fit.problems:
        return fit
    found = find_settings(config, sizes, machine, keeps_placement=True)
    if not found.problems:
        return replace(fit, settings=found.settings)
    return replace(fit, problems=(*fit.problems, f"the last that was tried: {found.problems[0]}"))


def find_settings(
    config: RunConfig, sizes: ModelSizes, machine: Machine, keeps_placement: bool = False
) -> Fit:
    """The run with the first settings with which it fits, else the last, with its problems: from what costs
    least to what changes the training, with all GPUs in use; `keeps_placement` tries the config's own ranks
    and engines first."""
    placements: list[Settings] = [{}] if keeps_placement else []
    placements += _placements(config, sizes, machine)
    settings: Settings = {}
    is_auto = config.trainer.context_ranks == "auto"
    # What costs less comes before passes that ranks share.
    passes: Settings = {TOKENS: "auto", RECOMPUTES: "auto"} | ({CONTEXT: 1} if is_auto else {})
    for remedies, placement in product(_remedies(config, sizes), placements):
        tried = passes | remedies | placement
        changed = _changed(config, tried)
        if EXPERTS in tried:
            tried[EXPERTS] = experts_apart(changed, sizes, GPUS_OF_A_HOST)
            if tried[EXPERTS] == 1:
                continue
            changed = _changed(changed, {EXPERTS: tried[EXPERTS]})
        trainer = changed.trainer
        if trainer.num_ranks % trainer.context_size or num_shards(changed) % trainer.expert_size:
            continue
        settings = tried
        fit = _fit(changed, sizes, machine)
        if not fit.problems:
            break
    if fit.trainer is not None:
        settings |= {TOKENS: fit.tokens, RECOMPUTES: fit.recomputed}
    if is_auto and settings.get(CONTEXT) == 1:
        settings.pop(CONTEXT)
    return replace(fit, settings={n: value for n, value in settings.items() if _value(config, n) != value})


def _value(config: RunConfig, field: str) -> Any:
    return reduce(getattr, field.split("."), config)


def _fit(config: RunConfig, sizes: ModelSizes, machine: Machine) -> Fit:
    trainer = config.trainer
    rollout = config.rollout
    gpu_bytes = machine.gpu_bytes
    trains = trains_on_gpus(config)
    engines = num_engines(config)
    ranks = trainer.num_ranks if trains else 0
    ways = rollout.vllm.tensor_parallel_size
    generates = rollout.engine_traits.reserves_gpu_memory
    is_crowded = machine.gpus == 1 and ranks == 1 and engines == 1 == ways
    turns = ranks > 0 and engines > 0 and takes_turns(config, is_crowded)
    shares = generates and not turns and (rollout.trainer_gpus == "shared" or is_crowded)
    engine = engine_take(config, sizes, gpu_bytes, ways) if generates else None
    room = trainer_room(config, gpu_bytes, turns, shares)
    config = choose_ranks(config, sizes, gpu_bytes, room, GPUS_OF_A_HOST)
    tokens, recomputed, take = choose_passes(config, sizes, gpu_bytes, room)
    host = _fullest_host(config, sizes, ranks, engines, ways, turns)
    problems: list[str] = []
    if (wanted := ranks + engines * ways) > machine.gpus and not shares and not turns:
        problems.append(
            f"the run wants {wanted} GPUs ({ranks} for the trainer, {engines * ways} for engines), and there "
            f"are {machine.gpus}"
        )
    if trains and take.peak > room:
        again = ", which computes layers again" if recomputed else ""
        when = "when it starts" if take.peak > take.running else f"with passes of {tokens:,} tokens{again}"
        problems.append(
            f"the trainer takes {gib(take.peak)} GiB of each GPU {when}, where {gib(max(room, 0.0))} GiB "
            f"of {gib(gpu_bytes)} can be used{' beside the engine' if shares else ''}: {listed(take.parts)}"
        )
    utilization = rollout.vllm.gpu_memory_utilization
    if turns and utilization * gpu_bytes > gpu_bytes - 2 * CONTEXT_BYTES:
        problems.append(
            f"rollout.vllm.gpu_memory_utilization {utilization:g} leaves less than {gib(2 * CONTEXT_BYTES)} "
            f"GiB of {gib(gpu_bytes)} to a trainer that waits: lower it"
        )
    if engine is not None and engine.num_sequences < 1:
        problems.append(
            f"an engine takes {gib(sum(engine.parts.values()))} GiB of each of its GPUs ({ways}) without a "
            f"KV cache; rollout.vllm.gpu_memory_utilization {utilization:g} leaves {gib(engine.room)} GiB "
            f"for it, and a sequence of {config.model.max_model_len:,} tokens takes {gib(engine.sequence)}"
        )
    if machine.host_bytes is not None and host.peak > machine.host_bytes:
        problems.append(
            f"a host takes {gib(host.peak)} GiB of its {gib(machine.host_bytes)}: {listed(host.parts)}"
        )
    own = take if trains else None
    apart = config.trainer.context_size, config.trainer.expert_size
    return Fit(
        ranks, tokens, recomputed, *apart, own, engine, engines, ways, host, turns, tuple(problems), {}
    )


def takes_turns(config: RunConfig, has_one: bool) -> bool:
    """Whether trainer and engines have their GPUs in turn; `has_one`, where there is one for both."""
    asked = config.rollout.trainer_gpus
    return asked == "turns" or (has_one and asked == "auto")


def trains_on_gpus(config: RunConfig) -> bool:
    """Whether the trainer has a model, and does not have to train it on the CPU."""
    return config.trainer.policy == "transformers" and not config.trainer.device.startswith("cpu")


def num_engines(config: RunConfig) -> int:
    """Number of engines that reserve GPU memory."""
    return config.rollout.workers if config.rollout.engine_traits.reserves_gpu_memory else 0


def _fullest_host(
    config: RunConfig, sizes: ModelSizes, ranks: int, engines: int, ways: int, turns: bool
) -> Take:
    """What the fuller of two hosts takes: the first, with ranks and engines, and one with engines alone."""
    own = min(ranks, GPUS_OF_A_HOST)
    beside = min(engines, (GPUS_OF_A_HOST - (0 if turns else own)) // ways)
    hosts = [(own, beside), (0, min(engines - beside, GPUS_OF_A_HOST // ways))]
    return max((host_take(config, sizes, *host, turns) for host in hosts), key=lambda take: take.peak)


def _remedies(config: RunConfig, sizes: ModelSizes) -> Iterator[Settings]:
    """Settings to try, from what costs least to what changes the training: passes alone, experts that ranks
    divide, moments on the host, passes that ranks share, the reference's dtype, adapters."""
    trainer = config.trainer
    reference = config.trainer.algorithm.reference
    offload: Settings = {"trainer.offload_optimizer": True}
    divides = sizes.num_experts > 1 and trainer.expert_size == 1
    apart: list[Settings] = [{}, {EXPERTS: GPUS_OF_A_HOST}] if divides else [{}]
    cheap = apart if trainer.lora is not None else [*apart, *({**offload, **one} for one in apart)]
    contexts: list[Settings] = [{}, *({CONTEXT: size} for size in _context_sizes(config, sizes))]
    changes: list[tuple[Settings, list[Settings]]] = [({}, cheap)]
    dtype = "trainer.algorithm.reference.dtype"
    if trainer.lora is None and reference.model != "off" and reference.dtype == "float32":
        changes.append(({dtype: "bfloat16"}, cheap))
    if trainer.lora is None and trainer.algorithm.value.model != "own" and reference.model != "updated":
        changes.append(({"trainer.lora": {}, dtype: "float32"}, apart))
    for change, others in changes:
        yield from ({**context, **one, **change} for context in contexts for one in others)


def _context_sizes(config: RunConfig, sizes: ModelSizes) -> list[int]:
    """Numbers of ranks that could share passes over the longest sequences, with enough tokens for each."""
    text = sizes.config.get_text_config()
    is_packed = config.trainer.packing and kinds_of_layers(text) <= SOFTMAX_ATTENTION
    if not is_packed or has_capped_attention(text):
        return []
    counts = [int(layer.num_attention_heads) for layer in layer_configs(sizes.config)]
    most = config.model.max_model_len // SMALLEST_TILE
    return [n for n in CONTEXT_SIZES if n <= most and not any(count % n for count in counts)]


def _placements(config: RunConfig, sizes: ModelSizes, machine: Machine) -> Iterator[Settings]:
    """Ranks of the trainer and GPUs of an engine: half of the GPUs for each, then more for the trainer. On
    one GPU the engine leaves what the trainer needs."""
    trains = trains_on_gpus(config)
    generates = num_engines(config) > 0
    ways_field = "rollout.vllm.tensor_parallel_size"
    ranks = {"trainer.shard_ranks": None}
    if machine.gpus == 1:
        workers = min(1, config.rollout.workers)
        shared = {**ranks, "trainer.num_ranks": 1, "rollout.workers": workers, ways_field: 1}
        if takes_turns(config, has_one=True) or not (trains and generates):
            yield shared
            return
        for percent in range(80, 5, -5):
            yield {**shared, "rollout.vllm.gpu_memory_utilization": percent / 100}
        yield {**shared, "rollout.trainer_gpus": "turns"}
        return
    ways = _ways(config, sizes, machine) if generates else 0
    most = machine.gpus - ways
    possible = {n for n in (machine.gpus // 2, machine.gpus * 3 // 4, most) if 0 < n <= most}
    for count in sorted(possible) if trains else [0]:
        placement: Settings = {**ranks, "trainer.num_ranks": count} if count else {}
        if generates:
            placement |= {ways_field: ways, "rollout.workers": (machine.gpus - count) // ways}
        yield placement


def _ways(config: RunConfig, sizes: ModelSizes, machine: Machine) -> int:
    """GPUs of an engine: the fewest with enough KV cache, else those with the most."""
    heads = int(sizes.config.get_text_config().num_attention_heads)
    possible = [ways for ways in WAYS if ways < machine.gpus and heads % ways == 0]
    counts = {ways: engine_take(config, sizes, machine.gpu_bytes, ways).num_sequences for ways in possible}
    most = max(possible, key=counts.__getitem__)
    return next((ways for ways in possible if counts[ways] >= ENOUGH_SEQUENCES), most)


def _changed(section: Any, settings: Settings) -> Any:
    """The section with fields replaced, not validated: it is only used for estimates."""
    for path, value in settings.items():
        name, _, rest = path.partition(".")
        if rest:
            value = _changed(getattr(section, name), {rest: value})
        elif path == "lora":
            value = LoraConfig()
        section = section.model_copy(update={name: value})
    return section


def report(request: Any) -> Answer:
    """The answer to one request. Raises ConfigError: the model cannot be measured."""
    config = RunConfig.model_validate(request["config"])
    return asdict(examine_fit(config, read_model(config), Machine(**request["machine"])))


if __name__ == "__main__":
    sys.exit(answer_check(report))
