"""`make gpu-proof`: all parts of the proof, into one JSON file and one table.

    python -m benchmarks.gpu                        # what is not done yet; a dry run where there is no GPU
    python -m benchmarks.gpu --part mfu_4b          # one part, also where it is done
    python -m benchmarks.gpu --part 'engine_*' --minutes 9    # begins none that would probably end later

`--dry` is on the CPU with tiny models, `--fresh` forgets what was done, `--out` is the folder of the results.
Ends with 0 where every part is done or the machine is too small for it, with 1 where one failed or ran over
its time, with 2 where something is missing that can be installed or set right.
"""

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from operator import ge, le
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.gpu.parts import Part, chosen
from benchmarks.gpu.runner import DONE, FAILED, LATE, MISSING, ROOT, Proof, Record
from benchmarks.report import print_result, print_table

NOT_TRIED: Record = {"state": "not tried"}


def main(
    selection: Annotated[str, typer.Option("--part")] = "",
    out: str = "",
    fresh: bool = False,
    dry: bool = False,
    minutes: float = 0.0,
) -> None:
    """Run the parts."""
    names = [name.strip() for name in selection.split(",") if name.strip()]
    try:
        parts = chosen(names)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the part that runs
    # Asked by a process of its own: looking at a GPU would keep some of its memory.
    command = [sys.executable, "-m", "benchmarks.gpu.machine"]
    asked = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    facts: dict[str, Any] = json.loads(asked.stdout.strip().splitlines()[-1])
    if facts["gpu_problem"] and not facts["driver"] and not dry:
        print(f"{facts['gpu_problem']}: a dry run on the CPU, with tiny models\n", flush=True)
        dry = True
    proof = Proof(Path(out or ROOT / f"runs/gpu-proof{'-dry' if dry else ''}"), facts, dry)
    for each in parts if fresh else ():
        proof.records.pop(each.name, None)
    until = time.monotonic() + minutes * 60 if minutes else math.inf
    for each in parts if names else proof.unfinished(parts):
        if time.monotonic() + each.estimate_s > until:
            print(f"{each.name}: not begun, it takes about {each.estimate_s} s", flush=True)
            continue
        print(f"{each.name}: {each.text} ...", flush=True)
        record = proof.run(each)
        seconds = f" in {record['seconds']:.0f} s" if "seconds" in record else ""
        print(f"{each.name}: {record['state']}{seconds} {'; '.join(record.get('missing', []))}", flush=True)
        if tail := record.get("tail"):
            print("  " + "\n  ".join(tail.splitlines()[-10:]), flush=True)
    rows = list(figures(parts, proof.records))
    print_table("GPU proof", "part,figure,value,goal,met", rows, facts["machine"])
    print_result({each.name: proof.records.get(each.name, NOT_TRIED)["state"] for each in parts})
    raise typer.Exit(exit_code([proof.records[each.name] for each in parts if each.name in proof.records]))


def figures(parts: Sequence[Part], records: Mapping[str, Record]) -> Iterator[tuple[str, ...]]:
    """Rows: what every part that is done has measured, beside its goals; a dry run has none."""
    for piece in parts:
        record = records.get(piece.name, NOT_TRIED)
        if record["state"] != DONE:
            yield piece.name, record["state"], "", "", ""
            continue
        goals = {} if record["dry"] else {name: (sign, bound) for name, sign, bound in piece.goals}
        for name, value in record["result"].items():
            goal = ""
            met = ""
            if name in goals:
                sign, bound = goals[name]
                is_met = isinstance(value, int | float) and (ge if sign == ">=" else le)(value, bound)
                goal = f"{sign} {bound:g}"
                met = "yes" if is_met else "no"
            text = f"{value:,.4g}" if isinstance(value, float) else json.dumps(value)
            yield piece.name, name, text, goal, met


def exit_code(records: Sequence[Record]) -> int:
    """See the top of this file."""
    if any(record["state"] in (FAILED, LATE) for record in records):
        return 1
    return 2 if any(record["state"] == MISSING and record["can_be_set_right"] for record in records) else 0


if __name__ == "__main__":
    typer.run(main)
