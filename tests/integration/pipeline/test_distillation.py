"""The distillation example in short: a skill is learned from a teacher alone, by real services; what was
trained comes out again bit by bit."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from tests.support import preloaded
from tests.support.preloaded import REPO
from tests.support.runs import ServiceRun
from tests.support.training import commits_of
from tidemill.common.config import RunConfig, load_config
from tidemill.common.streams import Entry, read_range
from tidemill.common.wire.messages import Commit, Score, ScoreStatus, Trajectory

STEPS = 8
CLIP = 5.0
"""Of the example."""


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "teacher"
    command = [sys.executable, "examples/distill/make_teacher.py", "--steps", "60", "--out", str(folder)]
    subprocess.run(command, cwd=REPO, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return folder


def config_of(teacher: Path) -> RunConfig:
    return load_config(
        REPO / "examples/distill/config.yaml",
        [
            f"servers.teacher.model={teacher}",
            f"trainer.steps={STEPS}",
            "trainer.groups_per_step=64",
            "trainer.checkpoint_every=100",
            "trainer.loggers=[]",
            "trainer.evaluation={every: 0, temperature: 0.0, max_prompts: 96}",
            "streams.trim=false",
        ],
    )


async def test_a_skill_is_learned_from_a_teacher_alone_and_replayed_bit_by_bit(
    teacher: Path, tmp_path: Path
) -> None:
    config = config_of(teacher)
    async with ServiceRun(tmp_path, config, "distil") as run:
        run.start("reward.replica", "replica", arguments=("--servers", "teacher"))
        run.start_all()
        assert await run.wait("trainer") == 0, run.log_of("trainer")
        commits = await commits_of(run.broker, run.keys)
        trajectories = await entries_of(run, run.keys.trajectories(), Trajectory)
        scores = await entries_of(run, run.keys.scores(), Score)
        (run.run_dir / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
        _check_records(teacher, trajectories, scores, commits)
        records = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
        first, last = (evaluation_of(records, version) for version in (0, STEPS))
        assert last - first > 0.1, (first, last)
        steps = ",".join(str(step) for step in range(STEPS))
        environment = {"TIDEMILL_RUNS_DIR": str(tmp_path), "TIDEMILL_REDIS_URL": run.url}
        done = preloaded.tidemill("replay", steps, "distil", "--json", **environment)
        assert done.returncode == 0, done.stderr
        results = json.loads(done.stdout)
        assert [r["step"] for r in results] == list(range(STEPS)) and all(r["equal"] for r in results)
        compared = {row["name"] for row in results[0]["metrics"]}
        assert "teacher/teacher/reverse_kl" in compared
        shown = preloaded.tidemill("trace", f"{commits[0].groups[0]}.0", "distil", **environment)
        assert "logprob - teacher's: mean" in shown.stdout, shown.stdout + shown.stderr
        shown = preloaded.tidemill("step", "0", "distil", **environment)
        assert "teacher/teacher/reverse_kl" in shown.stdout, shown.stdout + shown.stderr


def _check_records(teacher: Path, trajectories: list[Any], scores: list[Any], commits: list[Commit]) -> None:
    """Every reward is 0, every sampled token has the teacher's logprob, and the commit its mean distance."""
    made = {trajectory.key: trajectory for trajectory in trajectories}
    scored = {score.key: score for score in scores}
    assert {(score.status, score.value) for score in scored.values()} == {(ScoreStatus.OK, 0.0)}
    model = AutoModelForCausalLM.from_pretrained(teacher).eval()
    for key in sorted(scored)[:20]:
        trajectory, logprobs = made[key], scored[key].teacher_logprobs
        ids = [*trajectory.prompt_ids.tolist(), *trajectory.completion_ids.tolist()]
        with torch.inference_mode():
            whole = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        places = range(len(trajectory.prompt_ids), len(ids))
        expected = [float(whole[place - 1, ids[place]]) for place in places]
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)
    for commit in commits:
        keys = commit.trained_keys
        assert len(keys) == 64
        gaps = [made[k].logprobs.astype(np.float64) - scored[k].teacher_logprobs for k in keys]
        assert commit.metrics["teacher/teacher/reverse_kl"] == pytest.approx(np.concatenate(gaps).mean())
        # One sample a group and no reward: its advantage is the teacher's alone.
        for key, gap in list(zip(keys, gaps, strict=True))[:8]:
            assert commit.advantages[str(key[0])][0] == pytest.approx(-gap.clip(-CLIP, CLIP).mean())


def evaluation_of(records: list[dict[str, Any]], version: int) -> float:
    (found,) = [r for r in records if r["kind"] == "evaluation" and r["version"] == version]
    return float(found["score"])


async def entries_of(run: ServiceRun, key: str, kind: Any) -> list[Any]:
    return [entry.message for entry in await read_range(run.broker, key, kind) if isinstance(entry, Entry)]
