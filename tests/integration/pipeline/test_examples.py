"""Examples in short, by real services: each does what it is there to show, and is replayed bit by bit."""

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
from tests.support.training import commits_of, messages
from tidemill.common.config import load_config
from tidemill.common.images.store import ImageStore
from tidemill.common.run.state import METRICS_FILE, PROFILES, STEP, read_records
from tidemill.common.wire.messages import FIRST_DEMONSTRATION, Commit, Score, ScoreStatus, Ticket, Trajectory
from tidemill.services.console.look.sessions import PICTURE

SHORT = {"trainer__loggers": "[]", "streams__trim": "false"}


def settings(**values: Any) -> list[str]:
    return [f"{name.replace('__', '.')}={value}" for name, value in values.items()]


def made(script: str, folder: Path, steps: int) -> Path:
    """The model that a script of an example trains."""
    command = [sys.executable, f"examples/{script}", "--steps", str(steps), "--out", str(folder)]
    subprocess.run(command, cwd=REPO, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return folder


def tidemill(runs: Path, *words: str, url: str = "") -> str:
    environment = {"TIDEMILL_RUNS_DIR": str(runs)} | ({"TIDEMILL_REDIS_URL": url} if url else {})
    done = preloaded.tidemill(*words, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def assert_replays(runs: Path, run_id: str, steps: list[int], url: str = "") -> list[dict[str, Any]]:
    words = ("replay", ",".join(map(str, steps)), run_id, "--json")
    results: list[dict[str, Any]] = json.loads(tidemill(runs, *words, url=url))
    assert [(result["step"], result["equal"]) for result in results] == [(step, True) for step in steps]
    return results


async def test_a_skill_is_learned_from_a_teacher_alone(tmp_path: Path) -> None:
    teacher = made("distill/make_teacher.py", tmp_path / "teacher", 60)
    steps = 8
    evaluation = "{every: 0, temperature: 0.0, max_prompts: 96}"
    config = load_config(
        REPO / "examples/distill/config.yaml",
        settings(
            **SHORT,
            servers__teacher__model=teacher,
            trainer__steps=steps,
            trainer__groups_per_step=64,
            trainer__checkpoint_every=100,
            trainer__evaluation=evaluation,
        ),
    )
    async with ServiceRun(tmp_path, config, "distil") as run:
        run.start("reward.replica", "replica", arguments=("--servers", "teacher"))
        run.start_all()
        assert await run.wait("trainer") == 0, run.log_of("trainer")
        commits = await commits_of(run.broker, run.keys)
        trajectories = await messages(run.broker, run.keys.trajectories(), Trajectory)
        scores = await messages(run.broker, run.keys.scores(), Score)
        (run.run_dir / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
        check_distillation(teacher, trajectories, scores, commits)
        records = read_records(run.run_dir / METRICS_FILE)
        score = {record["version"]: record["score"] for record in records if record["kind"] == "evaluation"}
        assert score[steps] - score[0] > 0.1, score
        first, *_ = assert_replays(tmp_path, "distil", list(range(steps)), run.url)
        assert "teacher/teacher/reverse_kl" in {row["name"] for row in first["metrics"]}
        traced = tidemill(tmp_path, "trace", f"{commits[0].groups[0]}.0", "distil", url=run.url)
        assert "logprob - teacher's: mean" in traced
        assert "teacher/teacher/reverse_kl" in tidemill(tmp_path, "step", "0", "distil", url=run.url)


CLIP = 5.0
"""Of the example of distillation."""


def check_distillation(
    teacher: Path, trajectories: list[Trajectory], scores: list[Score], commits: list[Commit]
) -> None:
    """Every reward is 0, every sampled token has the teacher's logprob, and the commit its mean distance."""
    by_key = {trajectory.key: trajectory for trajectory in trajectories}
    scored = {score.key: score for score in scores}
    assert {(score.status, score.value) for score in scored.values()} == {(ScoreStatus.OK, 0.0)}
    model = AutoModelForCausalLM.from_pretrained(teacher).eval()
    for key in sorted(scored)[:20]:
        trajectory = by_key[key]
        logprobs = scored[key].teacher_logprobs
        ids = [*trajectory.prompt_ids.tolist(), *trajectory.completion_ids.tolist()]
        with torch.inference_mode():
            whole = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        places = range(len(trajectory.prompt_ids), len(ids))
        expected = [float(whole[position - 1, ids[position]]) for position in places]
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)
    for commit in commits:
        keys = commit.trained_keys
        assert len(keys) == 64
        gaps = [by_key[k].logprobs.astype(np.float64) - scored[k].teacher_logprobs for k in keys]
        assert commit.metrics["teacher/teacher/reverse_kl"] == pytest.approx(np.concatenate(gaps).mean())
        # One sample a group and no reward: its advantage is the teacher's alone.
        for key, gap in list(zip(keys, gaps, strict=True))[:8]:
            assert commit.advantages[str(key[0])][0] == pytest.approx(-gap.clip(-CLIP, CLIP).mean())


async def test_a_mixture_is_trained_along_the_engines_experts_and_within_its_sampling_masks(tmp_path):
    model = made("moe/make_model.py", tmp_path / "made", 10)
    steps = 3
    config = load_config(
        REPO / "examples/moe/config.yaml",
        settings(
            **SHORT,
            model__path=model,
            trainer__steps=steps,
            trainer__groups_per_step=8,
            trainer__evaluation__every=0,
        ),
    )
    async with ServiceRun(tmp_path, config, "mixture") as run:
        profile = run.run_dir / PROFILES / "step-1"
        profile.mkdir(parents=True)  # as `tidemill step --profile` asks for one
        run.start_all()
        assert await run.wait("trainer") == 0, run.log_of("trainer")
        commits = await commits_of(run.broker, run.keys)
        samples = await messages(run.broker, run.keys.trajectories(), Trajectory)
        assert all(sample.choices.claim for sample in samples)
        # The last steps train on samples of older weights, whose routers chose otherwise now and then.
        metrics = commits[-1].metrics
        assert 0.0 < metrics["routes/changed_layers"] <= metrics["routes/changed_tokens"] < 0.5
        assert metrics["logprob_gap/mean"] < 1.0
        assert not any(commit.dropped for commit in commits)
        assert (profile / "rank-0.json.gz").exists()
        (run.run_dir / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
        assert_replays(tmp_path, "mixture", list(range(steps)), run.url)
        output = tidemill(tmp_path, "step", str(steps - 1), "mixture", url=run.url)
        for name in ("routes/changed_tokens", "routes/logprob_gap_without"):
            assert name in output


def up(run_id: str, runs: Path, **data: str) -> list[dict[str, Any]]:
    """The numbers of each step of a run of demonstrations, by `tidemill up`."""
    words = settings(
        trainer__steps=9, trainer__groups_per_step=16, trainer__group_size=4, trainer__checkpoint_every=4,
        trainer__loggers="[]", data__eval="{}", expect__eval_gain="null",
        **{f"data__{name}": value for name, value in data.items()},
    )  # fmt: skip
    changes = [word for assignment in words for word in ("--set", assignment)]
    tidemill(runs, "up", str(REPO / "examples/sft/config.yaml"), "--no-live", "--run-id", run_id, *changes)
    return [record for record in read_records(runs / run_id / METRICS_FILE) if record["kind"] == STEP]


def test_from_demonstrations_to_rewards_to_demonstrations(tmp_path: Path) -> None:
    """Fine-tuning, then rewards; its successes are what another run is shown, which has no workers."""
    path = f"path: {REPO}/examples/sft/demonstrations.jsonl"
    source = f"{{name: shown, kind: demonstrations, {path}, weight: 1000000, epochs: 1}}"
    sums = f"{{name: sums, path: {REPO}/examples/arith/train.jsonl}}"
    steps = up("first", tmp_path, max_rows="96", train=f"[{source}, {sums}]")
    shares = [step.get("imitation/token_share", 0.0) for step in steps]
    assert shares == [1.0] * 6 + [0.0] * 3, "96 rows in batches of 16"
    assert ["reward" in step for step in steps] == [False] * 6 + [True] * 3
    assert steps[5]["loss"] < steps[0]["loss"]

    best = f"[{{name: best, kind: demonstrations, path: {tmp_path}/first, min_reward: 1.0}}]"
    steps = up("second", tmp_path, train=best)
    assert len(steps) == 9 and all(step["imitation/token_share"] == 1.0 for step in steps)
    logs = {path.stem for path in (tmp_path / "second/logs").iterdir()}
    assert not any(name.startswith(("rollout", "reward")) for name in logs), logs

    for run_id in ("first", "second"):
        assert_replays(tmp_path, run_id, [0, 5, 8])
    assert "a demonstration" in tidemill(tmp_path, "trace", f"{FIRST_DEMONSTRATION}.0", "second")


def draw_pictures(folder: Path, num_rows: int) -> None:
    """The rows of examples/shapes."""
    command = [sys.executable, "examples/shapes/draw.py", "--rows", str(num_rows), "--out", str(folder)]
    subprocess.run(command, cwd=REPO, check=True)


async def test_a_model_that_sees_is_trained_on_pictures_and_a_broken_one_costs_its_row_alone(tmp_path):
    rows = tmp_path / "data"
    draw_pictures(rows, 24)
    (rows / "train" / "0003.png").write_bytes(b"<html>not found</html>")
    model = made("shapes/make_model.py", tmp_path / "made", 10)
    steps = 3
    config = load_config(
        REPO / "examples/shapes/config.yaml",
        settings(
            **SHORT,
            model__path=model,
            data__train=rows / "train.jsonl",
            data__eval=f"{{held_out: {rows / 'eval.jsonl'}}}",
            trainer__steps=steps,
            trainer__groups_per_step=8,
            trainer__algorithm__filter_zero_variance=False,
            trainer__evaluation__max_prompts=8,
        ),
    )
    async with ServiceRun(tmp_path, config, "shapes") as run:
        run.start_all()
        assert await run.wait("trainer") == 0, run.log_of("trainer")
        tickets = await messages(run.broker, run.keys.prompts(), Ticket)
        samples = await messages(run.broker, run.keys.trajectories(), Trajectory)
        commits = await commits_of(run.broker, run.keys)
        (run.run_dir / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
        assert "train.jsonl line 4" in run.log_of("trainer")
        # Each of the other 23 rows once, and the first again.
        assert {ticket.row for ticket in tickets} == {*range(24)} - {3}
        images = {ticket.ticket: ticket.images for ticket in tickets}
        for sample in samples:
            assert sample.images == images[sample.ticket]
            (image,) = sample.images
            assert image.num_tokens == 4 and ImageStore(run.run_dir).read(image)
            assert not sample.fault
        trained = [commit.trained_keys for commit in commits]
        assert [len(set(keys)) for keys in trained] == [64] * steps
        assert_replays(tmp_path, "shapes", list(range(steps)), run.url)
        ticket = commits[0].groups[0]
        digest = images[ticket][0].digest
        words = ("streams", "show", "trajectories", f"{ticket}.0", "--run", "shapes")
        assert digest in tidemill(tmp_path, *words, url=run.url)
        tidemill(tmp_path, "trace", f"{ticket}.0", "shapes", url=run.url)
        tidemill(tmp_path, "rescore", "shapes", "--reward", "exact_match", url=run.url)


async def test_a_game_that_shows_a_picture_in_its_second_turn_is_checked_trained_and_replayed(tmp_path):
    rows = tmp_path / "data"
    draw_pictures(rows, 24)
    model = made("shapes/make_model.py", tmp_path / "made", 80)
    steps = 2
    config = load_config(
        REPO / "examples/shapes/game.yaml",
        settings(
            **SHORT,
            model__path=model,
            data__train=rows / "train.jsonl",
            data__eval="{}",
            expect__eval_gain="null",
            trainer__steps=steps,
            trainer__groups_per_step=8,
            trainer__algorithm__filter_zero_variance=False,
        ),
    )
    config_file = tmp_path / "game.yaml"
    config_file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert "[pictures: 1]" in tidemill(tmp_path, "check", str(config_file))
    async with ServiceRun(tmp_path, config, "game") as run:
        run.start_all()
        assert await run.wait("trainer") == 0, run.log_of("trainer")
        samples = await messages(run.broker, run.keys.trajectories(), Trajectory)
        commits = await commits_of(run.broker, run.keys)
        (run.run_dir / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
        for sample in samples:
            assert sample.session is not None and not sample.fault
            assert len(sample.images) == len(sample.session.turns)
        later = {(sample.ticket, sample.images[1].digest) for sample in samples if len(sample.images) == 2}
        # All samples of a group are shown the same.
        assert later and len(later) == len({ticket for ticket, _ in later})
        trained = [commit.trained_keys for commit in commits]
        assert [len(set(keys)) for keys in trained] == [64] * steps
        assert_replays(tmp_path, "game", list(range(steps)), run.url)
        longest = next(sample for sample in samples if len(sample.images) == 2)
        traced = tidemill(tmp_path, "trace", f"{longest.ticket}.{longest.index}", "game", url=run.url)
        assert PICTURE in traced
