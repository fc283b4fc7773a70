"""One side of the trainer benchmark in a process of its own: `python -m benchmarks.trainer_sides SIDE CASE`.

Prints one line of JSON: seconds of each timed step, peak memory above what the process held before its
first step, and the gradient norm of the first step, which shows that both sides do the same work.
"""

import json
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import psutil
import torch

from benchmarks.trainer_cases import CASES, CPU_SHAPE, GPU_SCALE, GPU_SHAPE, make_batch, make_model
from services.trainer.samples import Sample

LR = 1e-6
MAX_GRAD_NORM = 1.0


def main(side: str, case_name: str, budget_tokens: int, steps: int, threads: int) -> None:
    """Measure one side on one case."""
    is_gpu = torch.cuda.is_available()
    if not is_gpu:
        torch.set_num_threads(threads)
    scale, shape = (GPU_SCALE, GPU_SHAPE) if is_gpu else (1, CPU_SHAPE)
    samples = make_batch(CASES[case_name], shape.vocabulary, scale)
    model = make_model(shape, context=1024 * scale)
    if is_gpu:
        model.to("cuda")  # type: ignore[arg-type]
    run = {"tidemill": run_tidemill, "trl": run_trl}[side]
    result = run(model, samples, budget_tokens * scale, steps)
    result["tokens"] = sum(sample.num_tokens for sample in samples)
    print(json.dumps(result), flush=True)


class Peak:
    """Peak memory above what was held when this was made, in bytes: of the GPU where there is one."""

    def __init__(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self.base = torch.cuda.memory_allocated()
        else:
            self.base = psutil.Process().memory_info().rss

    def above_base(self) -> int:
        """Bytes."""
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated() - self.base
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - self.base


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def run_tidemill(model: Any, samples: Sequence[Sample], budget_tokens: int, steps: int) -> dict[str, Any]:
    """Form micro-batches, accumulate them, update: what the trainer's step does with a complete batch."""
    from common.config.trainer import TrainerConfig
    from services.trainer.micro_batches import form_micro_batches
    from services.trainer.policy import MicroBatchMetrics
    from services.trainer.transformers_policy import TransformersPolicy

    config = TrainerConfig.model_validate(
        {
            "micro_batch_tokens": budget_tokens,
            "optimizer": {"lr": LR, "max_grad_norm": MAX_GRAD_NORM},
            "algorithm": {"normalisation": "token", "importance": {"mode": "off"}},
        }
    )
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    longest = max(len(sample.completion_ids) for sample in samples)
    policy = TransformersPolicy(model, config, dtype=dtype, temperature=1.0, max_completion_tokens=longest)
    peak, times, cpu_times, norms = Peak(), [], [], []
    for _ in range(steps + 1):
        started, cpu_started = _now(), time.process_time()
        sums = MicroBatchMetrics()
        for batch in form_micro_batches(samples, budget_tokens):
            sums += policy.accumulate(batch)
        norms.append(policy.update(sums.denominator).grad_norm)
        times.append(_now() - started)
        cpu_times.append(time.process_time() - cpu_started)
    return {
        "step_s": times[1:],
        "cpu_s": cpu_times[1:],
        "peak_bytes": peak.above_base(),
        "grad_norm": norms[0],
    }


def run_trl(model: Any, samples: Sequence[Sample], budget_tokens: int, steps: int) -> dict[str, Any]:
    """TRL's own training loop, with the completions given instead of generated."""
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer.utils import pad

    longest = max(sample.num_tokens for sample in samples)
    per_batch = max(1, budget_tokens // longest)
    while len(samples) % per_batch:
        per_batch -= 1

    class GivenCompletions(GRPOTrainer):  # type: ignore[misc]
        """Generation and rewards are replaced; padding, splitting, loss, backward and update are TRL's."""

        given_s = 0.0

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            started = _now()
            device = self.accelerator.device
            prompts = [torch.tensor(sample.prompt_ids).long() for sample in samples]
            completions = [torch.tensor(sample.completion_ids).long() for sample in samples]
            ones = [torch.ones_like(ids) for ids in prompts], [torch.ones_like(ids) for ids in completions]
            batch = {
                "prompt_ids": pad(prompts, padding_value=0, padding_side="left").to(device),
                "prompt_mask": pad(ones[0], padding_value=0, padding_side="left").to(device),
                "completion_ids": pad(completions, padding_value=0, padding_side="right").to(device),
                "completion_mask": pad(ones[1], padding_value=0, padding_side="right").to(device),
                "advantages": torch.tensor([sample.advantage for sample in samples], device=device),
                "num_items_in_batch": torch.tensor(sum(map(len, completions)), device=device),
            }
            self.given_s += _now() - started
            return batch

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Times each step: from its first micro-batch to the end of its update."""

        def __init__(self) -> None:
            self.times: list[float] = []
            self.cpu_times: list[float] = []
            self.norms: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started, self.given_s = _now(), trainer.given_s
            self.cpu_started = time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            # What stands in for generation is no part of the step.
            self.times.append(_now() - self.started - (trainer.given_s - self.given_s))
            self.cpu_times.append(time.process_time() - self.cpu_started)

        def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
            if logs and "grad_norm" in logs:
                self.norms.append(float(logs["grad_norm"]))

    with tempfile.TemporaryDirectory() as folder:
        is_gpu = torch.cuda.is_available()
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=per_batch,
            gradient_accumulation_steps=len(samples) // per_batch,
            num_generations=8,
            max_steps=steps + 1,
            learning_rate=LR,
            max_grad_norm=MAX_GRAD_NORM,
            loss_type="dapo",
            beta=0.0,
            bf16=is_gpu,
            use_cpu=not is_gpu,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        clock = Clock()
        trainer = GivenCompletions(
            model=model,
            args=config,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            train_dataset=Dataset.from_dict({"prompt": ["w"] * len(samples)}),
            processing_class=_tokenizer(PreTrainedTokenizerFast),
            callbacks=[clock],
        )
        peak = Peak()
        trainer.train()
    return {
        "step_s": clock.times[1:],
        "cpu_s": clock.cpu_times[1:],
        "peak_bytes": peak.above_base(),
        "grad_norm": clock.norms[0],
    }


def _tokenizer(kind: Any) -> Any:
    """TRL wants one, though no text is read here."""
    from tokenizers import Tokenizer, models

    backend = Tokenizer(models.WordLevel({"<pad>": 0, "<bos>": 1, "<eos>": 2, "w": 3}, unk_token="w"))
    return kind(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]))
