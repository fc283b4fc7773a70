"""Options of TRL as `tidemill convert` reads them, beside a run of TRL: completions and updates of a step,
and when there are evaluations and checkpoints."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.preloaded import REPO
from tidemill.services.console.convert.command import convert_options

pytest.importorskip("trl", reason="TRL is in the extra `dev`")

MODEL = REPO / "examples" / "arith" / "model"
NUM_ROWS = 24
BASE: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "num_generations": 2,
    "max_completion_length": 2,
    "max_steps": 6,
    "save_strategy": "no",
    "bf16": False,
}


@dataclass
class Seen:
    """What a run of TRL did, by the number of updates before it."""

    generations: list[tuple[int, int]] = field(default_factory=list)
    """Updates before a generation, and its completions."""
    evaluations: list[tuple[int, int]] = field(default_factory=list)
    """Updates before an evaluation, and its completions."""
    checkpoints: list[int] = field(default_factory=list)


def play(folder: Path, **options: Any) -> Seen:
    """Train with TRL on a CPU, and note what it does."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    seen = Seen()
    scored: list[int] = []

    class Notes(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.evaluations.append((state.global_step, sum(scored)))
            scored.clear()

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.checkpoints.append(state.global_step)

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        if trainer.model.training:
            seen.generations.append((trainer.state.global_step, len(completions)))
        else:
            scored.append(len(completions))
        return [float(len(text)) for text in completions]

    rows = Dataset.from_list([{"prompt": f"{row} + 1 ="} for row in range(NUM_ROWS)])
    arguments = GRPOConfig(
        output_dir=str(folder), report_to="none", use_cpu=True, disable_tqdm=True, **BASE | options
    )
    trainer = GRPOTrainer(
        model=str(MODEL),
        reward_funcs=reward,
        args=arguments,
        train_dataset=rows,
        eval_dataset=rows.select(range(4)),
        callbacks=[Notes()],
    )
    trainer.train()
    return seen


def converted(**options: Any) -> dict[str, Any]:
    arguments = {"reward_funcs": "mine.reward", "train_dataset": "rows.jsonl", "eval_dataset": "held.jsonl"}
    draft = convert_options("trl", arguments | BASE | options)
    assert draft.problem() == ""
    return draft.fields


def merged(generations: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Generations of one version of the weights, which are one batch, as one."""
    sums: dict[int, int] = {}
    for updates, count in generations:
        sums[updates] = sums.get(updates, 0) + count
    yield from sums.items()


BATCHES: list[dict[str, Any]] = [
    {},
    {"gradient_accumulation_steps": 2},
    {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
    {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
    {"gradient_accumulation_steps": 4, "steps_per_generation": 1},
    {"generation_batch_size": 8, "gradient_accumulation_steps": 2},
    {"num_iterations": 2},
    {"num_iterations": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 1},
    {"num_iterations": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 1},
]


@pytest.mark.parametrize("options", BATCHES, ids=json.dumps)
def test_a_step_has_as_many_completions_and_updates_as_there(options, tmp_path):
    batches = list(merged(play(tmp_path, **options).generations))
    fields = converted(**options)
    (size,) = {count for _, count in batches}
    updates = fields["trainer.mini_batches"] * fields.get("trainer.passes", 1)
    assert fields["trainer.groups_per_step"] * fields["trainer.group_size"] == size
    assert [before for before, _ in batches] == list(range(0, BASE["max_steps"], updates))
    assert fields["trainer.steps"] == len(batches)


def steps_of(updates: list[int], fields: dict[str, Any]) -> list[int]:
    """After which of our steps something is that TRL does after so many updates."""
    per_step = fields["trainer.mini_batches"] * fields.get("trainer.passes", 1)
    return [number // per_step for number in updates]


INTERVALS: list[dict[str, Any]] = [
    {"eval_strategy": "steps", "eval_steps": 2},
    {"eval_strategy": "steps", "eval_steps": 0.5, "eval_on_start": True},
    {"eval_strategy": "steps", "logging_steps": 3},
    {"eval_strategy": "steps", "eval_steps": 4, "steps_per_generation": 2, "num_generations_eval": 4},
    {"eval_strategy": "no"},
    {"save_strategy": "steps", "save_steps": 2},
    {"save_strategy": "steps", "save_steps": 0.3},
    {"save_strategy": "steps", "save_steps": 4, "steps_per_generation": 2},
]


@pytest.mark.parametrize("options", INTERVALS, ids=json.dumps)
def test_evaluations_and_checkpoints_are_when_they_are_there(options, tmp_path):
    seen = play(tmp_path, **options)
    fields = converted(**options)
    steps = fields["trainer.steps"]
    if every := fields.get("trainer.evaluation.every"):
        ours = sorted({*range(every, steps, every), steps})  # the last version always has one
        first = [0] if fields["trainer.evaluation.at_start"] else []
        assert steps_of([updates for updates, _ in seen.evaluations], fields) == first + ours
        samples = {count for _, count in seen.evaluations}
        assert samples == {4 * fields["trainer.evaluation.samples"]}
        assert fields["trainer.evaluation.temperature"] == 1.0, "they are sampled as in training"
    else:
        assert seen.evaluations == []
    if options.get("save_strategy") == "steps":
        every = fields["trainer.checkpoint_every"]
        ours = sorted({*range(every, steps, every), steps})
        assert steps_of(seen.checkpoints, fields) == ours
