"""One real vLLM server as a replica: it registers, a judge and a teacher ask it, and it leaves nothing.

It may not use AMX tiles, though the CPU may list them: replicas that name no dtype work there, too.
A teacher's logprobs are those of a plain forward pass, segment by segment.
"""

import asyncio
import sys
from pathlib import Path

import httpx
import numpy as np
import psutil

from tests.integration.reward.test_model_rewards import (
    by_hand,
    logprobs_of,
    num_scores,
    scores_of,
    teacher_of,
)
from tests.support.models import tiny_model, write_tokenizer
from tests.support.reward_models import CHAT_TEMPLATE
from tests.support.runs import ServiceRun
from tests.support.servers import free_port
from tests.support.sessions import make_segment, make_session
from tests.support.trajectories import make_config, make_trajectory
from tests.support.vllm_machine import need_vllm
from tests.support.waiting import wait_until
from tidemill.common.process.replicas import read_replicas
from tidemill.common.streams import append
from tidemill.common.wire.messages import ScoreStatus, Trajectory

need_vllm()


WITHOUT_AMX = (sys.executable, "-m", "tests.support.without_amx")
VERDICTS = "def read(words):\n    return {'score': float(len(words.split())), 'words': words}\n"
SESSION = (make_segment((3, 4), (6,), (8, 9), (11, 12)), make_segment((14, 15, 16), (17, 18), (19,)))
EXTRA = {"hint": "w4 w5 w6", "chat": [{"role": "user", "content": "w7"}]}
COMPLETION = np.array([5, 6, 7], np.int32)
ARGS = ["--enforce-eager", "--max-num-seqs", "8", "--max-model-len", "64"]


def make_run(folder: Path, model: Path, port: int) -> ServiceRun:
    (folder / "verdicts.py").write_text(VERDICTS)
    judge = {
        "servers": "grader",
        "api": "completions",
        "template": "w1 w2 {{ completion }}",
        "max_tokens": 4,
        "extra_body": {"ignore_eos": True},
        "verdict": {"function": f"{folder}/verdicts.py:read"},
    }
    servers = {
        "grader": {"model": str(model), "local": {"args": ARGS}},
        "wise": {"base_urls": [f"http://127.0.0.1:{port}/v1"]},
    }
    rewards = {
        "grader": {"judge": judge, "timeout_s": 120.0},
        "wise": {"teacher": {"servers": "wise"}, "timeout_s": 120.0},
    }
    return ServiceRun(folder, make_config(run_id="test", reward={"rewards": rewards}, servers=servers))


def trajectories() -> list[Trajectory]:
    single = [make_trajectory(t, text=f"w{t}", completion_ids=COMPLETION + t) for t in range(8)]
    return [*single, make_session(8, 1, *SESSION)]


async def test_a_vllm_replica_judges_teaches_and_dies_with_its_keeper(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", seed=5, hidden_size=128, intermediate_size=256)  # heads of 32
    write_tokenizer(model, chat_template=CHAT_TEMPLATE)
    port = free_port()
    async with make_run(tmp_path, model, port) as run:
        # Not in this process: what is refused stays refused.
        words = ("--servers", "grader", "--port", str(port))
        run.start("reward.replica", "replica", arguments=words, within=WITHOUT_AMX)
        (url,) = await wait_until(lambda: read_replicas(run.broker, run.keys, "grader"), 400, "a replica")
        assert url == f"http://127.0.0.1:{port}/v1"
        run.start("reward", "worker")
        samples = trajectories()
        await append(run.broker, run.keys.trajectories(), *samples)
        await wait_until(lambda: num_scores(run, len(samples)), awaited="all scores")
        scores = {score.ticket: score for score in await scores_of(run)}
        assert {score.status for score in scores.values()} == {ScoreStatus.OK}, scores
        for trajectory in samples:
            score = scores[trajectory.ticket]
            assert score.teacher_logprobs is not None
            np.testing.assert_allclose(score.teacher_logprobs, by_hand(model, trajectory), atol=1e-4)
            detail = score.detail["grader"]
            assert score.value == len(detail["judgement"].split()) <= 4  # special tokens are not spelled
            if trajectory.ticket < 8:
                assert detail["judge_tokens"] == 7  # three of the prompt, four of the answer
        hinted = make_trajectory(9, completion_ids=COMPLETION, extra=EXTRA)
        async with httpx.AsyncClient() as http:
            for column, extra_ids in (("hint", [7, 8, 9]), ("chat", [2, 10])):
                seer = teacher_of(url, http, prompt_column=column)
                logprobs = await logprobs_of(seer, hinted)
                np.testing.assert_allclose(logprobs, by_hand(model, hinted, extra_ids), atol=1e-4)
                await seer._servers.close()
        family = psutil.Process(run.processes["replica"].pid).children(recursive=True)
        assert len(family) >= 3  # the server, its engine, the guard
        run.kill("replica")
        gone, alive = await asyncio.to_thread(psutil.wait_procs, family, 60)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE], gone
