"""verl's own reward loop, with the adapter as its reward function. Runs in the environment that has verl.

python verl_rewards.py MODEL ADAPTERS FUNCTION < samples.json: the rewards of its trainer, as JSON.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import verl
from omegaconf import OmegaConf
from verl import DataProto
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker


def batch_of(samples: list[dict[str, Any]], tokenizer: Any) -> DataProto:
    """A batch as its rollout hands it over: responses padded on the right."""
    rows = [tokenizer(sample["solution"])["input_ids"] for sample in samples]
    width = max(map(len, rows))
    responses = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    columns: dict[str, list[Any]] = {
        "data_source": [sample["data_source"] for sample in samples],
        "reward_model": [{"style": "rule", "ground_truth": sample["ground_truth"]} for sample in samples],
        "extra_info": [sample["extra_info"] for sample in samples],
    }
    arrays = {name: np.array(column, dtype=object) for name, column in columns.items()}
    return DataProto.from_dict({"responses": responses, "attention_mask": mask}, non_tensors=arrays)


async def main(model: str, adapters: str, function: str) -> None:
    config = OmegaConf.create({"actor_rollout_ref": {"model": {"path": model, "tokenizer_path": None}}})
    config_file = Path(verl.__file__).parent / "trainer" / "config" / "reward" / "reward.yaml"
    config.reward = OmegaConf.load(config_file)
    config.reward.custom_reward_function = {"path": adapters, "name": function}
    worker = RewardLoopWorker(config)
    results = await worker.compute_score_batch(batch_of(json.load(sys.stdin), worker.input_tokenizer))
    print(json.dumps([result["reward_score"] for result in results]))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
