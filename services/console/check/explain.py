"""Says in plain words what a checked config will do: how much per step, how stale, how much memory.

Also lists every field of a config, from the pydantic models: type, default, bounds, and what it is for.
`tidemill check --fields` shows them; docs/config.md is made from them too.
"""

import ast
import inspect
import json
import types
import typing
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from textwrap import dedent, indent
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.text import Text

from tidemill.common.command_line import command_line
from tidemill.common.config import AlgorithmConfig, RewardConfig, RunConfig
from tidemill.common.config.algorithms.table import PRESETS
from tidemill.common.config.section import read_later
from tidemill.common.config.trainer import TrainerConfig
from tidemill.common.digits import few_digits
from tidemill.common.errors import ConfigError
from tidemill.common.streams.log import KEPT_COMMITS
from tidemill.services.console.check.memory import machine_named, print_machine, print_memory
from tidemill.services.console.check.preflight import Findings, examine
from tidemill.services.console.commands import CheckOptions
from tidemill.services.console.text.formats import plural, printable_block, size
from tidemill.services.console.text.tree import jsonable, name_table

SIGNS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
ANY_NAME = "<name>"
"""Stands for a name that the user chooses, as in reward.rewards.<name>."""


class FieldFacts(NamedTuple):
    """One field, by its dotted name.

    Example: `name` "trainer.algorithm.kl.coefficient", `kind` "float", `default` "default 0.001", `bounds`
    "> 0, <= 100", `text` "Weight of the penalty (beta).".
    """

    name: str
    kind: str
    default: str
    bounds: str
    text: str


class SectionFacts(NamedTuple):
    """A section: its dotted name (empty for the top of the file), what it is for, and its own fields.

    Example: `name` "trainer.algorithm.kl", `text` "A penalty for moving away from the reference model.", and
    in `fields` its place, estimator, coefficient and so on.
    """

    name: str
    text: str
    fields: list[FieldFacts]


def read_sections(model: type[BaseModel] = RunConfig, name: str = "") -> Iterator[SectionFacts]:
    """A section, then those inside it, depth first."""
    fields = []
    inner = []
    texts = _texts_of(model)
    prefix = f"{name}." if name else ""
    for field, info in model.model_fields.items():
        section, has_names = _section_of(info.annotation)
        default = ... if info.is_required() else info.get_default(call_default_factory=True)
        if section is None or has_names or default is None:
            text = " ".join((info.description or texts.get(field, "")).split())
            default_text = "required" if default is ... else f"default {_shown(default)}"
            fields.append(
                FieldFacts(prefix + field, _kind(info.annotation), default_text, _bounds(info), text)
            )
        if section is not None:
            inner.append((section, f"{prefix}{field}.{ANY_NAME}" if has_names else prefix + field))
    yield SectionFacts(name, " ".join((model.__doc__ or "").strip().partition("\n\n")[0].split()), fields)
    for section, path in inner:
        yield from read_sections(section, path)


@cache
def _texts_of(model: type[BaseModel]) -> dict[str, str]:
    """The docstring below each field in the source. pydantic's `use_attribute_docstrings` would read the
    source of every section at the start of every process."""
    texts: dict[str, str] = {}
    for section in reversed(model.__mro__[: model.__mro__.index(BaseModel)]):
        (defined,) = ast.parse(dedent(inspect.getsource(section))).body
        assert isinstance(defined, ast.ClassDef)
        for field, below in pairwise(defined.body):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    texts[name] = text
    return texts


def print_fields(wanted: str, console: Console | None = None) -> None:
    """Show the fields of a section and of those inside it; all, where no section is given."""
    console = console or Console(highlight=False)
    sections = list(read_sections())
    chosen = [s for s in sections if not wanted or s.name == wanted or s.name.startswith(f"{wanted}.")]
    if not chosen:
        names = ", ".join(section.name for section in sections if section.name)
        raise ConfigError(f"there is no section {wanted!r}; sections are {names}")
    for section in chosen:
        console.print(Text.assemble((section.name or "top of the file", "bold cyan"), f"  {section.text}"))
        table = name_table("bold")
        for field in section.fields:
            details = ", ".join(word for word in (field.kind, field.bounds) if word)
            table.add_row(field.name, Text.assemble((f"{details}; {field.default}\n", "dim"), field.text))
        console.print(table)


def _section_of(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The section that a field holds, and whether the field is a mapping or list of such sections."""
    annotation = read_later(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    if get_origin(annotation) is typing.Annotated:
        return _section_of(get_args(annotation)[0])
    if get_origin(annotation) in (dict, list):
        return _section_of(get_args(annotation)[-1])[0], True
    candidates = [_section_of(argument) for argument in get_args(annotation) if _is_union(annotation)]
    sections = [candidate for candidate in candidates if candidate[0] is not None]
    return sections[0] if len(sections) == 1 else (None, False)


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _kind(annotation: Any) -> str:
    annotation = read_later(annotation)
    if annotation is type(None):
        return "null"
    if get_origin(annotation) is typing.Annotated:
        return _kind(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return " | ".join(str(value) for value in get_args(annotation))
    if _is_union(annotation):
        return " | ".join(_kind(argument) for argument in get_args(annotation))
    arguments = [argument for argument in get_args(annotation) if argument is not Ellipsis]
    if arguments:
        return f"{get_origin(annotation).__name__}[{', '.join(_kind(argument) for argument in arguments)}]"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return str(getattr(annotation, "__name__", annotation))


def _bounds(info: FieldInfo) -> str:
    bounds = []
    for constraint in info.metadata:
        limits = [(sign, getattr(constraint, name, None)) for name, sign in SIGNS]
        bounds += [f"{sign} {limit:.15g}" for sign, limit in limits if limit is not None]
        pattern = getattr(constraint, "pattern", None)
        if pattern:
            bounds.append(f"matches {pattern}")
    return ", ".join(bounds)


def _shown(value: Any) -> str:
    if isinstance(value, BaseModel):
        return "as below"
    for plain, text in ((None, "null"), (True, "true"), (False, "false")):
        if value is plain:
            return text
    if value == "":
        return '""'
    return str(list(value) if isinstance(value, tuple) else value)


MAX_READ_CHARACTERS = 4000


def check(options: CheckOptions) -> None:
    if options.fields:
        print_fields(str(options.config or ""))
        return
    if options.config is None:
        raise ConfigError(f"`{command_line('check')}` needs a config file, or --fields.")
    if options.machine:
        print_machine(options.config, options.overrides, options.as_json)
        return
    machine = machine_named(options.gpus, options.gpu_gib, options.host_gib)
    if options.memory:
        print_memory(options.config, options.overrides, machine)
        return
    findings = examine(options.config, options.overrides, options.calls_reward, machine)
    if options.as_json:
        print(json.dumps({"ok": True, **jsonable(findings), "redis": findings.redis or None}, indent=2))
    else:
        explain(findings, with_preset=options.explains)


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


def describe(findings: Findings) -> list[tuple[str, str]]:
    """Lines of the summary: label and text."""
    config = findings.config
    trainer = config.trainer
    rollout = config.rollout
    sizes = {1 if source.is_imitated else config.group_size(source.name) for source in config.data.sources}
    sizes = sizes or {trainer.group_size}
    samples = trainer.groups_per_step * max(sizes)
    step = (
        f"{trainer.groups_per_step:,} groups of {'at most ' * (len(sizes) > 1)}{max(sizes):,} = {samples:,} "
        f"trajectories, at most {samples * rollout.sampling.max_tokens:,} completion tokens"
    )
    staleness = (
        "at most 0 steps: on-policy, rollout and trainer take turns",
        "at most 1 step: rollout writes the next step's groups while the trainer works on this one",
        f"at most {trainer.max_staleness} steps: asynchronous, rollout may be up to {trainer.max_staleness} "
        "steps ahead of the trainer",
    )[min(trainer.max_staleness, 2)]
    uncalled = (
        "its code was imported and takes the arguments it will get; it was not called (--no-call-reward)"
    )
    redis = f"{findings.redis} at TIDEMILL_REDIS_URL" if findings.redis else "private, started with the run"
    lines = [
        ("model", _model(findings)),
        ("data", ", ".join(f"{name} {count:,} rows" for name, count in findings.rows.items())),
        ("step", step if config.generates else f"{samples:,} demonstrations; nothing is generated or scored"),
        ("run", _length(findings)),
        ("redis", f"{redis}; at most {size(redis_bytes(config))} if every completion has full length"),
    ]
    if not config.generates:
        return lines
    lines[-1:-1] = [
        ("staleness", staleness),
        ("algorithm", _algorithm(trainer)),
        ("rollout", f"{plural(rollout.workers, 'worker')} with the {rollout.engine} engine"),
        ("reward", f"{_rewards(config.reward)}; {plural(config.reward.workers, 'worker')}"),
        ("", "; ".join(findings.rewards) or uncalled),
        *(("" if i else "reward gets", line) for i, line in enumerate(findings.gets)),
        ("completions", findings.reading),
        ("session", "; ".join(findings.session)),
        ("pictures", findings.pictures),
        *(("" if i else "memory", line) for i, line in enumerate(findings.memory)),
    ]
    return [(name, text) for name, text in lines if text]


def _model(findings: Findings) -> str:
    model = findings.model
    config = findings.config.model
    if model is None or model.is_remote:
        return f"{config.path}, {config.dtype}"
    context = f"context {model.context:,}, " if model.context else ""
    return (
        f"{model.path} ({model.architecture or 'unknown'}, {size(model.weight_bytes)}), "
        f"{context}this run uses {config.max_model_len:,} tokens, {config.dtype}"
    )


def _length(findings: Findings) -> str:
    trainer = findings.config.trainer
    sources = findings.config.data.sources
    groups = trainer.steps * trainer.groups_per_step
    total = sum(source.weight for source in sources)
    shares = {f"train {source.name}": source.weight / total for source in sources} or {"train": 1.0}
    parts = []
    for name, share in shares.items():
        rows = findings.rows.get(name, 0)
        source = name.removeprefix("train").replace(" ", " of ")
        num_epochs = groups * share / rows if rows else 0.0
        parts.append(f"{few_digits(num_epochs)} epochs{source}")
    epochs = f"{trainer.epochs:g} epochs" if trainer.epochs else ", ".join(parts)
    evaluation = trainer.evaluation
    every = trainer.checkpoint_every
    moments = {
        "at the start": evaluation.at_start,
        f"every {evaluation.every} steps": evaluation.every > 0,
        "at the end": True,
    }
    evaluated = " and ".join(name for name, is_on in moments.items() if is_on and findings.config.data.eval)
    is_counted = trainer.epochs is None or "steps" in trainer.model_fields_set
    steps = f"{trainer.steps:,} steps = " if is_counted else ""
    kept = f"every {every} steps" if every else "at the end only"
    return f"{steps}{epochs}; evaluated {evaluated or 'never'}; checkpoint {kept}"


def _algorithm(trainer: TrainerConfig) -> str:
    algorithm = trainer.algorithm
    origin = f"preset {algorithm.preset}: " if algorithm.preset else ""
    parts = [
        f"{origin}advantage {algorithm.advantage}",
        f"loss {algorithm.loss}, normalised per {algorithm.normalisation}",
        f"old logprobs: {algorithm.old_logprobs}",
        f"importance {algorithm.importance_mode}",
    ]
    if algorithm.kl.place != "off":
        parts.append(f"KL {algorithm.kl.estimator} in the {algorithm.kl.place}")
    return "; ".join([*parts, f"{plural(trainer.updates_per_step, 'update')} a step"])


def preset_lines(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Each field that the preset sets, with its value there and what is in use."""
    if algorithm.preset is None:
        yield "trainer.algorithm has no preset: every field is its own default, or given"
        return
    yield f"preset {algorithm.preset} sets (docs/algorithms.md says why)"
    for name, value in PRESETS[algorithm.preset].items():
        for section, preset in value.items() if isinstance(value, dict) else [("", value)]:
            used = getattr(algorithm, name)
            used = getattr(used, section) if section else used
            field = f"{name}.{section}" if section else name
            yield f"  {field}: {preset}" + ("" if used == preset else f", but {used} is given")


def _rewards(config: RewardConfig) -> str:
    """Each reward with its limits, and how rewards are combined."""
    texts = []
    for name, reward in config.named.items():
        description = name if reward.function in (None, name) else f"{name} = {reward.function}"
        weight = f"{reward.weight:g} x " if config.rewards else ""
        texts.append(
            f"{weight}{description} ({reward.kind}, {reward.timeout_s:g} s and {reward.max_attempts} "
            f"attempts each; then {reward.on_failure})"
        )
    after = f", then {config.group} over each group" if config.group else ""
    return " + ".join(texts) + after


BYTES_OF_A_SAMPLE = 16
BYTES_OF_A_COMMIT = 2000
"""Size of a step's entry in the commits stream: for each sample, and for the step."""
BYTES_OF_A_TOKEN = 4
BYTES_OF_AN_ENTRY = 500
"""Control fields of a trajectory and its score, and Redis's overhead."""
BACKLOG = 1.5
"""Entries in Redis that are not archived yet, in files: one of trajectories, and a part of the others."""


def redis_bytes(config: RunConfig) -> int:
    """Upper bound of the run's memory in Redis, with every completion of full length: entries in flight,
    entries not yet archived, and commits."""
    trainer = config.trainer
    streams = config.streams
    samples = trainer.groups_per_step * config.largest_group_size
    is_archived = streams.trim and streams.archive.enabled
    # Steps that Redis holds though they are trained: those since the oldest kept checkpoint.
    kept = trainer.steps
    if is_archived:
        kept = 0
    elif streams.trim and trainer.checkpoint_every:
        kept = min(trainer.checkpoint_every * trainer.keep_checkpoints, trainer.steps)
    # Ids and logprobs (a teacher's too) of 4 bytes a token, and text of about as much.
    completion = (4 if config.reward.teachers else 3) * config.rollout.sampling.max_tokens
    record = BYTES_OF_A_TOKEN * (2 * config.data.max_prompt_tokens + completion) + BYTES_OF_AN_ENTRY
    records = (1 + trainer.max_staleness + kept) * samples * record
    commits = min(trainer.steps, kept + KEPT_COMMITS) * (BYTES_OF_A_COMMIT + BYTES_OF_A_SAMPLE * samples)
    backlog = min(BACKLOG * streams.archive.segment_mb * 2**20, trainer.steps * samples * record)
    return int(records + commits + (backlog if is_archived else 0))
