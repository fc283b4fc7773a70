"""The proof as one JSON file and one page of Markdown."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu.parts import Part
from benchmarks.gpu.runner import DONE, MISSING, Proof, Record
from tidemill.common.files import write_atomically

JSON_FILE, PAGE_FILE = "proof.json", "proof.md"
PROFILE = "profile"
TAIL_OF_PAGE = 15


def write_all(proof: Proof, parts: Sequence[Part]) -> dict[str, Record]:
    """Write both files from the records of all parts; returns the records."""
    records = {part.name: record for part in parts if (record := proof.record_of(part)) is not None}
    tree = {"dry": proof.dry, "facts": dict(proof.facts), "parts": records}
    write_atomically(proof.folder / JSON_FILE, json.dumps(tree, indent=1) + "\n")
    write_atomically(proof.folder / PAGE_FILE, as_markdown(proof, parts, records))
    return records


def as_markdown(proof: Proof, parts: Sequence[Part], records: Mapping[str, Record]) -> str:
    """Machine, parts, figures, where the time goes, and the ends of what failed."""
    facts = proof.facts
    gpus = (
        f"{len(facts['gpus'])} x {facts['gpus'][0]}, {facts['gpu_gib']:.0f} GiB" if facts["gpus"] else "none"
    )
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    lines = ["# GPU proof", ""]
    if proof.dry:
        lines += [
            "**A dry run on the CPU with tiny models: it proves the code, its figures say nothing.**",
            "",
        ]
    lines += [f"GPUs: {gpus}. Host: {facts['machine']}, {facts['host_gib']:.0f} GiB. {packages}.", ""]
    lines += _table(("part", "what", "state", "seconds", "commit"), _states(parts, records))
    lines += [
        "",
        "## Figures",
        "",
        *_table(("part", "figure", "value", "goal", "met"), _figures(parts, records)),
    ]
    profiles = {
        name: record["result"][PROFILE]
        for name, record in records.items()
        if record["state"] == DONE and PROFILE in record["result"]
    }
    if profiles:
        kinds = dict.fromkeys(kind for shares in profiles.values() for kind in shares)
        rows = [(kind, *(f"{shares.get(kind, 0):.1%}" for shares in profiles.values())) for kind in kinds]
        lines += ["", "## Where the time of a step goes", "", *_table(("kernels", *profiles), rows)]
    for name, record in records.items():
        if tail := record.get("tail"):
            shown = "\n".join(tail.splitlines()[-TAIL_OF_PAGE:])
            lines += [
                "",
                f"## {name}: {record['state']}",
                "",
                f"`{record['command']}`",
                "",
                "```",
                shown,
                "```",
            ]
    return "\n".join(lines) + "\n"


def _table(titles: Sequence[str], rows: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> list[str]:
    head = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    return head + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def _states(parts: Sequence[Part], records: Mapping[str, Record]) -> Iterator[Sequence[str]]:
    for part in parts:
        record = records.get(part.name)
        if record is None:
            yield part.name, part.text, "not tried", "", ""
            continue
        state = f"missing: {'; '.join(record['missing'])}" if record["state"] == MISSING else record["state"]
        seconds = f"{record['seconds']:.0f}" if "seconds" in record else ""
        yield part.name, part.text, state, seconds, record["commit"]


def _figures(parts: Sequence[Part], records: Mapping[str, Record]) -> Iterator[Sequence[str]]:
    for part in parts:
        record = records.get(part.name, {})
        if record.get("state") != DONE:
            continue
        goals = {name: (sign, bound) for name, sign, bound in part.goals}
        for name, value in record["result"].items():
            if name == PROFILE or value in ("", {}, [], None):
                continue
            goal, met = "", ""
            if name in goals and not record["dry"]:
                sign, bound = goals[name]
                goal, met = f"{sign} {bound:g}", "yes" if is_met(value, sign, bound) else "no"
            yield part.name, name, shown(value), goal, met


def is_met(value: Any, sign: str, bound: float) -> bool:
    """Whether a figure reaches its goal; words do not."""
    if not isinstance(value, int | float):
        return False
    return value >= bound if sign == ">=" else value <= bound


def shown(value: Any) -> str:
    """A figure for people."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value if isinstance(value, str) else json.dumps(value)
    return (
        f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    )
