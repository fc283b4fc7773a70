"""What sessions cost a rollout worker: three questions, one number each.

    python -m benchmarks.sessions                   # all three; the last needs vLLM
    python -m benchmarks.sessions --only held       # one of: held, gateway, prefix

* `held`: 512 sessions held by one rollout service, of four turns each; the environment takes 50 ms to 2 s
  for its answer to each. Once it blocks (so it runs in processes), once it is async. The ideal is the
  longest session's delays alone.
* `gateway`: what a call costs an agent program beyond the engine's own time: HTTP, rendering, parsing,
  recording.
* `prefix`: the share of prompt tokens of second and later turns that vLLM had in its prefix cache.
"""

from typing import Annotated

import typer

from benchmarks.report import machine, print_result, print_table
from benchmarks.sessions_gateway import measure_gateway
from benchmarks.sessions_held import measure_held
from benchmarks.sessions_prefix import measure_prefix
from tidemill.common.process.programs import run_main

PARTS = ("held", "gateway", "prefix")


def main(
    only: Annotated[str, typer.Option(help=f"One of {', '.join(PARTS)}; empty: all.")] = "",
    sessions: Annotated[int, typer.Option(help="Sessions held at once.")] = 512,
) -> None:
    """Measure, print a table, and end with one line of JSON."""
    if only and only not in PARTS:
        raise typer.BadParameter(f"{only!r} is none of {', '.join(PARTS)}")
    wanted = (only,) if only else PARTS
    result: dict[str, float | None] = dict.fromkeys(("efficiency_512", "gateway_ms_p50", "prefix_hit_rate"))
    rows: list[tuple[str, ...]] = []
    if "held" in wanted:
        efficiencies = []
        for kind in ("blocking", "async"):
            held = run_main(measure_held(kind, sessions))
            efficiencies.append(held.efficiency)
            rows.append(
                (f"{sessions} sessions, {kind}", f"{held.wall_s:.2f} s", f"ideal: {held.ideal_s:.2f} s")
            )
        result["efficiency_512"] = round(min(efficiencies), 3)
    if "gateway" in wanted:
        times = run_main(measure_gateway())
        result["gateway_ms_p50"] = round(times.added_ms_p50, 2)
        rows.append(
            (
                "a call through the gateway",
                f"+{times.added_ms_p50:.2f} ms",
                f"p99: +{times.added_ms_p99:.2f} ms",
            )
        )
    if "prefix" in wanted:
        hits = run_main(measure_prefix())
        result["prefix_hit_rate"] = round(hits.rate, 3)
        rows.append(("later turns' prompts cached", f"{hits.rate:.1%}", f"of {hits.num_tokens:,} tokens"))
    print_table("Sessions", ("what", "measured", "beside it"), rows, machine())
    print_result(result)


if __name__ == "__main__":
    typer.run(main)
