"""A whole `tidemill up` with vLLM: idle shares, and how far the logprobs of engine and trainer are apart.

    python -m benchmarks.gpu.whole_run [--one-gpu] [--dry]

A model of 0.6B with random weights, a reward by the text, one step off-policy. With several GPUs trainer and
engine have their own; with `--one-gpu` only the first one is visible, and what `tidemill up` makes of that is
the finding. The rest is that of a run: its own Redis, its reward workers, its checkpoints. The last line is
JSON.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from benchmarks.gpu.shapes import is_gpu, make_model, shape_of
from benchmarks.report import print_figures

VISIBLE = "CUDA_VISIBLE_DEVICES"
PROMPTS, PROMPT_WORDS = 64, 16
KEPT = (
    "steps",
    "wall_s",
    "tokens_per_s",
    "trainer_idle_share",
    "rollout_idle_share",
    "max_staleness_seen",
    "trajectories_trained",
    "lost",
    "duplicated_in_training",
)
REWARD = """
import zlib

def compute_score(solution_str, **_):
    return (zlib.crc32(solution_str.encode()) & 0xFFFF) / 0xFFFF
"""
STEP_FIGURES = ("logprob_gap/mean", "logprob_gap/max")


def write_config(folder: Path, dry: bool, one_gpu: bool) -> Path:
    """Model, prompts and config of the run."""
    shape = shape_of("0.6b", dry)
    make_model(shape, folder / "model")
    rows = [
        {
            "prompt": " ".join(f"w{3 + (row * 7 + word * 5) % 500}" for word in range(PROMPT_WORDS)),
            "data_source": "proof",
            "reward_model": {"ground_truth": ""},
        }
        for row in range(PROMPTS)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    tokens = 24 if dry else 512
    tree = {
        "model": {"path": "model", "dtype": "bfloat16", "max_model_len": tokens + 2 * PROMPT_WORDS},
        "data": {"train": "train.jsonl", "max_prompt_tokens": PROMPT_WORDS},
        "rollout": {
            "engine": "vllm",
            "num_threads": int(dry),
            "sampling": {"max_tokens": tokens},
            "max_num_seqs": 16 if dry else 256,
            "vllm": {"enforce_eager": dry},
        },
        "reward": {"function": "reward.py:compute_score"},
        "trainer": {
            "steps": 3 if dry else 8,
            "groups_per_step": 4 if dry else 32,
            "group_size": 4 if dry else 8,
            "num_threads": int(dry),
            "optimizer": {"lr": 1e-6},
            "checkpoint_every": 2,
        },
    }
    if one_gpu and not dry:
        tree["rollout"]["vllm"]["gpu_memory_utilization"] = 0.4  # the rest is the trainer's
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def run(config: Path, runs: Path, one_gpu: bool) -> tuple[int, list[str]]:
    """`tidemill up`, whose output is passed on; its exit code, and what it says of GPUs."""
    own = {VISIBLE: os.environ.get(VISIBLE, "0").split(",")[0]} if one_gpu and is_gpu() else {}
    command = [sys.executable, "-m", "tidemill.services.console", "up", str(config), "--no-live"]
    command += ["--run-id", "proof", "--runs-dir", str(runs)]
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    said = []
    with subprocess.Popen(command, env=os.environ | own, **pipe) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if "GPU" in line:
                said.append(line.strip())
    return process.returncode, said


def read_figures(folder: Path) -> dict[str, Any]:
    """Figures of the run's summary and of its last step."""
    summary = json.loads((folder / "summary.json").read_text())
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last: dict[str, Any] = next((record for record in reversed(records) if record.get("kind") == "step"), {})
    values = last.get("metrics", last)
    figures = {name: summary.get(name) for name in KEPT}
    figures |= {name.replace("/", "_"): values[name] for name in STEP_FIGURES if name in values}
    if verdict := summary.get("bottleneck"):
        figures["slowest"] = verdict.get("text")
    return figures


def main(
    one_gpu: Annotated[bool, typer.Option("--one-gpu", help="show the run one GPU only")] = False,
    dry: Annotated[bool, typer.Option("--dry", help="a tiny model, on the CPU")] = False,
) -> None:
    """Do the run; ends with its exit code."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = write_config(folder, dry, one_gpu)
        started = time.perf_counter()
        code, said = run(config, folder / "runs", one_gpu)
        if code:
            for log in sorted((folder / "runs/proof/logs").glob("*.log")):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}", flush=True)
            raise typer.Exit(code)
        figures = {"up_s": time.perf_counter() - started, "placement": said}
        figures |= read_figures(folder / "runs/proof")
    print_figures("A whole run", figures)


if __name__ == "__main__":
    typer.run(main)
