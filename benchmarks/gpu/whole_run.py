"""A whole run with vLLM, as `tidemill up` does it: idle shares, and the gap of the logprobs of engine and
trainer.

    python -m benchmarks.gpu.whole_run [--one-gpu] [--dry]

A model of 0.6B with random weights, a reward by the text, one step off-policy. With several GPUs trainer and
engine have their own; with `--one-gpu` only the first one is visible, and what the run makes of that is the
finding. The rest is that of a run: its own Redis, its reward workers, its checkpoints.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import typer

import tidemill
from benchmarks.gpu.shapes import is_gpu, make_model, shape_of
from benchmarks.report import print_figures

VISIBLE = "CUDA_VISIBLE_DEVICES"
PROMPTS = 64
PROMPT_WORDS = 16
OF_THE_RUN = """steps wall_s tokens_per_s trainer_idle_share rollout_idle_share max_staleness_seen
trajectories_trained lost duplicated_in_training"""
OF_THE_LAST_STEP = ("logprob_gap/mean", "logprob_gap/max")
REWARD = """
import zlib

def compute_score(solution_str, **_):
    return (zlib.crc32(solution_str.encode()) & 0xFFFF) / 0xFFFF
"""


def make_config(folder: Path, dry: bool, one_gpu: bool) -> dict[str, Any]:
    """Write model and prompts; returns the run's config."""
    make_model(shape_of("0.6b", dry), folder / "model")
    rows = []
    for row in range(PROMPTS):
        words = [f"w{3 + (row * 7 + word * 5) % 500}" for word in range(PROMPT_WORDS)]
        rows.append({"prompt": " ".join(words), "reward_model": {"ground_truth": ""}})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    tokens = 24 if dry else 512
    vllm = {"enforce_eager": dry}
    if one_gpu and not dry:
        vllm["gpu_memory_utilization"] = 0.4  # the rest is the trainer's
    model = {"path": str(folder / "model"), "dtype": "bfloat16", "max_model_len": tokens + 2 * PROMPT_WORDS}
    return {
        "model": model,
        "data": {"train": str(folder / "train.jsonl"), "max_prompt_tokens": PROMPT_WORDS},
        "rollout": {
            "engine": "vllm",
            "num_threads": int(dry),
            "sampling": {"max_tokens": tokens},
            "max_num_seqs": 16 if dry else 256,
            "vllm": vllm,
        },
        "reward": {"function": f"{folder}/reward.py:compute_score"},
        "trainer": {
            "steps": 3 if dry else 8,
            "groups_per_step": 4 if dry else 32,
            "group_size": 4 if dry else 8,
            "num_threads": int(dry),
            "optimizer": {"lr": 1e-6},
            "checkpoint_every": 2,
        },
    }


def main(one_gpu: bool = False, dry: bool = False) -> None:
    """Do the run, where it is dry on the CPU with a tiny model; ends with its exit code."""
    if one_gpu and is_gpu():
        os.environ[VISIBLE] = os.environ.get(VISIBLE, "0").split(",")[0]
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(Path(folder), dry, one_gpu)
        result = tidemill.run(config, run_id="proof", runs_dir=Path(folder) / "runs")
        if result.exit_code:
            for log in sorted((result.folder / "logs").glob("*.log")):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}", flush=True)
            raise typer.Exit(result.exit_code)
        figures = {name: result.summary.get(name) for name in OF_THE_RUN.split()}
        figures |= {name.replace("/", "_"): result.metrics[-1].get(name) for name in OF_THE_LAST_STEP}
        print_figures("A whole run", figures)


if __name__ == "__main__":
    typer.run(main)
