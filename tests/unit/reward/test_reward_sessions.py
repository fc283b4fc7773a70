"""Rewards of whole sessions: the environment's own, and what functions, judges and models are given."""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.rewards import together
from tests.support.sessions import MESSAGES, make_segment, make_session
from tests.support.trajectories import make_config, make_trajectory
from tidemill.common.config import NamedRewardConfig
from tidemill.common.config.reward_kinds import JudgeConfig, RewardModelConfig
from tidemill.common.errors import ConfigError
from tidemill.common.process.children import content_of, frame_of
from tidemill.common.wire.messages import Lane, Score, ScoreStatus
from tidemill.services.reward.functions.request import Request, run_through
from tidemill.services.reward.functions.reward_function import load_function
from tidemill.services.reward.outcome import AttemptError
from tidemill.services.reward.remote.judge import JudgePrompt
from tidemill.services.reward.remote.reward_model import make_body, reduce_scores
from tidemill.services.reward.rewards.reward import EnvironmentReward
from tidemill.services.reward.sample import RewardSample
from tidemill.services.reward.worker import Scorer

CHAT = [{"role": "user", "content": "1+1?"}]


def sample_of(*segments: Any, **fields: Any) -> RewardSample:
    trajectory = make_session(3, 1, *segments, **({"extra": {"prompt": CHAT}} | fields))
    return RewardSample(trajectory, Lane.TRAIN)


async def score(weight: float = 1.0, **fields: Any) -> Score:
    config = make_config(
        rollout={"environment": {"use": "e.py:E"}}, reward={"rewards": {"game": {"environment": True}}}
    )
    rewards = together(
        {"game": (EnvironmentReward(), {"function": None, "environment": True, "weight": weight})}
    )
    return await Scorer(rewards, config.reward, "w1", 0).score(make_session(**fields), Lane.TRAIN)


async def test_the_environments_reward_is_a_reward_with_weight_and_components() -> None:
    result = await score(2.0, reward=0.5, metrics={"won": 1.0, "lost": math.nan, "num_turns": 99.0})
    assert (result.status, result.value) == (ScoreStatus.OK, 1.0)
    assert result.components == {"game": 0.5, "game/won": 1.0, "game/num_turns": 2.0}


async def test_without_a_reward_of_the_session_those_of_its_turns_are_summed() -> None:
    reward = EnvironmentReward()
    turns = make_segment((1,), (2,), (3,), (4,), (5,), (6,), rewards=(0.25, None, 0.5))
    assert (await reward.score(sample_of(turns))).value == 0.75
    assert (await reward.score(sample_of(turns, reward=0.0))).value == 0.0


async def test_a_session_without_a_reward_is_a_failed_score_that_says_so() -> None:
    result = await score()
    assert (result.status, result.value, result.attempts) == (ScoreStatus.FAILED, None, 1)
    assert "gave no reward" in result.error and "tools" in result.error
    assert (await score(end="timeout")).status is ScoreStatus.TIMEOUT
    single = RewardSample(make_trajectory(), Lane.TRAIN)
    with pytest.raises(AttemptError, match="no session"):
        await EnvironmentReward().score(single)
    with pytest.raises(AttemptError, match="finite"):
        await EnvironmentReward().score(sample_of(reward=math.inf))


def test_a_run_of_single_turns_cannot_name_the_environments_reward() -> None:
    with pytest.raises(ConfigError, match=r"reward.rewards.game.*single_turn"):
        make_config(reward={"rewards": {"game": {"environment": True}}})
    with pytest.raises(ValueError, match="exactly one of"):
        NamedRewardConfig(function="gsm8k", environment=True)


def test_the_conversation_is_what_was_said_and_continues_a_begun_answer() -> None:
    assert sample_of().conversation == [*CHAT, *MESSAGES]
    begun = [*CHAT, {"role": "assistant", "content": "Well, "}]
    said = ({"role": "assistant", "content": "2."}, {"role": "user", "content": "Sure?"})
    continued = sample_of(extra={"prompt": begun}, messages=said).conversation
    assert continued == [*CHAT, {"role": "assistant", "content": "Well, 2."}, said[1]]


def test_functions_get_the_session_as_verl_and_trl_hand_it_over(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text(
        "def verl(solution_str, extra_info):\n"
        "    roles = [message['role'] for message in extra_info['messages']]\n"
        "    return {'score': extra_info['num_turns'], 'sum': sum(extra_info['turn_scores']), "
        "'tools': roles.count('tool')}\n"
        "def trl(completions, completion_ids):\n"
        "    return [len(each) + len(ids) / 10 for each, ids in zip(completions, completion_ids)]\n"
    )
    sample = sample_of(make_segment((1,), (2,), (3, 3), (4,), rewards=(1.0, 2.0)))
    (verl,) = run_through(load_function(f"{path}:verl", {}, "auto").call(Request([sample])))
    assert (verl.value, verl.components) == (2.0, {"sum": 3.0, "tools": 1.0})
    (trl,) = run_through(load_function(f"{path}:trl", {}, "auto").call(Request([sample])))
    assert trl.value == 3 + 4 / 10


def test_a_single_turn_is_handed_over_as_ever() -> None:
    single = RewardSample(make_trajectory(extra={"prompt": CHAT}), Lane.TRAIN)
    assert single.fields()["extra_info"] == {"prompt": CHAT, "is_evaluation": False}
    assert single.conversation == [*CHAT, {"role": "assistant", "content": "#### 1"}]


def test_judges_and_reward_models_read_the_conversation_and_score_the_models_tokens() -> None:
    sample = sample_of()
    template = "{% for m in conversation %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    text = JudgePrompt("j", JudgeConfig(servers="s", template=template)).messages(sample)[-1]["content"]
    assert "tool: 2" in text and "assistant: It is 2." in text
    config = RewardModelConfig(servers="s", head="token", input="ids", token_reward="sum")
    assert make_body(sample, config)["input"] == [1, 2, 3, 4, 5, 7, 8, 9]
    assert reduce_scores([[float(position)] for position in range(8)], sample, config) == 3 + 4 + 7
    chat = RewardModelConfig(servers="s")
    assert make_body(sample, chat)["messages"] == [*CHAT, *MESSAGES]


def test_a_rewritten_history_is_scored_by_its_last_segment() -> None:
    sample = sample_of(make_segment((1,), (2,)), make_segment((1, 5), (6, 7), (8,)))
    assert [list(ids) for ids in (sample.last.prompt_ids, sample.last.completion_ids)] == [[1, 5], [6, 7, 8]]
    assert sample.last.loss_mask.tolist() == [True, True, False]


def test_a_session_reaches_scoring_processes_whole() -> None:
    sample = sample_of(reward=0.5)
    (body,) = [frame_of(Request([sample]).to_wire())[4:]]
    (received,) = Request.from_wire(content_of(body)).samples
    for name in ("key", "lane", "prompt", "chat", "said", "conversation", "turn_rewards", "of_thought"):
        assert getattr(received, name) == getattr(sample, name), name
    assert received.fields() == sample.fields()
    assert list(received.last.completion_ids) == sample.last.completion_ids.tolist() != []
