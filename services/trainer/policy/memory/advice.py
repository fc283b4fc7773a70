"""`python -m tidemill.services.trainer.policy.memory.advice REQUEST`: whether a run fits into memory.

`examine_fit` is what `tidemill check` says; `find_settings` looks for the first settings that fit, from what
costs least to what changes the training. No trainer imports this file.

The request is JSON: `config`, a whole run's, and a `machine` with `gpus`, `gpu_bytes` and `host_bytes`. The
answer is a `Fit`. A process of its own, because it imports torch and transformers.
"""

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from tidemill.common.config import RunConfig
from tidemill.common.process.checks import Answer, answer_check, gib, listed
from tidemill.services.trainer.policy.memory.estimate import (
    CONTEXT_BYTES,
    EngineTake,
    Take,
    engine_take,
    host_take,
    num_shards,
)
from tidemill.services.trainer.policy.memory.fit import (
    CONTEXT,
    EXPERTS,
    RECOMPUTES,
    TOKENS,
    Settings,
    choose_passes,
    choose_ranks,
    context_sizes,
    experts_apart,
    num_engines,
    trainer_room,
    value_of,
    with_settings,
)
from tidemill.services.trainer.policy.memory.sizes import ModelSizes, read_model

ENOUGH_SEQUENCES = 16
"""Sequences of full length in an engine's KV cache: with fewer, more GPUs hold an engine together."""
WAYS = (1, 2, 4, 8)
GPUS_OF_A_HOST = 8


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware that a run has to fit on.

    Example: a host with 8 GPUs of 80 GiB and 1 TiB: `gpus` 8, `gpu_bytes` 80 * GIB, `host_bytes` 1024 * GIB.
    """

    gpus: int
    """GPUs of the whole run, over all hosts."""
    gpu_bytes: float
    host_bytes: float | None = None
    """Memory of each host; None: not compared."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What the processes of a run take, and what is wrong with that.

    Example: `ranks` 4 with passes of `tokens` 8192, `engines` 4 on `ways` 1 GPU each; `problems` ("the
    trainer takes 91.0 GiB of each GPU ...",), `settings` {"trainer.offload_optimizer": True}.
    """

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


def examine_fit(config: RunConfig, sizes: ModelSizes, machine: Machine) -> Fit:
    """The run as it is configured, with its problems and what to set against them."""
    fit = examine(config, sizes, machine)
    if not fit.problems:
        return fit
    advised = find_settings(config, sizes, machine, keeps_placement=True)
    if not advised.problems:
        return replace(fit, settings=advised.settings)
    return replace(fit, problems=(*fit.problems, f"the last that was tried: {advised.problems[0]}"))


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
        changed = with_settings(config, tried)
        if EXPERTS in tried:
            tried[EXPERTS] = experts_apart(changed, sizes, GPUS_OF_A_HOST)
            if tried[EXPERTS] == 1:
                continue
            changed = with_settings(changed, {EXPERTS: tried[EXPERTS]})
        trainer = changed.trainer
        if trainer.num_ranks % trainer.context_size or num_shards(changed) % trainer.expert_size:
            continue
        settings = tried
        fit = examine(changed, sizes, machine)
        if not fit.problems:
            break
    if fit.trainer is not None:
        settings |= {TOKENS: fit.tokens, RECOMPUTES: fit.recomputed}
    if is_auto and settings.get(CONTEXT) == 1:
        settings.pop(CONTEXT)
    return replace(fit, settings={n: value for n, value in settings.items() if value_of(config, n) != value})


def examine(config: RunConfig, sizes: ModelSizes, machine: Machine) -> Fit:
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
    wanted = ranks + engines * ways
    if wanted > machine.gpus and not shares and not turns:
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
    return Fit(
        ranks=ranks,
        tokens=tokens,
        recomputed=recomputed,
        context=config.trainer.context_size,
        experts=config.trainer.expert_size,
        trainer=take if trains else None,
        engine=engine,
        engines=engines,
        ways=ways,
        host=host,
        takes_turns=turns,
        problems=tuple(problems),
        settings={},
    )


def takes_turns(config: RunConfig, has_one: bool) -> bool:
    """Whether trainer and engines have their GPUs in turn; `has_one`, where there is one for both."""
    asked = config.rollout.trainer_gpus
    return asked == "turns" or (has_one and asked == "auto")


def trains_on_gpus(config: RunConfig) -> bool:
    """Whether the trainer has a model, and does not have to train it on the CPU."""
    return config.trainer.policy == "transformers" and not config.trainer.device.startswith("cpu")


def _fullest_host(
    config: RunConfig, sizes: ModelSizes, ranks: int, engines: int, ways: int, turns: bool
) -> Take:
    """What the fuller of two hosts takes: the first, with ranks and engines, and one with engines alone."""
    first = min(ranks, GPUS_OF_A_HOST)
    beside = min(engines, (GPUS_OF_A_HOST - (0 if turns else first)) // ways)
    hosts = [(first, beside), (0, min(engines - beside, GPUS_OF_A_HOST // ways))]
    return max((host_take(config, sizes, *host, turns) for host in hosts), key=lambda take: take.peak)


def _remedies(config: RunConfig, sizes: ModelSizes) -> Iterator[Settings]:
    """Settings to try, from what costs least to what changes the training: passes alone, experts that ranks
    divide, moments on the host, passes that ranks share, the reference's dtype, adapters."""
    trainer = config.trainer
    reference = config.trainer.algorithm.reference
    offload: Settings = {"trainer.offload_optimizer": True}
    divides = sizes.num_experts > 1 and trainer.expert_size == 1
    apart: list[Settings] = [{}, {EXPERTS: GPUS_OF_A_HOST}] if divides else [{}]
    cheap = apart if trainer.lora is not None else [*apart, *({**offload, **divided} for divided in apart)]
    contexts: list[Settings] = [{}, *({CONTEXT: size} for size in context_sizes(config, sizes))]
    changes: list[tuple[Settings, list[Settings]]] = [({}, cheap)]
    dtype = "trainer.algorithm.reference.dtype"
    if trainer.lora is None and reference.model != "off" and reference.dtype == "float32":
        changes.append(({dtype: "bfloat16"}, cheap))
    if trainer.lora is None and trainer.algorithm.value.model != "own" and reference.model != "updated":
        changes.append(({"trainer.lora": {}, dtype: "float32"}, apart))
    for change, cheaper in changes:
        for context in contexts:
            for settings in cheaper:
                yield {**context, **settings, **change}


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


def report(request: Any) -> Answer:
    """The answer to one request. Raises ConfigError: the model cannot be measured."""
    config = RunConfig.model_validate(request["config"])
    return asdict(examine_fit(config, read_model(config), Machine(**request["machine"])))


if __name__ == "__main__":
    sys.exit(answer_check(report))
