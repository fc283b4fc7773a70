"""A whole run beside TRL's, each from the start of its process: same model, rows, reward, sizes and machine.

    python -m benchmarks.race                       # the run of `make demo`; ten minutes on two cores
    python examples/instruct/prepare.py
    python -m benchmarks.race --model instruct      # that of `make demo-instruct`: an hour

`tidemill up` one step off-policy, the same on-policy (k = 0, the demo only), and `GRPOTrainer` with what the
config says, in turns; pairs differ in their seed. None evaluates; each saves once, at its end. `wall` is from
the command to its end, `step` the time between two updates, without the first. The demo's last line has
`tree_512` of `benchmarks.trainer` too: what computing a prompt once for its samples brings.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.report import machine, print_result, print_table
from benchmarks.trainer import measure
from examples.instruct.reward import compute_score
from tidemill.common.config import load_config
from tidemill.services.reward.builtin import gsm8k

CONFIGS = {"demo": Path("examples/arith/config.yaml"), "instruct": Path("examples/instruct/config.yaml")}
BATCHES = {"demo": 512, "instruct": 8}
"""Completions in a forward pass of TRL, the fastest of those tried."""
FOLDER = "FOLDER"
"""Stands for the folder of a run in its command."""


def main(
    model: Annotated[str, typer.Option(help=f"one of {', '.join(CONFIGS)}")] = "demo",
    steps: Annotated[int, typer.Option(help="updates of each run; 0: as many as the config has")] = 0,
    pairs: Annotated[int, typer.Option(help="runs of each side, in turns")] = 2,
    batch: Annotated[int, typer.Option(help="completions in a forward pass of TRL; 0: the fastest")] = 0,
    seed: Annotated[int, typer.Option(help="of the first pair")] = 0,
    trl: Annotated[Path | None, typer.Option(help="run TRL's side alone, in this folder")] = None,
) -> None:
    """Run all sides in turns, and compare their times."""
    if model not in CONFIGS:
        raise typer.BadParameter(f"expected one of {', '.join(CONFIGS)}", param_hint="--model")
    if steps == 1:
        raise typer.BadParameter("a step's time needs two of them", param_hint="--steps")
    steps, batch = steps or load_config(CONFIGS[model]).trainer.steps, batch or BATCHES[model]
    if trl is not None:
        train_with_trl(CONFIGS[model], trl, steps, batch, seed)
        return
    own = [str(Path(sys.executable).with_name("tidemill")), "up", str(CONFIGS[model]), "--no-live"]
    own += ["--run-id", "race", "--runs-dir", FOLDER]
    changes = (
        f"steps={steps}",
        f"checkpoint_every={steps}",
        "evaluation.every=0",
        "evaluation.at_start=false",
    )
    own += [part for change in changes for part in ("--set", f"trainer.{change}")]
    own += ["--set", "data.eval={}", "--set", "expect.eval_gain=null"]
    theirs = [sys.executable, "-m", "benchmarks.race", "--model", model, "--trl", FOLDER]
    theirs += ["--steps", str(steps), "--batch", str(batch)]
    commands = {"tidemill": own, "TRL": theirs}
    if model == "demo":
        commands["tidemill, k = 0"] = [*own, "--set", "trainer.max_staleness=0"]
    found: dict[str, list[tuple[float, float, float]]] = {side: [] for side in commands}
    for pair in range(pairs):
        for side, command in commands.items():
            print(f"running: {side}, {pair + 1} of {pairs}", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                started = time.monotonic()
                seeded = ["--seed", f"{seed + pair}"] if side == "TRL" else ["--set", f"seed={seed + pair}"]
                parts = [folder if part == FOLDER else part for part in command]
                subprocess.run([*parts, *seeded], check=True)
                wall_s = time.monotonic() - started
                records = read_steps(Path(folder) / "race" / "metrics.jsonl")
            step_s = (records[-1]["time"] - records[0]["time"]) / (len(records) - 1)
            found[side].append((wall_s, step_s, records[-1]["reward"]))
    medians = {side: [*map(statistics.median, zip(*runs, strict=True))] for side, runs in found.items()}
    rows = [(side, f"{wall:.1f}", f"{step:.2f}", f"{end:.3f}") for side, (wall, step, end) in medians.items()]
    columns = ("side", "wall s", "step s", "reward of the last step")
    print_table(f"Runs of {steps} steps, {model}", columns, rows, f"{machine()}. Medians of {pairs}.")
    ratios = {
        side: [round(other / one, 3) for one, other in zip(own, medians["TRL"], strict=True)]
        for side, own in medians.items()
    }
    (wall, step, _), prefix = ratios["tidemill"], "" if model == "demo" else f"{model}_"
    result = {f"{prefix}wall_ratio": wall, f"{prefix}step_ratio": step}
    if model == "demo":
        tree = measure("bare", "512", budget=4096, steps=3, threads=2)["ratio"]
        result |= {"k0_wall_ratio": ratios["tidemill, k = 0"][0], "tree_512": round(tree, 2)}
    print_result(result)


def read_steps(path: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [record for record in records if record["kind"] == "step"]


def train_with_trl(path: Path, folder: Path, steps: int, batch: int, seed: int) -> None:
    """Train as the config says; the records of the steps go where a run of ours would have them."""
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    config, file = load_config(path), folder / "race" / "metrics.jsonl"
    file.parent.mkdir()

    class Recorder(TrainerCallback):  # type: ignore[misc]
        def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
            if logs and "reward" in logs:
                record = {"kind": "step", "time": time.time(), "reward": float(logs["reward"])}
                print(record, flush=True)
                with file.open("a", encoding="utf-8") as records:
                    records.write(json.dumps(record) + "\n")

    def reward(completions: Any, **columns: Any) -> list[float]:
        if "reward_model" in columns:
            truths = (column["ground_truth"] for column in columns["reward_model"])
            return [
                gsm8k.compute_score("", text, truth) for text, truth in zip(completions, truths, strict=True)
            ]
        said = (completion[-1]["content"] for completion in completions)
        return [compute_score(text, truth) for text, truth in zip(said, columns["ground_truth"], strict=True)]

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
        beta=0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    rows = load_dataset("json", data_files=str(path.parent / "train.jsonl"), split="train")
    recorder = Recorder()
    trainer = GRPOTrainer(
        str(path.parent / "model"), reward, args=arguments, train_dataset=rows, callbacks=[recorder]
    )
    trainer.train()
    trainer.save_model(str(folder / "trl"))


if __name__ == "__main__":
    typer.run(main)
