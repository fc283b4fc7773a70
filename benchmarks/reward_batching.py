"""Dynamic batching of the reward model server against one at a time and against fixed batches.

The same model and the same requests (Poisson arrivals and lengths from one seed) for each way. One at a time
and dynamic are the server's own batcher; a fixed batch starts when so many sequences wait, and ends the run
with what is left. Latency counts from the moment a request was due, so that a queue that grows shows.
"""

import argparse
import asyncio
import math
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import machine, print_result, print_table
from tidemill.common.process.programs import run_main
from tidemill.services.reward.model_server.batcher import Batcher, BatchLimits
from tidemill.services.reward.model_server.scoring_model import ScoringModel

FIXED_ROWS = 16
VOCAB_SIZE = 1024
LONGEST_TOKENS, SHORTEST_TOKENS = 192, 16
MAX_WAITING = 1 << 20
FLUSH_TAIL_S = 1.0
"""A fixed batch that nobody fills is started after this time, or the last requests would never end."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when it is due, and what it asks."""

    at_s: float
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One way at one rate."""

    scores_per_s: float
    p50_ms: float
    p99_ms: float


class FixedBatches:
    """Waits until `rows` sequences are there, in order of arrival: no flush, no buckets."""

    def __init__(self, model: ScoringModel, rows: int) -> None:
        self._inner = Batcher(
            model, BatchLimits(1 << 30, rows, 1.0), flush_s=0.0, max_queued_rows=MAX_WAITING
        )
        self._rows = rows
        self._collected: list[tuple[Sequence[int], asyncio.Future[Tensor]]] = []

    def start(self) -> "asyncio.Task[None]":
        return self._inner.start()

    async def score(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        loop = asyncio.get_running_loop()
        mine = [(row, loop.create_future()) for row in rows]
        self._collected.extend(mine)
        if len(self._collected) >= self._rows:
            await self._flush()
        else:
            loop.call_later(FLUSH_TAIL_S, lambda: asyncio.ensure_future(self._flush()))
        return list(await asyncio.gather(*(future for _, future in mine)))

    async def close(self) -> None:
        await self._inner.close()

    async def _flush(self) -> None:
        batch, self._collected = self._collected[: self._rows], self._collected[self._rows :]
        if not batch:
            return
        for (_, future), scored in zip(
            batch, await self._inner.score([row for row, _ in batch]), strict=True
        ):
            future.set_result(scored)


def make_model(folder: Path, hidden: int, layers: int) -> ScoringModel:
    """A classifier with random weights, of the size of a small real one's fraction."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_labels=1,
        pad_token_id=0,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return ScoringModel(str(folder))


def make_arrivals(rate: float, count: int, seed: int) -> list[Arrival]:
    """Poisson arrivals; lengths uniform in their logarithm, as completions are: many short, few long."""
    chance = random.Random(f"{seed}:{rate}")
    arrivals, at_s = [], 0.0
    for _ in range(count):
        at_s += chance.expovariate(rate)
        spread = math.log(LONGEST_TOKENS / SHORTEST_TOKENS)
        length = round(SHORTEST_TOKENS * math.exp(chance.random() * spread))
        arrivals.append(Arrival(at_s, [chance.randrange(1, VOCAB_SIZE) for _ in range(length)]))
    return arrivals


async def measure(batcher: Any, arrivals: list[Arrival]) -> Measurement:
    """Send each request when it is due, whatever became of those before."""
    batcher.start()
    started = time.perf_counter()
    latencies_s: list[float] = []

    async def ask(arrival: Arrival) -> None:
        await asyncio.sleep(max(0.0, started + arrival.at_s - time.perf_counter()))
        await batcher.score([arrival.token_ids])
        latencies_s.append(time.perf_counter() - started - arrival.at_s)

    await asyncio.gather(*(ask(arrival) for arrival in arrivals))
    wall_s = time.perf_counter() - started
    await batcher.close()
    cuts = statistics.quantiles(latencies_s, n=100)
    return Measurement(len(arrivals) / wall_s, cuts[49] * 1e3, cuts[98] * 1e3)


def capacity(model: ScoringModel, seed: int) -> float:
    """Sequences a second, one at a time: the unit in which arrival rates are given."""
    rows = [arrival.token_ids for arrival in make_arrivals(1.0, 60, seed)]
    for row in rows[:10]:
        model.score([row])
    started = time.perf_counter()
    for row in rows:
        model.score([row])
    return len(rows) / (time.perf_counter() - started)


def ways(model: ScoringModel, flush_ms: float) -> dict[str, Any]:
    """The three batchers, made anew for each rate."""
    alone = Batcher(model, BatchLimits(1, 1, 1.0), flush_s=0.0, max_queued_rows=MAX_WAITING)
    limits = BatchLimits(max_tokens=16_384, max_rows=256, max_padding=0.3)
    dynamic = Batcher(model, limits, flush_s=flush_ms / 1e3, max_queued_rows=MAX_WAITING)
    return {
        "one at a time": alone,
        f"fixed {FIXED_ROWS}": FixedBatches(model, FIXED_ROWS),
        "dynamic": dynamic,
    }


def main() -> None:
    """Run all ways at all rates; prints a table and a line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reward_batching", description=__doc__)
    parser.add_argument(
        "--loads",
        type=float,
        nargs="+",
        default=[0.1, 0.5, 1.0, 2.0, 4.0, 8.0],
        help="arrival rates, in multiples of what one at a time can serve",
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="how long requests arrive at each rate")
    parser.add_argument("--hidden", type=int, default=64, help="hidden size of the model")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model")
    parser.add_argument("--flush-ms", type=float, default=5.0, help="longest wait for company")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the model")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and lengths")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), options.hidden, options.layers)
    unit = capacity(model, options.seed)
    rows, results = [], []
    for load in options.loads:
        count = max(40, round(load * unit * options.seconds))
        arrivals = make_arrivals(load * unit, count, options.seed)
        for name, batcher in ways(model, options.flush_ms).items():
            found = run_main(measure(batcher, arrivals))
            row = [f"{load:g} x {unit:.0f}/s, {name}", f"{found.scores_per_s:.0f}"]
            rows.append([*row, f"{found.p50_ms:.1f}", f"{found.p99_ms:.1f}"])
            results.append(
                {
                    "load": load,
                    "arrivals_per_s": round(load * unit, 1),
                    "way": name,
                    "scores_per_s": round(found.scores_per_s, 1),
                    "p50_ms": round(found.p50_ms, 2),
                    "p99_ms": round(found.p99_ms, 2),
                }
            )
    print_table(
        "Reward model: batching",
        ["arrivals, way", "scores/s", "p50 ms", "p99 ms"],
        rows,
        f"{machine()}, {options.threads} thread(s). Rows of {SHORTEST_TOKENS} to {LONGEST_TOKENS} tokens. "
        "1 x is what one at a time can serve without any queue.",
    )
    print_result({"benchmark": "reward_batching", "one_at_a_time_per_s": round(unit, 1), "results": results})


if __name__ == "__main__":
    main()
