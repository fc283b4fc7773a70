"""Says whether a run fits into the memory of GPUs and hosts. A process of the trainer computes it."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from tidemill.common.config import RunConfig, load_config
from tidemill.common.errors import ConfigError
from tidemill.common.process.checks import compute_memory, examine_machine, gib, listed
from tidemill.common.process.gpus import count_gpus, smallest_gpu_bytes
from tidemill.services.console.run.folder import folder_of_runs

GIB = 1 << 30
Machine = dict[str, Any]
"""Keys: `gpus`, the number for the whole run, `gpu_bytes` of each, and `host_bytes` of each host or None."""


def machine_named(gpus: int | None, gpu_gib: float | None, host_gib: float | None) -> Machine | None:
    """The machine of the options, completed from this one; None where neither says how large the GPUs are."""
    is_named = gpus is not None or gpu_gib is not None
    gpu_bytes = smallest_gpu_bytes() if gpu_gib is None else gpu_gib * GIB
    if gpu_bytes is None:
        if is_named:
            raise ConfigError("--gpus needs --gpu-gib on a machine without GPUs: the memory of each.")
        return None
    # GPUs named by options are those of another machine, whose host memory is not known.
    here = None if is_named else float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    host_bytes = here if host_gib is None else host_gib * GIB
    return {"gpus": gpus or count_gpus() or 1, "gpu_bytes": gpu_bytes, "host_bytes": host_bytes}


def check_memory(config: RunConfig, machine: Machine) -> tuple[list[str], list[str]]:
    """Returns lines that say what memory the run takes, and the problems where it does not fit.

    Raises:
        ConfigError: the model cannot be measured.
    """
    if config.trainer.policy == "simulated" and not config.rollout.engine_traits.reserves_gpu_memory:
        return [], []
    # Computed in a process of the trainer: the console imports no torch.
    fit = compute_memory(config, machine)
    problems = [f"memory: {problem}" for problem in fit["problems"]]
    if problems and fit["settings"]:
        problems.append(f"It fits, by the estimate, with {as_overrides(fit['settings'])}")
    elif problems:
        problems.append(
            "Nothing that could be set was found to fit: take more GPUs or larger ones, or a smaller model."
        )
    return list(_lines(fit, config, machine)), problems


def _lines(fit: Mapping[str, Any], config: RunConfig, machine: Machine) -> Iterator[str]:
    trainer = fit["trainer"]
    if trainer is not None:
        again = ", layers computed again" if fit["recomputed"] else ""
        again += f", {fit['context']} ranks share each" if fit["context"] > 1 else ""
        again += f", {fit['experts']} ranks divide experts" if fit["experts"] > 1 else ""
        longest = -(-config.model.max_model_len // fit["context"])
        yield (
            f"trainer: {fit['ranks']} x {gib(trainer['peak'])} of {gib(machine['gpu_bytes'])} GiB, passes "
            f"of {max(fit['tokens'], longest):,} tokens{again}: {listed(trainer['parts'])}"
        )
    engine = fit["engine"]
    if engine is not None and fit["engines"]:
        yield (
            f"engines: {fit['engines']} on {fit['ways']} GPU{'s' * (fit['ways'] > 1)} each: "
            f"{listed(engine['parts'])}; the KV cache holds {engine['num_sequences']:,} sequences of "
            f"{config.model.max_model_len:,} tokens"
        )
    if fit["takes_turns"]:
        yield "trainer and engines take turns on GPUs: one computes, the other waits on the host"
    if fit["host"]["peak"]:
        yield f"host: {gib(fit['host']['peak'])} GiB: {listed(fit['host']['parts'])}"


def as_overrides(settings: Mapping[str, Any]) -> str:
    """Settings as `--set` takes them."""
    return ", ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in settings.items()
    )


def print_machine(path: Path, overrides: Iterable[str], as_json: bool) -> None:
    """Print what this machine is and how fast. Raises ConfigError: the run would fail on it."""
    facts = examine_machine(load_config(path, overrides), folder_of_runs(None))
    if as_json:
        print(json.dumps(facts, indent=2))
    console = Console(highlight=False)
    problems = []
    for fact in facts:
        text = fact["text"] + (f": {fact['remedy']}" if fact["remedy"] else "")
        if fact["is_problem"]:
            problems.append(f"{fact['what']}: {text}")
        elif not as_json:
            style = "yellow" if fact["remedy"] else "bold"
            console.print(Text.assemble((f"{fact['what']}  ", style), text), soft_wrap=True)
    if problems:
        raise ConfigError("\n\n".join(problems))
    if not as_json:
        console.print("[green]ok[/]  nothing here would make the run fail; yellow may make it slow")


def print_memory(path: Path, overrides: Iterable[str], machine: Machine | None) -> None:
    """Print what the run takes; nothing but its config and the model's config.json has to exist."""
    config = load_config(path, overrides)
    if machine is None:
        raise ConfigError("this machine has no GPU: say what there is, as in --gpus 8 --gpu-gib 80.")
    lines, problems = check_memory(config, machine)
    console = Console(highlight=False)
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    if problems:
        raise ConfigError("\n\n".join(problems))
    console.print("[green]ok[/]  it fits, by an estimate; nothing was started")
