"""A real vLLM server as a teacher: prompt logprobs are those of a plain forward pass, segment by segment."""

from pathlib import Path

import httpx
import numpy as np

from tests.integration.reward.test_teacher import by_hand, logprobs_of, num_scores, scores_of, teacher_of
from tests.support.models import tiny_model, write_tokenizer
from tests.support.reward_models import CHAT_TEMPLATE
from tests.support.runs import ServiceRun
from tests.support.sessions import make_segment, make_session
from tests.support.trajectories import make_config, make_trajectory
from tests.support.vllm_machine import need_vllm
from tests.support.waiting import wait_until
from tidemill.common.run.replicas import ReplicaRegistry
from tidemill.common.streams import append
from tidemill.common.wire.messages import ScoreStatus

need_vllm()

SESSION = (make_segment((3, 4), (6,), (8, 9), (11, 12)), make_segment((14, 15, 16), (17, 18), (19,)))
EXTRA = {"hint": "w4 w5 w6", "chat": [{"role": "user", "content": "w7"}]}


async def test_a_vllm_teacher_gives_exact_logprobs_with_and_without_a_prompt_of_its_own(
    tmp_path: Path,
) -> None:
    model = tiny_model(tmp_path / "model", seed=5, hidden_size=128, intermediate_size=256)  # heads of 32
    write_tokenizer(model, chat_template=CHAT_TEMPLATE)
    args = ["--enforce-eager", "--dtype", "float32", "--max-num-seqs", "8", "--max-model-len", "64"]
    teacher = {"local_replicas": {"model": str(model), "args": args}}
    reward = {"rewards": {"wise": {"teacher": teacher, "timeout_s": 120.0}}}
    completion = np.array([5, 6, 7], np.int32)
    single = make_trajectory(0, completion_ids=completion)
    async with ServiceRun(tmp_path, make_config(run_id="test", reward=reward)) as run:
        run.start("reward.replica", "replica", arguments=("--reward", "wise"))
        run.start("reward", "worker")
        await append(run.broker, run.keys.trajectories(), single, make_session(1, 1, *SESSION))
        await wait_until(lambda: num_scores(run, 2), 400, "2 scores")
        scores = {score.ticket: score for score in await scores_of(run)}
        assert {score.status for score in scores.values()} == {ScoreStatus.OK}, scores
        for trajectory in (single, make_session(1, 1, *SESSION)):
            found = scores[trajectory.ticket].teacher_logprobs
            assert found is not None
            np.testing.assert_allclose(found, by_hand(model, trajectory), atol=1e-4)
        (url,) = await ReplicaRegistry(run.broker, run.keys, "wise", 10.0).urls()
        hinted = make_trajectory(2, completion_ids=completion, extra=EXTRA)
        async with httpx.AsyncClient() as http:
            for column, own in (("hint", [7, 8, 9]), ("chat", [2, 10])):
                seer = teacher_of(url, http, prompt_column=column)
                found = await logprobs_of(seer, hinted)
                np.testing.assert_allclose(found, by_hand(model, hinted, own), atol=1e-4)
                await seer.close()
