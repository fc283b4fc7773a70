"""The reward calls of other trainers, for the samples of `benchmarks.reward_scaling`.

    PYTHON benchmarks/reward_peers.py trl|verl SLOTS MODEL < delays.json

PYTHON is the interpreter of an environment that has the peer. TRL is in the extra `dev`; for verl:

    python -m venv build/verl && build/verl/bin/pip install --no-deps verl==0.9.1
    build/verl/bin/pip install torch==2.13.0 transformers==5.10.4 ray==2.60.0 tensordict==0.15.3 \
        omegaconf==2.4.0 aiohttp==3.14.5 codetiming==1.4.0 orjson==3.13.0 numpy==2.4.6 packaging==26.4

MODEL is the folder of a small model with its tokenizer. At most SLOTS calls are in flight. Prints one line of
JSON: the peer's version, seconds on the wall, and seconds of CPU of this process, which does all the work.
Imports nothing of Tidemill.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

TOKENS = 256


async def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: "dict[str, Any]"
) -> float:
    """The function that the reward workers call, too."""
    await asyncio.sleep(extra_info["delay_s"])
    return 1.0


def call_of_trl(delays_s: Sequence[float], slots: int, model: str) -> Callable[[], int]:
    """`GRPOTrainer._calculate_rewards`, all samples in one call; the function bounds what is in flight."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    async def judge(completions: "list[str]", delay_s: "list[float]", **_: Any) -> "list[float]":
        free_slots = asyncio.Semaphore(slots)

        async def score(completion: str, sample_delay_s: float) -> float:
            async with free_slots:
                return await compute_score("", completion, "", {"delay_s": sample_delay_s})

        return await asyncio.gather(*map(score, completions, delay_s))

    rows = [{"prompt": "2+2=", "delay_s": delay_s} for delay_s in delays_s]
    # The trainer makes the folder that it would write checkpoints to; none is written here.
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=8,
            num_generations=8,
            use_cpu=True,
            bf16=False,
            report_to=[],
        )
        trainer = GRPOTrainer(model, judge, args=arguments, train_dataset=Dataset.from_list(rows))
    prompts = [row["prompt"] for row in rows]
    completions = ["a completion " * 64 for _ in rows]
    ids = [list(range(TOKENS)) for _ in rows]
    return lambda: len(trainer._calculate_rewards(rows, prompts, completions, ids))


def call_of_verl(delays_s: Sequence[float], slots: int, model: str) -> Callable[[], int]:
    """`RateLimitedRewardManager.run_single`, once for each sample, as verl's reward loop calls it."""
    import numpy as np
    import torch
    from omegaconf import OmegaConf
    from transformers import AutoTokenizer
    from verl import DataProto
    from verl.experimental.reward_loop.reward_manager.limited import RateLimitedRewardManager

    tokenizer = AutoTokenizer.from_pretrained(model)
    config = OmegaConf.create({"reward": {"max_concurrent": slots, "timeout": 60.0}})
    ids = torch.arange(TOKENS).remainder(len(tokenizer)).unsqueeze(0)
    samples = [
        DataProto.from_dict(
            tensors={
                "prompts": ids,
                "responses": ids,
                "attention_mask": torch.ones(1, 2 * TOKENS, dtype=torch.long),
            },
            non_tensors={
                "data_source": np.array(["benchmark"], dtype=object),
                "reward_model": np.array([{"ground_truth": ""}], dtype=object),
                "extra_info": np.array([{"delay_s": delay_s}], dtype=object),
            },
        )
        for delay_s in delays_s
    ]

    async def score_all() -> int:
        RateLimitedRewardManager.init_class(config, tokenizer)
        manager = RateLimitedRewardManager(config, tokenizer, compute_score)
        manager.loop = asyncio.get_running_loop()
        scores = await asyncio.gather(*map(manager.run_single, samples))
        return sum(score["reward_score"] == 1.0 for score in scores)

    return lambda: asyncio.new_event_loop().run_until_complete(score_all())


CALLS = {"trl": call_of_trl, "verl": call_of_verl}


def main(peer: str, slots: int, model: str) -> None:
    """Measure once, after all that a trainer does before its first reward."""
    delays_s = json.load(sys.stdin)
    call = CALLS[peer](delays_s, slots, model)
    started_s = time.monotonic()
    cpu_before_s = time.process_time()
    num_scored = call()
    wall_s = time.monotonic() - started_s
    used_s = time.process_time() - cpu_before_s
    if num_scored != len(delays_s):
        raise SystemExit(f"{peer} scored {num_scored} of {len(delays_s)} samples")
    print(json.dumps({"version": version(peer), "wall_s": wall_s, "cpu_s": used_s}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
