"""Says in plain words what a checked config will do: how much per step, how stale, how much memory."""

import json
from dataclasses import asdict
from textwrap import indent

from rich.console import Console
from rich.text import Text

from tidemill.common.config import AlgorithmConfig, RewardConfig
from tidemill.common.config.algorithm_table import PRESETS
from tidemill.common.config.trainer import TrainerConfig
from tidemill.services.console.check.preflight import Findings
from tidemill.services.console.check.redis_size import redis_bytes
from tidemill.services.console.text.formats import printable_block, size
from tidemill.services.console.text.tree import name_table

MAX_READ_CHARACTERS = 4000


def explain(findings: Findings, console: Console | None = None, with_preset: bool = False) -> None:
    """Print the summary of a config without a mistake; `with_preset` also what its preset sets."""
    console = console or Console(highlight=False)
    table = name_table("bold", indent=0)
    for name, text in describe(findings):
        table.add_row(name, Text(text))
    console.print(table)
    if with_preset:
        console.print("\n".join(preset_lines(findings.config.trainer.algorithm)), highlight=False)
    for name, text in findings.reads.items():
        console.print(Text(f"{name} reads of the first training row:", style="bold"))
        console.print(Text(indent(printable_block(text, MAX_READ_CHARACTERS), "  | ")), soft_wrap=True)
    for note in findings.notes:
        console.print(Text.assemble(("note  ", "yellow"), note))
    console.print("[green]ok[/]  nothing wrong was found; nothing was started")


def print_findings(findings: Findings) -> None:
    """The same as JSON, for programs: what is known of each part, and the whole config."""
    model = findings.model
    known = {
        "ok": True,
        "rows": findings.rows,
        "model": None if model is None else asdict(model) | {"path": str(model.path)},
        "redis": findings.redis or None,
        "rewards": findings.rewards,
        "reads": findings.reads,
        "session": findings.session,
        "notes": findings.notes,
        "config": findings.config.model_dump(mode="json"),
    }
    print(json.dumps(known, indent=2))


def describe(findings: Findings) -> list[tuple[str, str]]:
    """Lines of the summary: label and text."""
    config = findings.config
    trainer, rollout, reward = config.trainer, config.rollout, config.reward
    sizes = {config.group_size(source.name) for source in config.data.sources} or {trainer.group_size}
    size = f"{'at most ' * (len(sizes) > 1)}{max(sizes):,}"
    samples = trainer.groups_per_step * max(sizes)
    plural = "" if rollout.workers == 1 else "s"
    lines = [
        ("model", _model(findings)),
        ("data", ", ".join(f"{name} {count:,} rows" for name, count in findings.rows.items())),
        (
            "step",
            f"{trainer.groups_per_step:,} groups of {size} = {samples:,} trajectories, "
            f"at most {samples * rollout.sampling.max_tokens:,} completion tokens",
        ),
        ("run", _length(findings)),
        ("staleness", _staleness(trainer.max_staleness)),
        ("algorithm", _algorithm(trainer)),
        ("rollout", f"{rollout.workers} worker{plural} with the {rollout.engine} engine"),
        ("reward", f"{_rewards(reward)}; {reward.workers} worker{'' if reward.workers == 1 else 's'}"),
        ("", _rewards_checked(findings)),
        ("session", "; ".join(findings.session)),
        *(("" if i else "memory", line) for i, line in enumerate(findings.memory)),
        ("redis", _redis(findings)),
    ]
    return [(name, text) for name, text in lines if text]


def _rewards_checked(findings: Findings) -> str:
    """Exactly what is known about the rewards now."""
    if findings.rewards:
        return "; ".join(findings.rewards)
    return "its code was imported and takes the arguments it will get; it was not called (--no-call-reward)"


def _model(findings: Findings) -> str:
    model, config = findings.model, findings.config.model
    if model is None or model.is_remote:
        return f"{config.path}, {config.dtype}"
    context = f"context {model.context:,}, " if model.context else ""
    return (
        f"{model.path} ({model.architecture or 'unknown'}, {size(model.weight_bytes)}), "
        f"{context}this run uses {config.max_model_len:,} tokens, {config.dtype}"
    )


def _length(findings: Findings) -> str:
    trainer = findings.config.trainer
    groups = trainer.steps * trainer.groups_per_step
    sources = findings.config.data.sources
    total = sum(source.weight for source in sources)
    shares = {f"train {source.name}": source.weight / total for source in sources} or {"train": 1.0}
    parts = []
    for name, share in shares.items():
        rows, source = findings.rows.get(name, 0), name.removeprefix("train").replace(" ", " of ")
        parts.append(f"{groups * share / rows if rows else 0.0:.3g} epochs{source}")
    epochs = f"{trainer.epochs:g} epochs" if trainer.epochs else ", ".join(parts)
    evaluation = trainer.evaluation
    moments = [
        name
        for name, is_on in (
            ("at the start", evaluation.at_start),
            (f"every {evaluation.every} steps", evaluation.every > 0),
            ("at the end", True),
        )
        if is_on
    ]
    evaluated = " and ".join(moments) if findings.config.data.eval and moments else "never"
    every = trainer.checkpoint_every
    kept = f"every {every} steps" if every else "at the end only"
    is_counted = trainer.epochs is None or "steps" in trainer.model_fields_set
    steps = f"{trainer.steps:,} steps = " if is_counted else ""
    return f"{steps}{epochs}; evaluated {evaluated}; checkpoint {kept}"


def _algorithm(trainer: TrainerConfig) -> str:
    algorithm = trainer.algorithm
    origin = f"preset {algorithm.preset}: " if algorithm.preset else ""
    updates = trainer.updates_per_step
    parts = [
        f"{origin}advantage {algorithm.advantage}, loss {algorithm.loss} per {algorithm.normalisation}",
        f"old logprobs: {algorithm.old_logprobs}",
        f"importance {algorithm.importance_mode}",
    ]
    if algorithm.kl.place != "off":
        parts.append(f"KL {algorithm.kl.estimator} in the {algorithm.kl.place}")
    return "; ".join([*parts, f"{updates} update{'' if updates == 1 else 's'} a step"])


def preset_lines(algorithm: AlgorithmConfig) -> list[str]:
    """Each field that the preset sets, with its value there and what is in use."""
    if algorithm.preset is None:
        return ["trainer.algorithm has no preset: every field is its own default, or given"]
    lines = [f"preset {algorithm.preset} sets (docs/algorithms.md says why)"]
    for name, value in PRESETS[algorithm.preset].items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        for part, preset in parts:
            used = getattr(getattr(algorithm, name), part) if part else getattr(algorithm, name)
            field = f"{name}.{part}" if part else name
            lines.append(f"  {field}: {preset}" + ("" if used == preset else f", but {used} is given"))
    return lines


def _staleness(bound: int) -> str:
    if bound == 0:
        return "at most 0 steps: on-policy, rollout and trainer take turns"
    if bound == 1:
        return "at most 1 step: rollout writes the next step's groups while the trainer works on this one"
    return f"at most {bound} steps: asynchronous, rollout may be up to {bound} steps ahead of the trainer"


def _rewards(config: RewardConfig) -> str:
    """Each reward with its limits, and how they come together."""
    texts = []
    for name, reward in config.named.items():
        what = name if reward.function in (None, name) else f"{name} = {reward.function}"
        weight = f"{reward.weight:g} x " if config.rewards else ""
        texts.append(
            f"{weight}{what} ({reward.kind}, {reward.timeout_s:g} s and {reward.max_attempts} attempts each; "
            f"then {reward.on_failure})"
        )
    after = f", then {config.group} over each group" if config.group else ""
    return " + ".join(texts) + after


def _redis(findings: Findings) -> str:
    where = f"{findings.redis} at TIDEMILL_REDIS_URL" if findings.redis else "private, started with the run"
    return f"{where}; at most {size(redis_bytes(findings.config))} if every completion has full length"
