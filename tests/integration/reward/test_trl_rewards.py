"""What the real TRL does with a reward that failed, beside another reward function."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models import tiny_model
from tidemill.services.reward.adapters import combine_rewards

FAILED = 2
"""Index of the sample whose first reward fails."""


def graded(completions: list[Any], **_: Any) -> list[float | None]:
    """As the adapter of the service: the third sample failed for good."""
    return [None if i % 4 == FAILED else float(i % 2) for i in range(len(completions))]


async def constant(completions: list[Any], **_: Any) -> list[float]:
    return [1.0] * len(completions)


@pytest.fixture
def advantages(tmp_path: Path) -> Any:
    """The advantages of the first group of four samples, as TRL computes them for these functions."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoTokenizer

    folder = tiny_model(tmp_path)

    def train(functions: Any) -> tuple[list[float], dict[str, float]]:
        args = trl.GRPOConfig(
            str(tmp_path / "out"),
            max_steps=1,
            num_generations=4,
            per_device_train_batch_size=4,
            max_completion_length=2,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            use_cpu=True,
            scale_rewards="none",
        )
        trainer = trl.GRPOTrainer(
            str(folder),
            functions,
            args=args,
            train_dataset=Dataset.from_list([{"prompt": "a"}] * 4),
            processing_class=AutoTokenizer.from_pretrained(folder),
        )
        torch.manual_seed(0)
        trainer.train()
        return list(trainer._logs["advantages"])[:4], trainer.state.log_history[0]

    return train


def test_trl_counts_a_failed_reward_as_0_beside_another_one(advantages: Any) -> None:
    """Rewards 0 + 1, 1 + 1, 1, 1 + 1 and their mean 1.5: the failed sample is pushed down."""
    assert advantages([graded, constant])[0] == pytest.approx([-0.5, 0.5, -0.5, 0.5])


def test_one_function_made_of_both_leaves_the_sample_out(advantages: Any) -> None:
    """Rewards 1, 2, none, 2 and their mean 5/3."""
    combined, metrics = advantages(combine_rewards(graded, constant))
    assert combined == pytest.approx([-2 / 3, 1 / 3, 0.0, 1 / 3])
    assert metrics["combined/graded"] == pytest.approx(2 / 3)
    assert (metrics["combined/graded/failed"], metrics["combined/constant/failed"]) == (0.25, 0.0)
