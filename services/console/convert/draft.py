"""The config that a conversion makes, and the list of what does not carry over as it is.

Guarantee: every option that was given ends as a field, or in the list; what is off anyway is left out of it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any, Literal

import yaml

from tidemill.common.config import RunConfig, parse_config
from tidemill.common.errors import ConfigError
from tidemill.services.console.convert.table import NOT_GIVEN, Table, section_of

Verdict = Literal["lost", "approximated", "automatic"]
WIDTH = 108
TRACKERS = ("wandb", "mlflow", "trackio")
WARMUP = "trainer.optimizer.warmup_steps"
OFF: tuple[Any, ...] = (None, False, "", [], {})
"""What an option of theirs that we lack may be without anything being lost."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One option that is not simply carried over."""

    verdict: Verdict
    option: str
    value: Any
    text: str

    @property
    def name(self) -> str:
        """The option with its value, if it has any."""
        return self.option if self.value is NOT_GIVEN else f"{self.option} = {plain(self.value)}"


class Draft:
    """Options go in, fields and findings come out."""

    def __init__(self, table: Table, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.table, self.given, self.defaults = table, given, defaults
        self.fields: dict[str, Any] = {}
        self.comments: dict[str, str] = {}
        self.findings: list[Finding] = []
        self._taken: set[str] = set()

    def take(self, option: str) -> Any:
        """The value of an option, or their default; it counts as dealt with."""
        assert self.table.find(option) is not None, (
            f"{option} has no row in the table of {self.table.project}"
        )
        self._taken.add(option)
        return self.given.get(option, self.defaults.get(option))

    def has(self, option: str) -> bool:
        """Whether the option was given."""
        return self.given.get(option) is not None

    def put(self, field: str, value: Any, comment: str = "") -> None:
        """Set one of our fields; the comment stands beside it in the file."""
        self.fields[field] = value
        self.comments[field] = comment

    def approximate(self, option: str, text: str) -> None:
        """Say that it carries over only nearly."""
        self._find("approximated", option, text)

    def lose(self, option: str, text: str) -> None:
        """Say that it has no counterpart."""
        self._find("lost", option, text)

    def explain(self, option: str, text: str) -> None:
        """Say that it needs no option here."""
        self._find("automatic", option, text)

    def copy(self) -> None:
        """Carry over every option whose row says `same`; a field that is set already stays."""
        for row in self.table.rows:
            if row.kind != "same":
                continue
            self._taken.update(row.options)
            option = next((name for name in row.options if self.has(name)), row.options[0])
            value = self.given.get(option, row.default)
            if value is not NOT_GIVEN and value is not None and row.target not in self.fields:
                self.put(row.target, row.words(value) if row.words else value, origin(option, row.note))

    def copy_records(self, trackers: str, own: Sequence[str], name: str) -> None:
        """Carry over where a run is recorded and what it is called. `own` are trackers of theirs that need no
        counterpart."""
        given = self.take(trackers)
        loggers = [given] if isinstance(given, str) else list(given or ())
        if known := [logger for logger in loggers if logger in TRACKERS]:
            self.put("trainer.loggers", known, trackers)
        if others := [logger for logger in loggers if logger not in (*TRACKERS, *own)]:
            self.lose(trackers, f"{', '.join(others)}: not among wandb, mlflow, trackio and TensorBoard")
        if run_id := run_name(self.take(name)):
            self.put("run_id", run_id, name)

    def finish(self) -> None:
        """Copy what is `same`, mend what our config would refuse, and name what nothing was made of."""
        self.copy()
        if self.fields.get("trainer.group_size") == 1:
            self.put("reward.min_group_size", 1, "groups of one")
        steps = self.fields.get("trainer.steps", 0)
        if 1 < steps <= self.fields.get(WARMUP, 0):
            self.put(WARMUP, steps - 1, f"{self.comments[WARMUP]}: cut, for the run has {steps} steps")
        self._list_the_rest()

    def _list_the_rest(self) -> None:
        for option, value in self.given.items():
            if option in self._taken:
                continue
            row = self.table.find(option)
            if row is None or row.kind == "missing":
                if value not in OFF and (row is None or value != row.off):
                    self._find("lost", option, row.note if row else "no counterpart is known")
            elif row.kind == "automatic":
                self._find("automatic", option, row.note)
            elif value not in OFF:
                self._find("automatic", option, "without effect beside the other options")

    def tree(self) -> dict[str, Any]:
        """The fields as sections in sections."""
        tree: dict[str, Any] = {}
        for field, value in self.fields.items():
            *sections, name = field.split(".")
            node = tree
            for section in sections:
                node = node.setdefault(section, {})
            node[name] = value
        return tree

    def problem(self) -> str:
        """Why our config refuses what came out; empty where it does not."""
        try:
            parse_config(self.tree(), "the converted config")
        except ConfigError as error:
            return str(error)
        return ""

    def text(self, source: str) -> str:
        """The YAML file."""
        lines = [f"# From {source} ({self.table.project}), by tidemill convert. Paths are as they were."]
        lines += self._lines(self.tree(), RunConfig)
        for verdict, heading in HEADINGS.items():
            texts = dict.fromkeys(finding.text for finding in self.findings if finding.verdict == verdict)
            if texts:
                lines += ["", f"# {heading}:"]
            for text in texts:
                found = (item for item in self.findings if (item.verdict, item.text) == (verdict, text))
                words = f"{', '.join(item.name for item in found)}: {text}"
                lines += wrap(words, WIDTH, initial_indent="# - ", subsequent_indent="#   ", **WRAPPING)
        if problem := self.problem():
            lines += [
                "",
                "# This config is refused as it is:",
                *(f"# {line}" for line in problem.splitlines()),
            ]
        return "\n".join(lines) + "\n"

    def _find(self, verdict: Verdict, option: str, text: str) -> None:
        self._taken.add(option)
        value = self.given.get(option, self.defaults.get(option, NOT_GIVEN))
        finding = Finding(verdict, option, value, text)
        if finding not in self.findings:
            self.findings.append(finding)

    def _lines(self, tree: dict[str, Any], section: Any, prefix: str = "", depth: int = 0) -> Iterator[str]:
        """The fields below `prefix`, in the order of the config."""
        order = list(section.model_fields) if section is not None else []
        indent = "  " * depth
        for name in sorted(tree, key=lambda name: order.index(name) if name in order else len(order)):
            field = prefix + name
            if field in self.fields:
                yield from _commented(f"{indent}{name}: {plain(tree[name])}", self.comments[field], indent)
                continue
            yield f"{indent}{name}:"
            inner = section_of(section.model_fields[name].annotation) if name in order else None
            yield from self._lines(tree[name], inner, f"{field}.", depth + 1)


def _commented(line: str, comment: str, indent: str) -> Iterator[str]:
    """A line with its comment behind it, or before it where it would be too long."""
    if comment and len(line) + len(comment) + 3 > WIDTH:
        start = f"{indent}# "
        yield from wrap(comment, WIDTH, initial_indent=start, subsequent_indent=start, **WRAPPING)
        comment = ""
    yield f"{line}  # {comment}" if comment else line


WRAPPING: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
HEADINGS = {
    "lost": "Without a counterpart",
    "approximated": "Only nearly the same",
    "automatic": "Needs no option here",
}


class _Dumper(yaml.SafeDumper):
    """Writes every kind of text as text."""


_Dumper.add_multi_representer(str, yaml.SafeDumper.represent_str)


def run_name(given: Any) -> str:
    """A name that a run may have; empty where nothing is left of it."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", str(given or "")).strip("._-")[:100]


def origin(option: str, note: str = "") -> str:
    """The comment of a field that an option was copied to."""
    return f"{option}; {note}" if note else option


def plain(value: Any) -> str:
    """A value as YAML in one line."""
    options: dict[str, Any] = {"default_flow_style": True, "sort_keys": False, "allow_unicode": True}
    text: str = yaml.dump(value, Dumper=_Dumper, width=10_000, **options)
    return text.removesuffix("\n").removesuffix("\n...")
