"""How evenly a step's samples fill the forward passes of several ranks, and what a rank receives.

    python -m benchmarks.ranks    # two minutes on two cores; needs no GPU

Micro-batches of made-up token ids are formed, divided and planned as the trainer does it for GPUs, with a
tile of 16,384 tokens, for 1, 2, 4 and 8 ranks; no model computes. `passes` is the number of forward passes
that a micro-batch takes on the rank with the most, 1 where each rank has one. `tile used` is the share of the
tiles of all ranks, in all passes, that has tokens; all but the step's last micro-batch. `over fewest` is all
passes over the fewest that could hold the tokens that have to be computed (a group's prompt is one for each
tile that the group needs): no packing comes below 1, and most cannot reach it, since a sample stays whole.
`busy` is the mean rank's cost (tokens, and their squares for attention) over the slowest rank's, over the
whole step. `received` is what the rank with the most bytes is sent for training the step, over the whole
step's bytes, which each rank was sent once. The result has the worst of the three distributions.

`update_ms` is the fastest update of a mixture of experts with 10 million weights, in float32 on CPUs: ranks
that are processes of this machine, with a thread each, sum their gradients over gloo and run AdamW.
"""

import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks.report import machine, print_result, print_table
from tests.support.models import run_config
from tests.support.samples import sample_of
from tidemill.services.trainer.groups.bins import PrefixOrder, cost, form_micro_batches, split_samples
from tidemill.services.trainer.groups.micro_batch import MicroBatch
from tidemill.services.trainer.groups.sample import Sample
from tidemill.services.trainer.policy.fsdp.sharded_policy import ShardedPolicy
from tidemill.services.trainer.policy.loading import open_policy
from tidemill.services.trainer.policy.packing import make_rows, plan_tiles
from tidemill.services.trainer.weights.peers import pack

TILE = 16_384
GROUPS = 64
SIZE = 8
SCORES = 4 * 4096
"""Scores of attention that cost as much as one token, in a model of 8B (`rank_policy.SCORES_PER_WIDTH`)."""
RANKS = (1, 2, 4, 8)


def _octaves(rng: Generator, low: int, high: int) -> int:
    return int(2 ** rng.uniform(np.log2(low), np.log2(high)))


LENGTHS: dict[str, tuple[int, Callable[[Generator], int]]] = {
    "answers, 64 to 1,024": (512, lambda rng: int(rng.integers(64, 1025))),
    "reasoning, log-normal around 3,000": (256, lambda rng: int(min(16_000, rng.lognormal(8.0, 0.8)))),
    "octaves, 128 to 15,000": (1024, lambda rng: _octaves(rng, 128, 15_000)),
}
"""Tokens of a prompt, and the function that draws those of a completion."""


def make_step(name: str) -> list[Sample]:
    """The samples of a step, with random tokens: only the samples of a group share any."""
    rng = np.random.default_rng(0)
    num_prompt, draw = LENGTHS[name]
    samples = []
    for ticket in range(GROUPS):
        prompt = rng.integers(0, 1 << 30, num_prompt).astype(np.int32)
        for index in range(SIZE):
            completion = rng.integers(0, 1 << 30, max(1, draw(rng)))
            samples.append(sample_of((ticket, index), prompt, completion, np.full(len(completion), -1.0)))
    return samples


class Figures(NamedTuple):
    passes: float
    tile_used: float
    over_fewest: float
    busy: float
    received: float


def _tiles(samples: list[Sample]) -> list[int]:
    """Tokens of each forward pass."""
    tiles = plan_tiles(make_rows(samples, [sample.mask for sample in samples]), "tree", TILE)
    counts = []
    for tile in tiles:
        samples_of_tile = [samples[row.sample] for row in tile.rows]
        counts.append(PrefixOrder(samples_of_tile, "tree").num_tokens)
    return counts


def needed_tokens(samples: list[Sample]) -> int:
    """Least number of tokens that any packing computes for a step."""
    prompts = {sample.key[0]: len(sample.prompt_ids) for sample in samples}
    own_tokens = dict.fromkeys(prompts, 0)
    for sample in samples:
        own_tokens[sample.key[0]] += len(sample.completion_ids)
    by_tiles = sum(
        own_tokens[prompt] + size * -(-own_tokens[prompt] // (TILE - size))
        for prompt, size in prompts.items()
    )
    # The second is more where prompts are too short to be shared.
    return max(by_tiles, PrefixOrder(samples, "tree").num_tokens)


def measure(samples: list[Sample], size: int) -> Figures:
    passes = []
    used = []
    mean_cost = 0.0
    slowest = 0.0
    whole = 0
    received = np.zeros(size)
    for batch in form_micro_batches(samples, TILE, size, "tree"):
        shares = split_samples(batch.samples, size, TILE, "tree", SCORES)
        samples_of_ranks = []
        for share in shares:
            samples_of_ranks.append([batch.samples[i] for i in share])
        tiles = list(map(_tiles, samples_of_ranks))
        passes.append(max(map(len, tiles)))
        used.append(sum(map(sum, tiles)) / (size * TILE * passes[-1]))
        costs = []
        for samples_of_rank in samples_of_ranks:
            cut = PrefixOrder(samples_of_rank, "tree").cut(TILE)
            costs.append(sum(cost(order, SCORES) for order in cut))
        mean_cost += sum(costs) / size
        slowest += max(costs)
        received += [len(pack(samples_of_rank)) for samples_of_rank in samples_of_ranks]
        whole += len(pack(list(batch.samples)))
    fewest = -(-needed_tokens(samples) // (size * TILE))
    share_used = float(np.mean(used[:-1] or used))
    of_slowest = mean_cost / slowest
    of_bytes = max(received) / whole
    return Figures(float(np.mean(passes)), share_used, sum(passes) / fewest, of_slowest, of_bytes)


UPDATED: dict[str, dict[str, int]] = {
    "1": {"num_ranks": 1},
    "2": {"num_ranks": 2},
    "2_experts": {"num_ranks": 2, "expert_ranks": 2},
}
"""Settings of the policies whose updates are timed."""
ROUNDS = 5
VOCABULARY = 1024


def time_update(folder: Path, ranks: dict[str, int]) -> float:
    """Milliseconds of the fastest update."""
    sections: dict[str, Any] = {"model": {"dtype": "float32", "max_model_len": 256}}
    sections |= {"data": {"max_prompt_tokens": 64}, "rollout": {"sampling": {"max_tokens": 64}}}
    config = run_config(folder, **sections, trainer=ranks | {"device": "cpu", "num_threads": 1})
    policy: Any = open_policy(config)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCABULARY, (4, 2, 64)).astype(np.int32)
    samples = [
        sample_of((n, 0), prompt, completion, np.full(64, -1.0))
        for n, (prompt, completion) in enumerate(tokens)
    ]
    batch = MicroBatch(tuple(samples))
    times_s = []
    for _ in range(ROUNDS):
        sums = policy.accumulate(batch)
        began = time.perf_counter()
        policy.update(sums.denominator)
        times_s.append(time.perf_counter() - began)
    if isinstance(policy, ShardedPolicy):
        policy.close()
    return min(times_s) * 1000


def time_updates() -> dict[str, float]:
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768}
    config = Qwen3MoeConfig(vocab_size=VOCABULARY, num_key_value_heads=4, **sizes, **experts)
    with TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return {name: time_update(Path(folder), ranks) for name, ranks in UPDATED.items()}


def main() -> None:
    steps = {name: make_step(name) for name in LENGTHS}
    measured = {(name, size): measure(samples, size) for name, samples in steps.items() for size in RANKS}
    rows = []
    for (name, size), values in measured.items():
        rows.append((f"{name}; {size} ranks", *(f"{value:.3f}" for value in values)))
    title = f"A step of {GROUPS} groups of {SIZE}, tiles of {TILE:,} tokens"
    print_table(title, "lengths,passes,tile used,over fewest,busy,received", rows, machine())

    def of(size: int, figure: str) -> list[float]:
        return [
            round(getattr(each, figure), 3) for (_, num_ranks), each in measured.items() if num_ranks == size
        ]

    result = {f"tile_used_{size}": min(of(size, "tile_used")) for size in RANKS}
    result |= {f"passes_{size}": max(of(size, "passes")) for size in RANKS}
    result |= {"received_share_8": max(of(8, "received")), "busy_8": min(of(8, "busy"))}
    updates = time_updates()
    print_table("An update", "ranks,ms", [(name, f"{ms:.0f}") for name, ms in updates.items()])
    print_result(result | {f"update_ms_{name}": round(ms, 1) for name, ms in updates.items()})


if __name__ == "__main__":
    main()
