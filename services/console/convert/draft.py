"""The config that a conversion makes, and the list of what does not carry over as it is.

Guarantee: every option that was given ends as a field or in the list, except one that is off anyway.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Any, NamedTuple

import yaml

from tidemill.common.config import RunConfig, parse_config
from tidemill.common.errors import ConfigError
from tidemill.services.console.convert.reading import Unknown
from tidemill.services.console.convert.table import OptionRow, OptionTable, Verdict

WIDTH = 108
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
NO_TRACKER = ("none", "all", "console", "file")
OFF: tuple[Any, ...] = (None, False, "", [], {})
"""Values of an option that is off: without a counterpart nothing is lost then."""
NO_EFFECT = "without effect beside the other options"
HEADINGS: dict[Verdict, str] = {
    "lost": "Without a counterpart",
    "approximated": "Only nearly the same",
    "automatic": "Needs no option here",
}


class Finding(NamedTuple):
    verdict: Verdict
    option: str
    value: Any
    text: str

    @property
    def name(self) -> str:
        """The option with its value, if it has a short one."""
        value = plain(self.value)
        is_shown = self.value is not None and len(value) < 80
        return f"{self.option} = {value}" if is_shown else self.option


@dataclass
class Draft:
    """Options go in, fields and findings come out."""

    table: OptionTable
    options: dict[str, Any]
    fields: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    origins: dict[str, tuple[str, str]] = field(default_factory=dict)
    """The option that each field comes from, and a note."""
    used: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Renames old options. Null counts as not given, and so does a value that is known only when the file
        runs."""
        for name, value in self.table.always.items():
            self.put(name, value, note=f"as {self.table.project} does")
        options = self.options
        self.options = {}
        for name, value in options.items():
            option = self.table.renewed(name)
            row = self.table.find(option)
            if not isinstance(value, Unknown):
                if value is not None:
                    self.options[option] = value
            elif row is None or not row.is_automatic:
                text = f"{value} is known only when the file runs: give {option}=VALUE after the file"
                self.findings.append(Finding("lost", option, None, text))

    def take(self, option: str) -> Any:
        """The value of an option, or the project's default; marks the option as handled."""
        assert self.table.find(option) is not None, f"{option} is in no row of {self.table.project}"
        self.used.add(option)
        return self.options.get(option, self.table.default(option))

    def get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(name, default)

    def put(self, name: str, value: Any, option: str = "", note: str = "") -> None:
        """Set one of our fields; a comment beside it in the file names its origin."""
        self.fields[name] = value
        self.origins[name] = (option, note)

    def drop(self, prefix: str, verdict: Verdict = "automatic", text: str = NO_EFFECT) -> None:
        """Remove the fields with this prefix, and list the options that were given for them."""
        for name in [name for name in self.fields if name.startswith(prefix)]:
            value = self.fields.pop(name)
            option, _ = self.origins[name]
            if option in self.options and value not in OFF:
                self.say(verdict, option, text)

    def say(self, verdict: Verdict, option: str, text: str) -> None:
        """Put an option into the list, and mark it as handled."""
        self.used.add(option)
        finding = Finding(verdict, option, self.options.get(option, self.table.default(option)), text)
        if finding not in self.findings:
            self.findings.append(finding)

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates of one step of Tidemill: mini-batches times passes."""
        return int(self.get("trainer.mini_batches", 1) * self.get("trainer.passes", 1))

    def steps_of(self, option: str, updates: float) -> int:
        """How many steps a number of updates makes, rounded up; rounding is listed.

        Example: with 4 updates in a step, 10 updates are 3 steps.
        """
        per_step = self.updates_per_step
        steps = math.ceil(updates / per_step)
        if updates % per_step and option in self.options:
            self.say("approximated", option, f"updates there, {per_step} of them in a step: {steps} steps")
        return steps

    def copy(self) -> None:
        """Carry over every option whose row has a field and is not computed; a field that is set stays."""
        for row in self.table.rows:
            if row.computed or not row.to:
                continue
            conditions = filter(None, row.when.split(", "))
            if not all(map(self._holds, conditions)):
                continue
            if "*" not in row.option:
                self._copy(row)
                continue
            # Example: `model.override_config.*` to `model.overrides.*`, a field for each given option.
            prefix = row.option.removesuffix("*")
            for option in [name for name in self.options if name.startswith(prefix)]:
                self.put(row.to.replace("*", option.removeprefix(prefix)), self.take(option), option)

    def _holds(self, condition: str) -> bool:
        """Whether a condition of `OptionRow.when` is true.

        Examples: `beta` (it is on), `loss_type=cispo|dapo` (it has one of these values), `length_penalty.*`
        (an option with this prefix was given).
        """
        name, has_value, wanted = condition.partition("=")
        if name.endswith("*"):
            return any(option.startswith(name[:-1]) for option in self.options)
        value = self.options.get(name, self.get(name, self.table.default(name)))
        return str(value) in wanted.split("|") if has_value else bool(value)

    def _copy(self, row: OptionRow) -> None:
        """Carry over the option of one row."""
        names = list(row.options)
        if row.fallback:
            names.append(row.fallback)
        # The first that was given; where none was, the last has the project's default.
        option = next((name for name in names if name in self.options), names[-1])
        value = self._converted(row, option)
        ours = self._translated(row, option, value)
        # A map is several fields, unless it was copied as it is: then it is the value of one field.
        if isinstance(ours, dict) and (row.values or row.by == "range"):
            self._fill(row, option, ours, writes_null=True)
        else:
            self._fill(row, option, {row.targets[0]: ours}, writes_null=False)
        for verdict, texts in (("approximated", row.nearly), ("automatic", row.fine)):
            if any(key == value for key in texts):
                self.say(verdict, option, texts[value])  # type: ignore[arg-type]

    def _converted(self, row: OptionRow, option: str) -> Any:
        """The value of an option in our unit or form, as `OptionRow.by` and `at_most` say."""
        value = self.options.get(option, row.default)
        if row.by == "list" and option in self.options:
            return [self.take(name) for name in row.options]
        if row.by == "updates" and value and value > 0:
            return self.steps_of(option, value)
        if row.by == "range":
            mode, lower, upper = _ratio_bounds(value)
            # Not strict: a row may have no field for the last.
            return dict(zip(row.targets, (mode, lower, upper), strict=False))
        if row.by == "distance":
            _, _, upper = _ratio_bounds(value)
            return max(upper - 1.0, 0.0)
        if row.by == "run_name":
            return re.sub(r"[^A-Za-z0-9._-]+", "-", str(value or "")).strip("._-")[:100] or None
        if row.by == "loggers":
            return self._loggers(option, [value] if isinstance(value, str) else value or ())
        return value if row.at_most is None else min(value, row.at_most)

    def _translated(self, row: OptionRow, option: str, value: Any) -> Any:
        """What `OptionRow.values` has for a value; what it lacks is lost with `otherwise`, else stays."""
        for key, ours in row.values.items():
            # True is not 1: a bool is found by a bool only.
            if key == value and isinstance(key, bool) == isinstance(value, bool):
                return ours
        if not row.values or row.otherwise is None or value is None:
            return value
        ours = row.otherwise
        words = ", ".join(map(str, ours.values())) if isinstance(ours, dict) else ours
        self.say("lost", option, f"no {value} here: {words}")
        return ours

    def _fill(self, row: OptionRow, option: str, fields: Mapping[str, Any], writes_null: bool) -> None:
        """Set the fields of an option that are not set yet. If all are set, and not to these values, the
        option does not count as used."""
        new = {name: value for name, value in fields.items() if name not in self.fields}
        if new or all(self.fields[name] == value for name, value in fields.items()):
            self.used.update(row.options)
        for name, value in new.items():
            if value is not None or writes_null:
                self.put(name, value, option, "" if row.values else row.note)

    def _loggers(self, option: str, names: Any) -> list[str] | None:
        """Those of the given trackers that Tidemill has."""
        others = [name for name in names if name not in (*TRACKERS, *NO_TRACKER)]
        if others:
            self.say("lost", option, f"{', '.join(others)}: not among {', '.join(TRACKERS)}")
        return [name for name in names if name in TRACKERS] or None

    def list_the_rest(self) -> None:
        """List the given options that became no field."""
        for option, value in self.options.items():
            row = self.table.find(option)
            if option in self.used or value in OFF:
                continue
            if row is None:
                self.say("lost", option, "no counterpart is known")
            elif row.to or row.is_automatic:
                self.say("automatic", option, NO_EFFECT if row.to else row.note)
            elif value != row.neutral:
                self.say("lost", option, row.note)

    def tree(self) -> dict[str, Any]:
        """The fields as nested sections; the outer ones have the order of RunConfig."""
        order = list(RunConfig.model_fields)
        tree: dict[str, Any] = {}
        for name, value in sorted(self.fields.items(), key=lambda item: order.index(item[0].split(".")[0])):
            *sections, last = name.split(".")
            node = tree
            for section in sections:
                node = node.setdefault(section, {})
            node[last] = value
        return tree

    def problem(self) -> str:
        """Why RunConfig refuses the fields; empty where it accepts them."""
        try:
            parse_config(self.tree(), "the converted config")
        except ConfigError as error:
            return str(error)
        return ""

    def text(self, source: str) -> str:
        """The config as YAML, with the origin of each field and the list of what does not carry over."""
        lines = [f"# From {source} ({self.table.project}), by tidemill convert. Paths are as they were."]
        lines += self._lines(self.tree())
        for verdict, heading in HEADINGS.items():
            texts: dict[str, list[str]] = {}
            for finding in self.findings:
                if finding.verdict == verdict:
                    texts.setdefault(finding.text, []).append(finding.name)
            lines += ["", f"# {heading}:"] if texts else []
            for text, names in texts.items():
                lines += _comment(f"{', '.join(names)}: {text}", "# - ", "#   ")
        problem = self.problem()
        if problem:
            lines += ["", "# This config is refused as it is:"]
            lines += [f"# {line}" for line in problem.splitlines()]
        return "\n".join(lines) + "\n"

    def _lines(self, tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
        indent = "  " * prefix.count(".")
        for name in tree:
            whole = prefix + name
            if whole not in self.fields:
                yield f"{indent}{name}:"
                yield from self._lines(tree[name], f"{whole}.")
                continue
            line = f"{indent}{name}: {plain(tree[name])}"
            comment = "; ".join(filter(None, self.origins[whole]))
            if comment and len(line) + len(comment) + 3 > WIDTH:
                yield from _comment(comment, f"{indent}# ", f"{indent}# ")
                comment = ""
            yield f"{line}  # {comment}" if comment else line


def _ratio_bounds(value: Any) -> tuple[str, float, float]:
    """Mode, lower and upper bound of a ratio: "0.5_2.0" is ("mask", 0.5, 2.0), "2.0" is ("truncate", 0.0,
    2.0)."""
    low, is_range, high = str(value).partition("_")
    if is_range:
        return "mask", float(low), float(high or low)
    return "truncate", 0.0, float(low)


def _comment(text: str, first: str, later: str) -> list[str]:
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return wrap(text, WIDTH, initial_indent=first, subsequent_indent=later, **options)


class _Dumper(yaml.SafeDumper):
    """Writes subclasses of str as plain text."""


_Dumper.add_multi_representer(str, yaml.SafeDumper.represent_str)


def plain(value: Any) -> str:
    """A value as YAML in one line."""
    options: dict[str, Any] = {"default_flow_style": True, "sort_keys": False, "allow_unicode": True}
    text: str = yaml.dump(value, Dumper=_Dumper, width=10_000, **options)
    return text.removesuffix("\n").removesuffix("\n...")
