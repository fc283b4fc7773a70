"""How many records a second one hop through a stream carries, what a record weighs, and what guarantees cost.

    python -m benchmarks.transport
    python -m benchmarks.transport --appendfsync always

A record is a `Trajectory` of 256 prompt ids, 1,024 completion ids and 1,024 logprobs. The writer encodes
and appends; the reader is a `Consumer` that fetches, decodes, validates and acknowledges every record.
Both are processes of their own (`transport_ends`), beside an embedded Redis on a unix socket. Records exist
before the clock starts; after it has stopped the reader must have seen each one exactly once. The ways to
send are measured one after the other, `--repeats` times, each on a fresh server, so that ratios hold on a
busy machine too. A rate is records over the time from the common start until the last acknowledgement: once
without an append-only file, once with one that is flushed as `--appendfsync` says.

* raw: redis-py without Tidemill: the same arrays as plain bytes, XADD, XREADGROUP, XACK, nothing validated.
* PipelineRL: what its streams do (`pipelinerl/streams.py`): lists of numbers, pickled, one XADD a record,
  XREAD of one record, no group, no acknowledgement.
* with scores: the reader publishes a score with each acknowledgement, in one unit that checks the lease.
  fire-and-forget: the same records and scores by plain XADDs, XREAD by offset.

`ratio_to_raw` is 64 records a call over raw 64 a call, `ratio_to_pipelinerl` one record a call over
PipelineRL's, both with AOF; `ratio_guaranteed` is `with scores` with AOF over fire-and-forget without.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

import typer

from benchmarks.report import machine, print_result, print_table
from tidemill.common.errors import TidemillError
from tidemill.common.process.programs import run_main
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.embedded import EmbeddedRedis

NO_AOF = "no-aof"
SINGLE, BATCHED = "one record a call", "64 records a call"
RAW, PEER = "raw arrays, 64 a call", "PipelineRL's way, one a call"
SCORED, FORGOTTEN = "with scores, 64 a call", "fire-and-forget, 64 a call"
WAYS = {
    SINGLE: ("write-stream", "read-stream", 1),
    BATCHED: ("write-stream", "read-stream", 64),
    RAW: ("write-raw", "read-raw", 64),
    PEER: ("write-peer", "read-peer", 1),
    SCORED: ("write-stream", "read-scored", 64),
    FORGOTTEN: ("write-forgotten", "read-forgotten", 64),
}
"""Both ends, and records a call."""


@dataclass
class Measured:
    """One way to send: a value for each repeat."""

    num_bytes: list[float] = field(default_factory=list)
    """Of a record: all that the server received from both ends, protocol included."""
    rates: list[float] = field(default_factory=list)
    rates_aof: list[float] = field(default_factory=list)


def hop(way: str, records: int, appendfsync: str) -> tuple[float, float]:
    """Send all records over a fresh server; returns records a second and received bytes a record."""
    write, read, per_call = WAYS[way]
    with tempfile.TemporaryDirectory(prefix="tidemill-bench-") as folder:
        redis = EmbeddedRedis(Path(folder), appendfsync)
        redis.start()
        try:
            rate = run_ends(redis.url, (write, read), records, per_call)
            return rate, run_main(received_bytes(redis.url)) / records
        finally:
            redis.stop()


async def received_bytes(url: str) -> float:
    """Bytes that clients have sent to the server."""
    broker = await Broker.connect(url)
    try:
        return float((await broker.info("stats"))["total_net_input_bytes"])
    finally:
        await broker.close()


def run_ends(url: str, ends: tuple[str, str], records: int, per_call: int) -> float:
    """Run the ends as processes from a common start; returns records a second, from there to the last end."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.transport_ends", end, url, str(records), str(per_call)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for end in ends
    ]
    try:
        for process in processes:
            _line_from(process)  # every end is ready
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("start\n")
            process.stdin.flush()
        starts, stops = zip(*(json.loads(_line_from(process)) for process in processes), strict=True)
        return records / (max(stops) - min(starts))
    finally:
        for process in processes:
            process.kill()  # an end that has printed its line has nothing left to do
            process.communicate()


def _line_from(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise TidemillError(f"one end stopped with exit code {process.wait()}; its error is above")
    return line


def main(
    records: Annotated[int, typer.Option(min=1, help="records of each measurement")] = 5000,
    repeats: Annotated[int, typer.Option(min=1, help="measurements of each way")] = 3,
    appendfsync: Annotated[
        Literal["everysec", "always"], typer.Option(help="flushes of the AOF")
    ] = "everysec",
) -> None:
    """Measure records a second over one hop through a stream."""
    ways = {way: Measured() for way in WAYS}
    for _ in range(repeats):
        for way, measured in ways.items():
            rate, num_bytes = hop(way, records, NO_AOF)
            measured.rates.append(rate)
            measured.num_bytes.append(num_bytes)
            measured.rates_aof.append(hop(way, records, appendfsync)[0])
    rows = [
        (way, *(f"{median(values):,.0f}" for values in (row.num_bytes, row.rates, row.rates_aof)))
        for way, row in ways.items()
    ]
    note = f"{machine()}; Redis on a unix socket; {records:,} records, medians of {repeats}"
    columns = ("records/s", "bytes a record", "no AOF", f"AOF {appendfsync}")
    print_table("One hop through a stream", columns, rows, note)

    def ratio(own: list[float], others: list[float]) -> float:
        return round(median(mine / theirs for mine, theirs in zip(own, others, strict=True)), 3)

    print_result(
        {
            "ratio_to_raw": ratio(ways[BATCHED].rates_aof, ways[RAW].rates_aof),
            "ratio_to_pipelinerl": ratio(ways[SINGLE].rates_aof, ways[PEER].rates_aof),
            "ratio_guaranteed": ratio(ways[SCORED].rates_aof, ways[FORGOTTEN].rates),
            "bytes_per_record": round(median(ways[BATCHED].num_bytes)),
            "records_per_s": {way: round(median(row.rates_aof)) for way, row in ways.items()},
            "records_per_s_no_aof": {way: round(median(row.rates)) for way, row in ways.items()},
            "appendfsync": appendfsync,
        }
    )


if __name__ == "__main__":
    typer.run(main)
