"""What a replay looks like: progress while it runs, and a table for each step."""

import math
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

HEADLINES = ("loss", "grad_norm", "reward", "entropy", "learning_rate")
"""Metrics that are shown in any case, in this order."""
FEW_DIGITS = 9
FAR_STEPS = 10
"""Replayed on the way to a step: from here on a hint at closer checkpoints is worth its line."""


class ReplayProgress:
    """A bar on stderr over the steps that are trained again; nothing where nobody would see it."""

    def __init__(self, steps: list[int], is_quiet: bool) -> None:
        self.last = steps[-1]
        self.console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            TextColumn("[progress.description]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=is_quiet or not self.console.is_terminal,
        )
        self._task = self._bar.add_task("loading the model", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def take(self, event: dict[str, Any]) -> None:
        """Follow one event of the process."""
        if event["kind"] == "start":
            version = event["version"]
            what = f"replaying from version {version}" if version else "replaying from the starting model"
            self._bar.reset(self._task, total=self.last + 1 - version, description=what)
        elif event["kind"] == "step":
            self._bar.advance(self._task)


def print_result(console: Console, result: dict[str, Any], shows_all: bool) -> None:
    """The verdict on one step, its numbers, and the what-if beside them."""
    console.print(_verdict(result), soft_wrap=True)
    console.print(_numbers(result, shows_all))
    for line in _remarks(result, shows_all):
        console.print(line, soft_wrap=True)
    console.print()


def _verdict(result: dict[str, Any]) -> Text:
    step, version = result["step"], result["version"]
    head = Text(f"step {step}, which made version {version}: ", style="bold")
    if result["equal"]:
        return head.append("bit-identical", style="bold green")
    different = [row["name"] for row in result["metrics"] if not row["equal"]]
    if result["digest"]["equal"]:
        text = f"the same weights, but {len(different)} metrics differ"
        return head.append(
            text if different else "the same weights, but the advantages differ", style="yellow"
        )
    return head.append("differs from what was recorded", style="bold red")


def _numbers(result: dict[str, Any], shows_all: bool) -> Table:
    changed: dict[str, Any] = result.get("what_if") or {}
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    columns = ["recorded", "replayed", *(["with the change"] if changed else [])]
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    rows = {row["name"]: row for row in result["metrics"]}
    for name in [*(n for n in HEADLINES if n in rows), *(n for n in rows if n not in HEADLINES)]:
        row = rows[name]
        is_changed = bool(changed) and not _is_same(changed["metrics"].get(name), row["replayed"])
        if shows_all or name in HEADLINES or not row["equal"] or is_changed:
            numbers = [row["recorded"], row["replayed"], *([changed["metrics"].get(name)] if changed else [])]
            table.add_row(name, *_aligned(numbers, exactly=not row["equal"]), _difference(row))
    digest = result["digest"]
    digests = [digest["recorded"], digest["replayed"], *([changed["digest"]] if changed else [])]
    table.add_row("digest", *(text[:12] for text in digests), _mark(digest["equal"]))
    return table


def _aligned(numbers: list[float | None], exactly: bool) -> list[str]:
    return ["-" if n is None else repr(n) if exactly else f"{n:.{FEW_DIGITS}g}" for n in numbers]


def _difference(row: dict[str, Any]) -> Text:
    if row["equal"]:
        return _mark(True)
    return Text(f"differs by {row['difference']:.3g}", style="red")


def _mark(is_equal: bool) -> Text:
    return Text("same", style="green") if is_equal else Text("differs", style="red")


def _remarks(result: dict[str, Any], shows_all: bool) -> list[str]:
    lines = []
    if not shows_all:
        same = sum(row["equal"] for row in result["metrics"])
        lines.append(f"[dim]{same} of {len(result['metrics'])} metrics are the same; --all shows them all[/]")
    if first := result["advantages"]["first"]:
        lines.append(
            f"{result['advantages']['num_different']} advantages differ, the first is that of "
            f"{first['ticket']}.{first['index']}: {first['recorded']} recorded, {first['replayed']} replayed"
        )
    if not result["left_out"]["equal"]:
        lines.append("other samples are left out of their groups than were then; --json lists both")
    if (first_step := result["first_difference"]) is not None and first_step < result["step"]:
        lines.append(f"the weights differ since step {first_step}: look at that step first")
    if (num_steps := result["step"] - result["from_version"]) >= FAR_STEPS:
        start = f"version {result['from_version']}" if result["from_version"] else "the starting model"
        lines.append(
            f"[dim]{num_steps} steps before it were trained again, from {start}: the nearest checkpoint; "
            "trainer.keep_checkpoints keeps more of them (docs/debugging.md says what they cost)[/]"
        )
    if weights := result.get("weights"):
        lines.append("weights, against those on the disk: " + _words(weights))
    if changed := result.get("what_if"):
        lines += _change_remarks(changed)
    if written := result.get("file"):
        lines.append(f"the batch is in [bold]{written['path']}[/] ({written['num_bytes']:,} bytes)")
    return lines


def _words(numbers: dict[str, Any]) -> str:
    return ", ".join(
        f"{name.replace('_', ' ')} {value:.3g}" if isinstance(value, float) else str(value)
        for name, value in numbers.items()
    )


def _change_remarks(changed: dict[str, Any]) -> list[str]:
    changes = ", ".join(
        f"{item['field']}: {item['before']} -> {item['after']}" for item in changed["changes"]
    )
    lines = [f"with the change: {changes or 'none'}"]
    if distance := changed["distance"]:
        cosine = "" if distance["cosine"] is None else f", cosine between the two {distance['cosine']:.4f}"
        lines.append(
            f"weights: {distance['norm']:.4g} away from the version as it was (greatest "
            f"{distance['max_abs']:.3g}); "
            f"the step went {distance['replayed_update_norm']:.4g}, with the change "
            f"{distance['changed_update_norm']:.4g}{cosine}"
        )
    for item in changed["refused"][:3]:
        lines.append(f"group {item['ticket']} would have been replaced: {item['reason']}. {item['detail']}")
    if len(changed["refused"]) > 3:
        lines.append(f"... and {len(changed['refused']) - 3} more groups; the step was trained without them")
    return lines


def _is_same(one: float | None, other: float) -> bool:
    return one is not None and (one == other or (math.isnan(one) and math.isnan(other)))
