"""Every Prometheus metric, from `common/telemetry/metrics.py`: the tables at the end of docs/metrics.md."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client.metrics import MetricWrapperBase

from tidemill.common.telemetry import metrics

HEADING = "## Prometheus: every metric"
PREAMBLE = f"""{HEADING}

These tables are generated: `python -m infra.docs.reference`.
How to scrape them is in [Monitoring](operations/monitoring.md#metrics). Each process also exports `process_*`
and `python_*`: its processor time, memory, open files and start. Counters and histograms count since the
process's start: sum their rates.
"""
OF_PROCESSES = "### Of each process, on its own /metrics"
OF_RUNS = "### Of a run, from the exporter"


@dataclass(frozen=True, slots=True)
class MetricFacts:
    """One metric, under the name that queries use; a histogram's ends in `_bucket`, `_sum` or `_count`."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str
    is_of_run: bool


def read_metrics() -> Iterator[MetricFacts]:
    """All metrics in the order of their definition."""
    of_run = set(metrics.RUN._collector_to_names)
    for metric in vars(metrics).values():
        if isinstance(metric, MetricWrapperBase):
            found: Any = metric  # prometheus_client keeps what it was given to itself
            suffix = "_total" if found._type == "counter" else ""
            yield MetricFacts(
                found._name + suffix,
                found._type,
                tuple(found._labelnames),
                found._documentation,
                metric in of_run,
            )


def as_markdown() -> str:
    """Heading and both tables."""
    facts = list(read_metrics())
    lines = [PREAMBLE]
    for heading, is_of_run in ((OF_PROCESSES, False), (OF_RUNS, True)):
        lines += [heading, "", "| metric | type | labels | meaning |", "|---|---|---|---|"]
        lines += [_row(item) for item in facts if item.is_of_run == is_of_run]
        lines.append("")
    return "\n".join(lines)


def _row(item: MetricFacts) -> str:
    labels = ", ".join(f"`{label}`" for label in item.labels)
    return f"| `{item.name}` | {item.kind} | {labels} | {item.text} |"
