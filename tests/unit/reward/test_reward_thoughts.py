"""Thoughts that a run parts from answers, as each kind of reward gets them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.trajectories import make_trajectory
from tidemill.common.config.reward_kinds import JudgeConfig, RewardModelConfig, VerdictConfig
from tidemill.common.process.children import content_of, frame_of
from tidemill.common.wire import codec
from tidemill.common.wire.messages import Trajectory
from tidemill.services.console.serve.samples import SampleIn, trajectory_of
from tidemill.services.reward.functions.request import Request
from tidemill.services.reward.functions.reward_function import load_function
from tidemill.services.reward.outcome import RewardOutcome
from tidemill.services.reward.remote.judge import JudgePrompt, Verdict
from tidemill.services.reward.remote.reward_model import make_body
from tidemill.services.reward.rewards.cache import _digest
from tidemill.services.reward.sample import RewardSample

CHAT = [{"role": "user", "content": "2+2?"}]
FUNCTIONS = """
def verl(solution_str, extra_info):
    return {"score": len(solution_str), "thought": len(extra_info.get("thought", "absent"))}

def batch(solution_strs, extra_infos):
    thoughts = [info.get("thought", "absent") for info in extra_infos]
    return [{"score": len(s), "thought": len(t)} for s, t in zip(solution_strs, thoughts)]

def trl(completions, log_extra, thought=("absent",)):
    log_extra("thought", [len(each) for each in thought])
    return [len(each if isinstance(each, str) else each[0]["content"]) for each in completions]

def rubric(completion, info):
    said = completion if isinstance(completion, str) else completion[0]["content"]
    return {"score": len(said), "thought": len(info.get("thought", "absent"))}
"""


def sample_of(thought: str | None = "2 and 2", text: str = "4", **fields: Any) -> RewardSample:
    return RewardSample(make_trajectory(text=text, thought=thought, **fields))


def only(outcomes: list[RewardOutcome]) -> RewardOutcome:
    (outcome,) = outcomes
    return outcome


@pytest.mark.parametrize("extra", [{}, {"prompt": CHAT}, {"thought": "a column"}])
@pytest.mark.parametrize("name", ["verl", "batch", "trl", "rubric"])
async def test_functions_of_every_style_get_the_answer_and_by_name_the_thought(tmp_path, name, extra):
    path = tmp_path / "rewards.py"
    path.write_text(FUNCTIONS)
    function = load_function(f"{path}:{name}", {})
    parted = only(await function.call(Request([sample_of(extra=extra)])))
    assert (parted.value, parted.components["thought"]) == (1.0, len("2 and 2"))
    empty = only(await function.call(Request([sample_of("", extra=extra)])))
    assert empty.components["thought"] == 0.0
    whole = only(await function.call(Request([sample_of(None, "2 and 24")])))
    assert (whole.value, whole.components["thought"]) == (8.0, len("absent"))


def test_messages_have_the_thought_as_chat_templates_expect_it():
    sample = sample_of(extra={"prompt": CHAT})
    answer = {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}
    assert sample.conversation == [*CHAT, answer]
    assert make_body(sample, RewardModelConfig(servers="s"))["messages"] == [*CHAT, answer]
    assert sample_of("").said == [{"role": "assistant", "content": "4"}]


def test_judges_read_both_by_name_and_a_verdict_within_the_thought_is_a_quotation():
    template = "thought {{ thought }}, answer {{ completion }}"
    prompt = JudgePrompt("j", JudgeConfig(servers="s", template=template))
    assert prompt.messages(sample_of())[-1]["content"] == "thought 2 and 2, answer 4"
    assert prompt.messages(sample_of(None))[-1]["content"] == "thought , answer 4"


async def test_a_verdict_that_stands_in_the_thought_does_not_count():
    verdict = Verdict("j", VerdictConfig(regex=r"Score: *(\d+)"))
    arguments = {"words": "Score: 2. It says 'Score: 10'", "nonce": "", "is_cut": False}
    request = Request([sample_of("I say Score: 10")], arguments=arguments)
    assert only(await verdict.call(request)).value == 2.0


def test_the_cache_tells_thoughts_apart():
    digests = {_digest("v", sample_of(thought)) for thought in (None, "", "a", "b")}
    assert len(digests) == 4


def test_scoring_processes_and_the_wire_keep_the_thought():
    for sample in map(sample_of, (None, "", "a thought")):
        assert codec.decode(codec.encode(sample.trajectory), Trajectory) == sample.trajectory
        (received,) = Request.from_wire(content_of(frame_of(Request([sample]).to_wire())[4:])).samples
        assert received.of_thought == sample.of_thought
        assert (received.fields(), received.said) == (sample.fields(), sample.said)
    assert b"thought" not in codec.encode(sample_of(None).trajectory)[b"p"], "runs without it write no more"


def test_another_trainers_messages_bring_their_reasoning(tmp_path: Path):
    said = [{"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}]
    body = json.loads(json.dumps({"prompt": CHAT, "completion": said}))
    trajectory = trajectory_of(SampleIn.model_validate(body), 0, 0, 1)
    assert (trajectory.text, trajectory.thought) == ("4", "2 and 2")
    body["completion"] = [{"role": "assistant", "content": "4"}]
    assert trajectory_of(SampleIn.model_validate(body), 0, 0, 1).thought is None
