"""The proof as one JSON file and one page of Markdown."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu.parts import Part
from benchmarks.gpu.runner import DONE, Proof, Record
from tidemill.common.files import write_atomically

JSON_FILE, PAGE_FILE = "proof.json", "proof.md"
TAIL_OF_PAGE = 15


def write_all(proof: Proof, parts: Sequence[Part]) -> dict[str, Record]:
    """Write both files from the records of all parts; returns the records."""
    records = {part.name: record for part in parts if (record := proof.record_of(part)) is not None}
    tree = {"dry": proof.dry, "facts": dict(proof.facts), "parts": records}
    write_atomically(proof.folder / JSON_FILE, json.dumps(tree, indent=1) + "\n")
    write_atomically(proof.folder / PAGE_FILE, as_markdown(proof, parts, records))
    return records


def as_markdown(proof: Proof, parts: Sequence[Part], records: Mapping[str, Record]) -> str:
    """Machine, parts, figures beside their goals, and the ends of what failed."""
    packages = ", ".join(f"{name} {version}" for name, version in proof.facts["packages"].items())
    gpus = ", ".join(proof.facts["gpus"]) or "none"
    lines = ["# GPU proof", "", f"GPUs: {gpus}. Host: {proof.facts['machine']}. {packages}.", ""]
    if proof.dry:
        lines += ["**A dry run with tiny models: it proves the code, its figures say nothing.**", ""]
    lines += _table(("part", "what", "state", "seconds", "commit"), _states(parts, records))
    lines += ["", *_table(("part", "figure", "value", "goal", "met"), _figures(parts, records))]
    for name, record in records.items():
        if tail := record.get("tail"):
            shown_tail = "\n".join(tail.splitlines()[-TAIL_OF_PAGE:])
            lines += ["", f"## {name}: {record['state']}", "", f"`{record['command']}`"]
            lines += ["", "```", shown_tail, "```"]
    return "\n".join(lines) + "\n"


def _table(titles: Sequence[str], rows: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> list[str]:
    head = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    return head + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def _states(parts: Sequence[Part], records: Mapping[str, Record]) -> Iterator[Sequence[str]]:
    for part in parts:
        record = records.get(part.name, {"state": "not tried"})
        state = ": ".join([record["state"], *filter(None, ["; ".join(record.get("missing", []))])])
        yield part.name, part.text, state, f"{record.get('seconds', 0):.0f}", record.get("commit", "")


def _figures(parts: Sequence[Part], records: Mapping[str, Record]) -> Iterator[Sequence[str]]:
    for part in parts:
        record = records.get(part.name, {})
        if record.get("state") != DONE:
            continue
        goals = {} if record["dry"] else {name: (sign, bound) for name, sign, bound in part.goals}
        for name, value in record["result"].items():
            goal, met = "", ""
            if name in goals:
                sign, bound = goals[name]
                goal, met = f"{sign} {bound:g}", "yes" if is_met(value, sign, bound) else "no"
            yield (
                part.name,
                name,
                f"{value:,.4g}" if isinstance(value, float) else json.dumps(value),
                goal,
                met,
            )


def is_met(value: Any, sign: str, bound: float) -> bool:
    """Whether a figure reaches its goal; words do not."""
    if not isinstance(value, int | float):
        return False
    return value >= bound if sign == ">=" else value <= bound
