"""Histories that clients send back, on the real templates of well-known models: what was sampled stays."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.unit.rollout.sessions.test_template_chat import ENDS, TOOLS, chat_of
from tidemill.common.wire.messages import SamplingParams
from tidemill.services.rollout.engines.engine import Generation
from tidemill.services.rollout.gateway.dialogue import Message, Question
from tidemill.services.rollout.gateway.session import GatewaySession, Limits

USER = {"role": "user", "content": "Guess."}
HIGHER = {"role": "user", "content": "Higher."}
THOUGHT = "<think>\nlow first\n</think>\n\n"


class Run:
    """A session with one model's format; the model says what it is given."""

    def __init__(self, name: str, *turns: str) -> None:
        self.chat, self.tokenizer = chat_of(name)
        self.turns = [self.chat.encode(turn) for turn in turns]
        self.seen: list[list[int]] = []
        self.session = GatewaySession(
            self.chat, self.decode, self.ask, SamplingParams(max_tokens=999), Limits(9, 0, 9999)
        )

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    async def ask(self, ids: Sequence[int], sampling: SamplingParams) -> Generation:
        whole = self.turns[len(self.seen)]
        turn = whole[: sampling.max_tokens]
        self.seen.append(list(ids))
        return Generation(turn, [-1.0] * len(turn), ((0, 0),), "stop" if turn == whole else "length")

    async def say(self, *messages: Message, tools: Any = ()) -> Message:
        answer = await self.session.answer(Question(messages, tuple(tools)))
        return {name: value for name, value in answer.message.items() if name != "reasoning_content"}

    def check(self, **counts: int) -> None:
        """The histories were these; where nothing was forked, the engine went on after what it had said."""
        assert self.session.counts == counts
        if counts == {"clean": counts.get("clean")}:
            for before, turn, after in zip(self.seen, self.turns, self.seen[1:], strict=False):
                assert after[: len(before) + len(turn)] == before + turn
        played = self.session.played(None, {})
        assert played.session is not None
        for segment in (played.first, *played.session.forks):
            trained = [i for turn in segment.turns for i in range(turn.first, turn.end)]
            assert segment.mask.nonzero()[0].tolist() == trained


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("thought", ["", THOUGHT])
async def test_a_question_after_an_answer_extends_it_also_where_templates_drop_thinking(
    name: str, thought: str
) -> None:
    if name == "qwen3_5_think":  # its template has opened the thought
        thought = "low first\n</think>\n\n"
    run = Run(name, f"{thought}50{ENDS[name][0]}", f"{thought}75{ENDS[name][0]}")
    first = await run.say(USER)
    assert first["content"] == "50"
    assert (await run.say(USER, first, HIGHER))["content"] == "75"
    run.check(clean=1)


@pytest.mark.parametrize(
    ("name", "call", "end"),
    [
        ("qwen3", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "<|im_end|>"),
        ("llama3_1", '{"name": "add", "parameters": {"a": 1}}', "<|eom_id|>"),
    ],
)
async def test_a_result_after_a_call_extends_it_whatever_ids_the_client_gives_it(
    name: str, call: str, end: str
) -> None:
    run = Run(name, call + end, f"7{ENDS[name][0]}")
    first = await run.say(USER, tools=TOOLS)
    first["tool_calls"][0]["id"] = "mine"
    told = {"role": "tool", "tool_call_id": "mine", "content": "7"}
    await run.say(USER, first, told, tools=TOOLS)
    run.check(clean=1)


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gemma3"])
async def test_an_answer_that_lost_its_end_is_realigned(name: str) -> None:
    run = Run(name, f"50, I think{ENDS[name][0]}", f"75{ENDS[name][0]}")
    await run.say(USER)
    await run.say(USER, {"role": "assistant", "content": "50"}, HIGHER)
    run.check(realigned=1)
    kept = run.session.histories.all[0].recorder.segment()
    assert run.decode(kept.completion_ids[kept.mask].tolist()) == "5075"


async def test_an_answer_that_lost_its_end_and_its_thinking_is_a_history_of_its_own() -> None:
    run = Run("qwen3", f"{THOUGHT}50, I think<|im_end|>", "75<|im_end|>")
    await run.say(USER)
    await run.say(USER, {"role": "assistant", "content": "50"}, HIGHER)
    run.check(forked=1)


async def test_other_tools_are_another_history_and_a_refused_chat_is_said_in_words() -> None:
    run = Run("qwen3", "50<|im_end|>", "75<|im_end|>")
    first = await run.say(USER)
    await run.say(USER, first, HIGHER, tools=TOOLS)
    run.check(forked=1)
    strict = Run("gemma3", "50<end_of_turn>")
    with pytest.raises(Exception, match="chat template refuses these messages"):
        await strict.say(USER, USER)


BUILD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
DELETE = "\n<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\nif STOP"


@pytest.mark.parametrize("more", [{"max_tokens": 100}, {"stop": ("STOP",)}])
async def test_a_call_that_a_limit_or_a_stop_has_cut_is_not_handed_out(more: dict[str, Any]) -> None:
    run = Run("qwen3", f"{BUILD}{DELETE} it exists<|im_end|>")
    answer = await run.session.answer(Question((USER,), tuple(TOOLS), **more))
    assert [call.arguments for call in answer.calls] == ['{"a": 1}']
    (turn,) = run.session.played(None, {}).first.turns
    assert (turn.num_calls, turn.num_wrong_calls) == (2, 1)


async def test_a_call_with_nan_is_text_for_the_client() -> None:
    run = Run("qwen3", BUILD.replace("1", "NaN") + "<|im_end|>")
    answer = await run.session.answer(Question((USER,), tuple(TOOLS)))
    assert answer.calls == () and "NaN" in answer.text
