"""TRL trains the demo's model, with rewards of `tidemill serve-rewards examples/trl-rewards/rewards.yaml`."""

import json
from pathlib import Path

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from tidemill.services.reward.adapters import reward_async

DEMO = Path(__file__).resolve().parent.parent / "arith"
rows = [json.loads(line) for line in (DEMO / "train.jsonl").read_text().splitlines()]
columns = [
    {
        "prompt": row["prompt"],
        "ground_truth": row["reward_model"]["ground_truth"],
        "data_source": row["data_source"],
    }
    for row in rows
]
args = GRPOConfig(
    "trl-arith",
    max_steps=20,
    num_generations=8,
    per_device_train_batch_size=32,
    max_completion_length=16,
    report_to=[],
)
GRPOTrainer(str(DEMO / "model"), reward_async, args=args, train_dataset=Dataset.from_list(columns)).train()
