"""The example notebook and the sweep, as a reader runs them, in a folder of their own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tidemill.common.process.programs import ROOT

KERNEL = """
import asyncio, json, sys
async def cells():  # a notebook's cells run where a loop runs
    names = {}
    for cell in json.load(open(sys.argv[1]))["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert names["result"].is_ok and [step for step, _ in names["curve"]] == [0, 1, 2], names["result"]
    assert len(names["samples"]) == 2 * 8 * 16 and len(names["group"].samples) == 16
    assert names["report"]["agreement"]["compared"] == 3 * 8 * 16
asyncio.run(cells())
"""


def start(folder: Path, *words: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def examples(folder: Path) -> Path:
    for name in ("arith", "python"):
        shutil.copytree(ROOT / "examples" / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "python"


def test_every_cell_of_the_notebook_works(tmp_path: Path) -> None:
    notebook = json.loads((ROOT / "examples/python/a_run.ipynb").read_text())
    assert all(not cell.get("outputs") for cell in notebook["cells"]), "kept without its outputs"
    start(examples(tmp_path), "-c", KERNEL, "a_run.ipynb")


def test_the_sweep_does_each_seed_once_and_sums_up(tmp_path: Path) -> None:
    folder = examples(tmp_path)
    small = [
        "trainer.policy=simulated",
        "rollout.engine=simulated",
        "trainer.steps=2",
        "expect.eval_gain=null",
    ]
    words = ["sweep.py", "../arith/config.yaml", "--seeds", "2", *(w for s in small for w in ("--set", s))]
    said = start(folder, *words)
    assert said.startswith("step 0  reward ") and len(said.splitlines()) == 2
    assert (folder / "runs" / "sweep-seed-1" / "summary.json").exists()
    assert start(folder, *words) == said
