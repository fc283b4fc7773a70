"""How fast history is scored again: `python -m benchmarks.rescore`.

Makes a run's folder with recorded trajectories, then runs `tidemill rescore` on it as a user does, with a
plain reward function in processes of its own, and the built-in one on the worker's loop. Scores per second
count from the moment a worker takes the first trajectory; the last column has starting and stopping in it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml

from benchmarks.report import machine, print_result, print_table
from tidemill.common.config import RunConfig, parse_config
from tidemill.common.process.programs import run_main
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.embedded import EmbeddedRedis
from tidemill.common.run.state import publish_config
from tidemill.common.streams import append
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Score, ScoreStatus, Trajectory

GROUP_SIZE = 8
BATCH = 512
PLAIN = """
def length(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) / 1000
"""


def main() -> None:
    """Measure both rewards in turns."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trajectories", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=256, help="completion tokens of each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        (runs / "plain.py").write_text(PLAIN)
        config = parse_config(
            {"run_id": "base", "model": {"path": "m"}, "data": {"train": "t.jsonl"}}, "benchmark"
        )
        run_main(_record(runs, config, options.trajectories, options.tokens))
        rewards = {"plain function": f"{runs / 'plain.py'}:length", "built-in gsm8k": "gsm8k"}
        costs: dict[str, list[dict[str, Any]]] = {name: [] for name in rewards}
        for _ in range(options.rounds):
            for name, reward in rewards.items():
                costs[name].append(_rescore(runs, reward, options.workers))
    rates = {name: median(cost["scores_per_s"] for cost in found) for name, found in costs.items()}
    walls = {name: median(cost["wall_s"] for cost in found) for name, found in costs.items()}
    print_table(
        f"{options.trajectories:,} trajectories of {options.tokens} tokens, {options.workers} worker(s)",
        ["reward", "scores/s", "all in all, s"],
        [[name, f"{rates[name]:,.0f}", f"{walls[name]:.1f}"] for name in rewards],
        note=f"median of {options.rounds}; {machine()}",
    )
    print_result(
        {
            "benchmark": "rescore",
            "plain_per_s": rates["plain function"],
            "builtin_per_s": rates["built-in gsm8k"],
            "wall_s": walls["plain function"],
        }
    )


async def _record(runs: Path, config: RunConfig, count: int, num_tokens: int) -> None:
    """A run that has ended: its streams are in the data of its Redis."""
    folder = runs / config.run_id
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    keys, server, random = Keys(config.run_id), EmbeddedRedis(folder / "redis"), np.random.default_rng(0)
    server.start()
    broker = await Broker.connect(server.url)
    await publish_config(broker, keys, config)
    for first in range(0, count, BATCH):
        numbers = range(first, min(first + BATCH, count))
        await append(broker, keys.trajectories(), *(_trajectory(n, num_tokens, random) for n in numbers))
        await append(broker, keys.scores(), *(_score(n) for n in numbers))
    await broker.close()
    server.stop()


def _trajectory(number: int, num_tokens: int, random: np.random.Generator) -> Trajectory:
    ticket, index = divmod(number, GROUP_SIZE)
    return Trajectory(
        ticket=ticket,
        index=index,
        step=ticket // 32,
        group_size=GROUP_SIZE,
        prompt_ids=random.integers(0, 32_000, 64, dtype=np.int32),
        completion_ids=random.integers(0, 32_000, num_tokens, dtype=np.int32),
        logprobs=-random.random(num_tokens, dtype=np.float32),
        spans=((ticket // 32, 0),),
        ground_truth="7",
        data_source="benchmark",
        text="word " * int(random.integers(1, num_tokens)) + "#### 7",
    )


def _score(number: int) -> Score:
    ticket, index = divmod(number, GROUP_SIZE)
    return Score(ticket=ticket, index=index, status=ScoreStatus.OK, value=float(number % 3))


def _rescore(runs: Path, reward: str, workers: int) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "tidemill.services.console",
        "rescore",
        "base",
        "--runs-dir",
        str(runs),
        "--json",
    ]
    command += ["--reward", reward, "--workers", str(workers)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"tidemill rescore ended with {done.returncode}: {done.stderr}")
    cost: dict[str, Any] = json.loads(done.stdout)["cost"]
    return cost


if __name__ == "__main__":
    main()
