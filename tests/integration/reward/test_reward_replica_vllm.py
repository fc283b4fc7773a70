"""One real vLLM server as a replica: it registers, it is asked through a judge, and leaves nothing behind.

It may not use AMX tiles, though the CPU may list them: judges that name no dtype work on such machines, too.
"""

import asyncio
import sys
from pathlib import Path

import psutil

from tests.support.models import tiny_model
from tests.support.runs import ServiceRun
from tests.support.trajectories import make_config, make_trajectory
from tests.support.vllm_machine import need_vllm
from tests.support.waiting import wait_until
from tidemill.common.run.replicas import ReplicaRegistry
from tidemill.common.streams import Entry, append, read_range
from tidemill.common.wire.messages import Score, ScoreStatus

need_vllm()


WITHOUT_AMX = (sys.executable, "-m", "tests.support.without_amx")
VERDICTS = "def read(words):\n    return {'score': float(len(words.split())), 'words': words}\n"


def make_run(folder: Path) -> ServiceRun:
    model = tiny_model(folder / "model", hidden_size=128, intermediate_size=256)  # vLLM wants heads of 32
    (folder / "verdicts.py").write_text(VERDICTS)
    judge = {
        "api": "completions",  # the tiny model's tokenizer has no chat template
        "template": "w1 w2 {{ completion }}",
        "max_tokens": 4,
        "extra_body": {"ignore_eos": True},
        "verdict": {"function": f"{folder}/verdicts.py:read"},
        "routing": {"health_interval_s": 0.5},
        "local_replicas": {"model": str(model), "args": ["--enforce-eager", "--max-num-seqs", "8"]},
    }
    reward = {"rewards": {"grader": {"judge": judge, "timeout_s": 120.0}}}
    return ServiceRun(folder, make_config(run_id="test", reward=reward))


async def test_a_vllm_replica_judges_and_dies_with_its_keeper(tmp_path: Path) -> None:
    async with make_run(tmp_path) as run:
        # Not in this process: what is refused stays refused.
        run.start("reward.replica", "replica", arguments=("--reward", "grader"), within=WITHOUT_AMX)
        run.start("reward", "worker")
        await append(
            run.broker, run.keys.trajectories(), *[make_trajectory(t, text=f"w{t}") for t in range(8)]
        )
        await wait_until(lambda: _has(run, 8), 400, "8 scores")
        scores = await _scores(run)
        assert {score.status for score in scores} == {ScoreStatus.OK}
        for score in scores:
            detail = score.detail["grader"]
            assert score.value == len(detail["judgement"].split()) <= 4  # special tokens are not spelled
            assert detail["judge_tokens"] == 7  # three of the prompt, four of the answer
        (url,) = await ReplicaRegistry(run.broker, run.keys, "grader", 10.0).urls()
        assert url.endswith("/v1")
        family = psutil.Process(run.processes["replica"].pid).children(recursive=True)
        assert len(family) >= 3  # the server, its engine, the guard
        run.kill("replica")
        gone, alive = await asyncio.to_thread(psutil.wait_procs, family, 60)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE], gone


async def _scores(run: ServiceRun) -> list[Score]:
    entries = await read_range(run.broker, run.keys.scores(), Score)
    return [entry.message for entry in entries if isinstance(entry, Entry)]


async def _has(run: ServiceRun, count: int) -> bool:
    return len(await _scores(run)) >= count
