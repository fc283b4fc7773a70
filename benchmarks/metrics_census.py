"""What metrics cost, counted instead of measured: how often each operation is called, what it takes alone.

On a busy machine the difference of two measurements drowns in noise. A number of calls has none, and the
least of many timings of one operation hardly any.
"""

import asyncio
import time
from collections import Counter as Calls
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics import MetricWrapperBase

from benchmarks import metrics_ends
from tidemill.common.process.programs import run_main
from tidemill.common.telemetry.batched import MOST, Batched, Histogram

OPERATIONS: tuple[tuple[type, str], ...] = (
    (Counter, "inc"),
    (Gauge, "set"),
    (Histogram, "observe"),
    (Histogram, "observe_many"),
    (Batched, "add"),
    (MetricWrapperBase, "labels"),
)
ROUNDS, CALLS = 40, 2000


class _Watch:
    """A stopwatch that nobody starts."""

    def stop(self) -> None:
        """Nothing is told."""


def count_calls(url: str, run_id: str, records: int, per_call: int, counts: bool) -> dict[str, float]:
    """Calls of each operation for one record, over both ends."""
    calls: Calls[str] = Calls()
    originals = [(kind, name, getattr(kind, name)) for kind, name in OPERATIONS]
    watch, metrics_ends.Stopwatch = metrics_ends.Stopwatch, _Watch  # type: ignore[misc, assignment]
    for kind, name, original in originals:
        setattr(kind, name, _counting(calls, f"{kind.__name__}.{name}", original))
    try:
        run_main(_both(url, run_id, records, per_call, counts))
    finally:
        metrics_ends.Stopwatch = watch  # type: ignore[misc]
        for kind, name, original in originals:
            setattr(kind, name, original)
    return {name: count / records for name, count in calls.items()}


def time_operations_us() -> dict[str, float]:
    """The least time of each operation alone."""
    registry = CollectorRegistry()
    counter = Counter("c", "", ["lane"], registry=registry)
    histogram = Histogram("h", "", registry=registry)
    gauge = Gauge("g", "", registry=registry)
    child, values = counter.labels("train"), [0.5] * MOST
    batched: Batched[float] = Batched(lambda _: None)
    work: dict[str, Callable[[], object]] = {
        "Counter.inc": child.inc,
        "Gauge.set": lambda: gauge.set(1.0),
        "Histogram.observe": lambda: histogram.observe(0.5),
        "Histogram.observe_many": lambda: histogram.observe_many(values),
        "Batched.add": lambda: batched.add(0.5),
        "MetricWrapperBase.labels": lambda: counter.labels("train"),
    }
    return {name: _least_us(call) for name, call in work.items()}


async def _both(url: str, run_id: str, records: int, per_call: int, counts: bool) -> None:
    arguments = (url, run_id, records, per_call, counts)
    await asyncio.gather(metrics_ends.write(*arguments), metrics_ends.read(*arguments))


def _counting(calls: "Calls[str]", name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return original(*args, **kwargs)

    return counted


def _least_us(call: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        begun = time.process_time()
        for _ in range(CALLS):
            call()
        times.append(time.process_time() - begun)
    return min(times) / CALLS * 1e6
