"""Histories that clients send back, on the real templates of well-known models: what was sampled stays."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.unit.rollout.sessions.test_template_chat import ENDS, TOOLS, chat_of
from tidemill.common.config.environment import EnvironmentConfig
from tidemill.common.wire.messages import SamplingParams
from tidemill.services.rollout.engines.engine import Generation
from tidemill.services.rollout.gateway import dialogue, histories
from tidemill.services.rollout.gateway.dialogue import Identity, Message, Question, identity
from tidemill.services.rollout.gateway.session import GatewaySession
from tidemill.services.rollout.sessions.recorder import SegmentRecorder

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
            self.chat, self.decode, self.ask, SamplingParams(max_tokens=999), EnvironmentConfig(), 9999
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

    def kept(self, number: int = 0) -> str:
        """The text of what is trained in a history."""
        segment = self.session.histories.all[number].recorder.segment()
        return self.decode(segment.completion_ids[segment.mask].tolist())

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
async def test_a_question_after_an_answer_extends_it_also_where_templates_drop_thinking(name, thought):
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
async def test_a_result_after_a_call_extends_it_whatever_ids_the_client_gives_it(name, call, end):
    run = Run(name, call + end, f"7{ENDS[name][0]}")
    first = await run.say(USER, tools=TOOLS)
    first["tool_calls"][0]["id"] = "mine"
    result = {"role": "tool", "tool_call_id": "mine", "content": "7"}
    await run.say(USER, first, result, tools=TOOLS)
    run.check(clean=1)


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gemma3"])
@pytest.mark.parametrize("thought", ["", THOUGHT])
async def test_an_answer_that_lost_its_end_is_realigned(name: str, thought: str) -> None:
    run = Run(name, f"{thought}50, I think{ENDS[name][0]}", f"75{ENDS[name][0]}")
    await run.say(USER)
    await run.say(USER, {"role": "assistant", "content": "50, I t"}, HIGHER)
    run.check(realigned=1)
    assert run.kept() == f"{thought}50, I t75"


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gemma3"])
@pytest.mark.parametrize("thought", ["", THOUGHT])
async def test_where_a_client_only_appends_all_that_was_sampled_stays(name: str, thought: str) -> None:
    end = ENDS[name][0]
    run = Run(name, f"{thought}Code: add(1)\nSTOP and so on{end}", f"75{end}")
    await run.session.answer(Question((USER,), stop=("STOP",)))
    answer = {"role": "assistant", "content": "Code: add(1)\n</code>"}
    await run.say(USER, answer, HIGHER)
    run.check(realigned=1)
    assert run.kept() == f"{thought}Code: add(1)\n75"
    whole = run.tokenizer.decode(run.session.histories.all[0].recorder.completion_ids)
    assert whole.startswith(f"{thought}Code: add(1)\n</code>{end}") and "Higher." in whole


@pytest.mark.parametrize(
    ("answers", "number"),
    [
        (["It is, I think, the one", "It is, I think, the other"], 1),
        (["It is, I think, the other", "It is, I think, the one"], 0),
        (["It is, I think, the other", "It is, I think, the other"], 1),  # of equal ones the newest
    ],
)
async def test_of_several_answers_to_one_question_the_one_with_the_longest_common_start_goes_on(
    answers: list[str], number: int
) -> None:
    run = Run("qwen3", *(f"{answer}<|im_end|>" for answer in [*answers, "75"]))
    for _ in range(2):
        await run.session.answer(Question((USER,)), is_retry=False)
    await run.say(USER, {"role": "assistant", "content": "It is, I think, the other!"}, HIGHER)
    assert run.session.counts == {"forked": 1, "realigned": 1}
    assert [len(history.recorder.turns) for history in run.session.histories.all] == [
        1 + (number == 0),
        1 + (number == 1),
    ]
    assert run.kept(number) == "It is, I think, the other75"


async def test_an_answer_of_which_the_client_has_no_token_is_forked_however_much_was_thought() -> None:
    run = Run("qwen3", f"{THOUGHT}50<|im_end|>", "80<|im_end|>")
    await run.say(USER)
    await run.say(USER, {"role": "assistant", "content": "75"}, HIGHER)
    run.check(forked=1)
    assert run.kept() == f"{THOUGHT}50"


async def test_what_a_client_appends_to_an_answer_that_had_ended_comes_before_its_end() -> None:
    run = Run("qwen3", "50<|im_end|>", "80<|im_end|>")
    await run.say(USER)
    await run.say(USER, {"role": "assistant", "content": "50 or 51"}, HIGHER)
    run.check(realigned=1)
    whole = run.tokenizer.decode(run.session.histories.all[0].recorder.completion_ids)
    assert whole.startswith("50 or 51<|im_end|>")


async def test_a_branch_from_one_answer_leaves_another_that_is_like_it_untouched() -> None:
    end = "<|im_end|>"
    run = Run("qwen3", f"It may be 50{end}", f"It may be 75{end}", *[f"80{end}"] * 2)
    first = (await run.session.answer(Question((USER,)), is_retry=False)).message
    second = (await run.session.answer(Question((USER,)), is_retry=False)).message
    await run.say(USER, second, HIGHER)
    await run.say(USER, second, {"role": "user", "content": "Lower."})
    assert run.session.counts == {"forked": 2, "clean": 1}
    assert run.kept() == first["content"]


async def test_a_branch_is_seen_also_where_a_history_before_it_is_removed_meanwhile() -> None:
    # A long question is looked up on a thread, while the loop removes the history of a turn that has failed.
    end = "<|im_end|>"
    run = Run("qwen3", f"It may be 50{end}", f"It may be 75{end}", f"80{end}")
    await run.session.answer(Question((USER,)), is_retry=False)
    second = (await run.session.answer(Question((USER,)), is_retry=False)).message
    await run.say(USER, second, HIGHER)
    of_session = run.session.histories

    class RemovedWhenRead(list[Identity]):
        def __iter__(self) -> Iterator[Identity]:
            if failed in of_session.all:
                of_session.all.remove(failed)
            return super().__iter__()

    failed = histories.RecordedHistory(SegmentRecorder([1]), identities=RemovedWhenRead(), is_busy=True)
    of_session.all.insert(1, failed)
    question = Question((USER, second, {"role": "user", "content": "Lower."}))
    assert of_session.find(question).kind == "forked"
    assert failed not in of_session.all


@pytest.mark.parametrize(
    ("said", "theirs"),
    [
        # A parser has made the answer of what was sampled; little is shared.
        ("It may be <|im_start|>fifty, or so I think", "It may be <|im_start|>fifty, or so I say"),
        ("Thirty-one is what I would say here.", "That is too much."),
    ],
)
async def test_an_answer_that_is_not_the_clients_is_kept_whole_and_forked(said: str, theirs: str) -> None:
    run = Run("qwen3", f"{said}<|im_end|>", "75<|im_end|>")
    await run.say(USER, tools=TOOLS)
    await run.say(USER, {"role": "assistant", "content": theirs}, HIGHER, tools=TOOLS)
    run.check(forked=1)
    assert run.kept() == run.decode(run.turns[0])


@pytest.mark.parametrize("name", ["qwen3", "llama3_1"])
async def test_an_answer_that_the_client_begins_goes_on_in_any_turn(name: str) -> None:
    end = ENDS[name][0]
    run = Run(name, f"50{end}", f"5{end}", f"80{end}")
    history = [USER, await run.say(USER), HIGHER]
    prefill = {"role": "assistant", "content": "It is 7"}
    assert (await run.say(*history, prefill))["content"] == "5"
    assert run.tokenizer.decode(run.seen[1]).endswith("It is 7")
    await run.say(*history, {"role": "assistant", "content": "It is 75"}, HIGHER)
    run.check(clean=2)


async def test_an_answer_that_was_cut_goes_on_where_it_ended() -> None:
    run = Run("qwen3", "seventy-five<|im_end|>", "-five<|im_end|>")
    first = (await run.session.answer(Question((USER,), max_tokens=7))).message
    await run.session.answer(Question((USER, first)))
    assert run.seen[1][-7:] == run.chat.encode("seventy")
    run.check(realigned=1)


async def test_the_beginning_of_the_first_answer_is_a_part_of_the_prompt() -> None:
    run = Run("qwen3", "5<|im_end|>", "80<|im_end|>")
    await run.say(USER, {"role": "assistant", "content": "It is 7"})
    await run.say(USER, {"role": "assistant", "content": "It is 75"}, HIGHER)
    run.check(clean=1)
    session = run.session.played(None, {}).session
    assert session is not None and [m["content"] for m in session.messages] == ["5", "Higher.", "80"]


async def test_a_list_of_tools_that_shrinks_or_changes_its_order_is_read_already() -> None:
    subtract: Any = copy.deepcopy(TOOLS[0])
    subtract["function"]["name"] = "sub"
    run = Run("qwen3", *(f"{n}<|im_end|>" for n in range(4)))
    history: list[Message] = [USER]
    for tools in ([*TOOLS, subtract], [subtract, *TOOLS], TOOLS, [*TOOLS, subtract]):
        history += [await run.say(*history, tools=tools), HIGHER]
    run.check(clean=3)


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
    assert [call["function"]["arguments"] for call in answer.calls] == ['{"a": 1}']
    (turn,) = run.session.played(None, {}).first.turns
    assert (turn.num_calls, turn.num_wrong_calls) == (2, 1)


async def test_a_call_with_nan_is_text_for_the_client() -> None:
    run = Run("qwen3", BUILD.replace("1", "NaN") + "<|im_end|>")
    answer = await run.session.answer(Question((USER,), tuple(TOOLS)))
    assert answer.calls == [] and "NaN" in answer.text


async def test_each_message_of_a_request_is_compared_by_what_is_computed_once(monkeypatch):
    computed = []

    def counted(message: Message) -> Any:
        computed.append(message)
        return identity(message)

    for module in (dialogue, histories):
        monkeypatch.setattr(module, "identity", counted)
    run = Run("qwen3", "7<|im_end|>", "8<|im_end|>")
    first = await run.say(USER)
    await run.say(USER, first, HIGHER)
    assert len(computed) == (1 + 1) + (3 + 1)
