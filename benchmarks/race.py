"""A whole run beside TRL's, each from the start of its process: same model, rows, reward, sizes and machine.

    python -m benchmarks.race                       # the run of `make demo`; ten minutes on two cores
    python examples/instruct/prepare.py
    python -m benchmarks.race --model instruct      # that of `make demo-instruct`: an hour

`tidemill up` one step off-policy, the same on-policy (k = 0, the demo only), and `GRPOTrainer` with what the
config says, in turns; pairs differ in their seed. None evaluates; each saves once, at its end. `wall` is from
the command to its end, `step` the time between two updates, without the first. The demo's last line has
`tree_512` of `benchmarks.trainer` too: what computing a prompt once for its samples brings. `--trl` is TRL's
side alone, in this folder.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, Literal

import typer

from benchmarks.report import in_turns, machine, print_result, print_table
from benchmarks.trainer import measure
from examples.instruct.reward import compute_score
from tidemill.common.config import load_config
from tidemill.services.reward.builtin import gsm8k

CONFIGS = {"demo": Path("examples/arith/config.yaml"), "instruct": Path("examples/instruct/config.yaml")}
BATCHES = {"demo": 512, "instruct": 8}
"""Completions in a forward pass of TRL, the fastest of those tried."""


def main(
    model: Literal["demo", "instruct"] = "demo", steps: int = 0, pairs: int = 2, seed: int = 0, trl: str = ""
) -> None:
    """Run all sides in turns, and compare their times; `steps` 0 is as many as the config has."""
    steps = steps or load_config(CONFIGS[model]).trainer.steps
    if trl:
        train_with_trl(model, Path(trl), steps, seed)
        return
    settings = [f"trainer.steps={steps}", f"trainer.checkpoint_every={steps}", "trainer.evaluation.every=0"]
    settings += ["trainer.evaluation.at_start=false", "data.eval={}", "expect.eval_gain=null"]
    command = [str(Path(sys.executable).with_name("tidemill")), "up", str(CONFIGS[model]), "--no-live"]
    command += ["--run-id", "race", *(word for setting in settings for word in ("--set", setting))]
    command += ["--set", "seed={seed}", "--runs-dir", "{folder}"]
    theirs = [sys.executable, "-m", "benchmarks.race", "--model", model, "--steps", str(steps)]
    commands = {"tidemill": command, "TRL": [*theirs, "--seed", "{seed}", "--trl", "{folder}"]}
    if model == "demo":
        commands["tidemill, k = 0"] = [*command, "--set", "trainer.max_staleness=0"]
    sides = {side: partial(run, command, count(seed)) for side, command in commands.items()}
    results = in_turns(sides, pairs)
    medians = {side: [*map(median, zip(*runs, strict=True))] for side, runs in results.items()}
    rows = [(side, f"{wall:.1f}", f"{step:.2f}", f"{end:.3f}") for side, (wall, step, end) in medians.items()]
    note = f"{machine()}. Medians of {pairs}."
    print_table(f"Runs of {steps} steps, {model}", "side,wall s,step s,reward of the last step", rows, note)
    ratios = {}
    for side, values in medians.items():
        pairs_of_values = zip(values, medians["TRL"], strict=True)
        ratios[side] = [round(of_trl / value, 3) for value, of_trl in pairs_of_values]
    (wall, step, _) = ratios["tidemill"]
    prefix = "" if model == "demo" else f"{model}_"
    result = {f"{prefix}wall_ratio": wall, f"{prefix}step_ratio": step}
    if model == "demo":
        result["k0_wall_ratio"] = ratios["tidemill, k = 0"][0]
        result["tree_512"] = measure("bare", "512", steps=3, threads=2)["ratio"]
    print_result(result)


def run(command: list[str], seeds: Iterator[int]) -> tuple[float, float, float]:
    """One run with the next seed: its seconds, those of a step, and the reward of the last one."""
    print(f"running: {' '.join(command[:3])} ...", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        number = str(next(seeds))
        parts = [word.replace("{folder}", folder).replace("{seed}", number) for word in command]
        subprocess.run(parts, check=True)
        wall_s = time.monotonic() - started
        lines = (Path(folder) / "race" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "step"]
    step_s = (records[-1]["time"] - records[0]["time"]) / (len(records) - 1)
    return wall_s, step_s, records[-1]["reward"]


def train_with_trl(model: str, folder: Path, steps: int, seed: int) -> None:
    """Train as the config says; the records of the steps go where a run of ours would have them."""
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from benchmarks.trainer_trl import PLAIN  # imports all of TRL

    path = CONFIGS[model]
    batch = BATCHES[model]
    config = load_config(path)
    file = folder / "race" / "metrics.jsonl"
    file.parent.mkdir()

    class Recorder(TrainerCallback):  # type: ignore[misc]
        def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
            if logs and "reward" in logs:
                record = {"kind": "step", "time": time.time(), "reward": float(logs["reward"])}
                print(record, flush=True)
                with file.open("a", encoding="utf-8") as records:
                    records.write(json.dumps(record) + "\n")

    def reward(completions: Any, **columns: Any) -> list[float]:
        if model == "demo":
            truths = (column["ground_truth"] for column in columns["reward_model"])
            return [gsm8k.compute_score("", *pair) for pair in zip(completions, truths, strict=True)]
        said = (completion[-1]["content"] for completion in completions)
        return [compute_score(*pair) for pair in zip(said, columns["ground_truth"], strict=True)]

    ours = config.trainer
    completions = ours.groups_per_step * ours.group_size
    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=steps,
        seed=seed,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=completions // batch,
        num_generations=ours.group_size,
        max_completion_length=config.rollout.sampling.max_tokens,
        temperature=config.rollout.sampling.temperature,
        learning_rate=ours.optimizer.lr,
        max_grad_norm=ours.optimizer.max_grad_norm,
        lr_scheduler_type="constant",
        loss_type="dr_grpo",  # a sum over tokens divided by a constant, as `normalisation: constant`
        use_cpu=True,
        bf16=False,
        **PLAIN,
        model_init_kwargs={"dtype": "float32"},
    )
    rows = load_dataset("json", data_files=str(path.parent / "train.jsonl"), split="train")
    folder_of_model = str(path.parent / "model")
    callbacks = [Recorder()]
    trainer = GRPOTrainer(folder_of_model, reward, args=arguments, train_dataset=rows, callbacks=callbacks)
    trainer.train()
    trainer.save_model(str(folder / "trl"))


if __name__ == "__main__":
    typer.run(main)
