"""TRL's side of the trainer benchmark: its training loop over given completions."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import pad

from benchmarks.device import Peak, is_gpu, now_s
from benchmarks.trainer_sides import GROUP_SIZE, LR, MAX_GRAD_NORM
from tests.support.models import write_tokenizer
from tidemill.services.trainer.groups.sample import Sample

PLAIN: dict[str, Any] = {
    "beta": 0.0,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}
"""What any run of TRL has here: no reference model, and nothing beside training."""


class GivenCompletions(GRPOTrainer):  # type: ignore[misc]
    """Generation and rewards are replaced; padding, splitting, loss, backward and update are TRL's."""

    def __init__(self, samples: Sequence[Sample], **arguments: Any) -> None:
        super().__init__(**arguments)
        self.samples = samples
        self.given_s = 0.0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        started = now_s()
        device = self.accelerator.device
        prompts = [torch.tensor(sample.prompt_ids).long() for sample in self.samples]
        completions = [torch.tensor(sample.completion_ids).long() for sample in self.samples]
        batch = {
            "advantages": torch.tensor([sample.advantage for sample in self.samples], device=device),
            "num_items_in_batch": torch.tensor(sum(map(len, completions)), device=device),
        }
        for name, rows, side in (("prompt", prompts, "left"), ("completion", completions, "right")):
            ones = [torch.ones_like(ids) for ids in rows]
            batch[f"{name}_ids"] = pad(rows, padding_value=0, padding_side=side).to(device)
            batch[f"{name}_mask"] = pad(ones, padding_value=0, padding_side=side).to(device)
        self.given_s += now_s() - started
        return batch


class Clock(TrainerCallback):  # type: ignore[misc]
    """Times each step: from its first micro-batch to the end of its update."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.trainer: GivenCompletions

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.started = now_s()
        self.given_s = self.trainer.given_s

    def on_step_end(self, *_: Any, **__: Any) -> None:
        # What stands in for generation is no part of the step.
        self.times.append(now_s() - self.started - (self.trainer.given_s - self.given_s))


def run_trl(model: Any, samples: Sequence[Sample], budget_tokens: int, steps: int) -> dict[str, Any]:
    """Train `steps` steps after one to warm up, in rows of at most `budget_tokens` padded tokens."""
    per_batch = max(1, budget_tokens // max(sample.num_tokens for sample in samples))
    while len(samples) % per_batch:
        per_batch -= 1
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        trainer = GivenCompletions(
            samples,
            model=model,
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=per_batch,
                gradient_accumulation_steps=len(samples) // per_batch,
                num_generations=GROUP_SIZE,
                max_steps=steps + 1,
                learning_rate=LR,
                max_grad_norm=MAX_GRAD_NORM,
                loss_type="dapo",
                bf16=is_gpu(),
                use_cpu=not is_gpu(),
                **PLAIN,
            ),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            train_dataset=Dataset.from_dict({"prompt": ["w"] * len(samples)}),
            # TRL requires a tokenizer, though no text is read here.
            processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
            callbacks=[clock],
        )
        clock.trainer = trainer
        peak = Peak()
        trainer.train()
    norms = [logged["grad_norm"] for logged in trainer.state.log_history if "grad_norm" in logged]
    return {"step_s": clock.times[1:], "peak_bytes": peak.above_base(), "grad_norm": float(norms[0])}
