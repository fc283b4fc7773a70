"""Sessions behind the gateway whose questions overlap: what is answered, and what they come to."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.models import run_config
from tests.support.scripted_model import END, ByteChat, call_line
from tidemill.common.config.environment import EnvironmentConfig
from tidemill.common.wire.messages import Lane, SamplingParams, Trajectory
from tidemill.common.wire.segments import Session
from tidemill.services.reward.sample import RewardSample
from tidemill.services.rollout.engines.engine import Generation
from tidemill.services.rollout.environments.agent import AgentPlayer
from tidemill.services.rollout.environments.environment import Closing
from tidemill.services.rollout.gateway.apis import anthropic_question
from tidemill.services.rollout.gateway.dialogue import (
    SESSION_LIMIT,
    Answer,
    Message,
    Question,
    RequestError,
    tool_of,
)
from tidemill.services.rollout.gateway.pace import EnginePace
from tidemill.services.rollout.gateway.server import Gateway
from tidemill.services.rollout.gateway.session import LONG_CHARACTERS, GatewaySession
from tidemill.services.trainer.groups.sample import make_sample

CHAT = ByteChat()
USER = {"role": "user", "content": "go"}
ON = {"role": "user", "content": "on"}
SUB = [{"role": "system", "content": "sub"}, USER]


class Asked:
    """What the engine was asked and has not answered yet."""

    def __init__(self, ids: Sequence[int], sampling: SamplingParams) -> None:
        self.prompt = CHAT.decode(ids)
        self.max_tokens = sampling.max_tokens
        self.answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()

    def say(self, text: str) -> None:
        """The engine answers; a text that is too long is cut."""
        ids = [*text.encode(), END]
        cut = ids[: self.max_tokens]
        self.answer.set_result(
            Generation(cut, [-0.5] * len(cut), ((0, 0),), "stop" if cut == ids else "length")
        )


class Run:
    """A session whose engine answers when the test says so."""

    def __init__(self, max_model_len: int = 4096, turn_tokens: int = 2000, **limits: Any) -> None:
        self.asked: list[Asked] = []
        self.pace = EnginePace()
        self.session = GatewaySession(
            CHAT,
            CHAT.decode,
            self._ask,
            SamplingParams(max_tokens=turn_tokens),
            EnvironmentConfig.model_validate({"max_turns": 999} | limits),
            max_model_len,
            pace=self.pace,
        )

    async def _ask(self, ids: Sequence[int], sampling: SamplingParams) -> Generation:
        self.asked.append(Asked(ids, sampling))
        return await self.asked[-1].answer

    async def begin(
        self, *messages: Message, is_retry: bool | None = None, **more: Any
    ) -> asyncio.Task[Answer]:
        """Ask, and go on as far as the engine lets it."""
        asking = asyncio.create_task(self.session.answer(Question(messages, **more), is_retry))
        for _ in range(5):
            await asyncio.sleep(0)
        return asking

    async def turn(self, text: str, *messages: Message, **more: Any) -> Message:
        """A whole turn, in which the model says this."""
        asking = await self.begin(*messages, **more)
        self.asked[-1].say(text)
        return (await asking).message

    @property
    def trajectory(self) -> Trajectory:
        """What the session comes to."""
        fields = self.session.played(None, {}).fields()
        return Trajectory(ticket=1, index=0, step=1, group_size=1, **fields)

    @property
    def came_to(self) -> Session:
        session = self.session.played(None, {}).session
        assert session is not None
        return session


async def test_the_answer_that_was_given_last_is_the_sessions_also_where_a_sub_agent_began_later() -> None:
    run = Run()
    planned = await run.turn("plan", USER)
    await run.turn("sub answer is 7", *SUB)
    await run.turn("FINAL 42", USER, planned, ON)
    trajectory = run.trajectory
    assert trajectory.text.endswith("FINAL 42")
    assert [CHAT.decode(s.completion_ids.tolist())[-8:] for s in trajectory.segments][-1] == "FINAL 42"
    sample = RewardSample(trajectory, Lane.TRAIN)
    assert sample.trajectory.text == trajectory.text
    assert sample.last.completion_ids.tolist()[-9:] == [*b"FINAL 42", END]
    said = [message["content"] for message in run.came_to.messages]
    assert said[-1] == "FINAL 42" and said.count("go") == 1  # the sub-agent's prompt, not the session's
    # What a discounted return or an estimate of the value begins from: the last trained token.
    assert make_sample(trajectory).completion_ids.tolist()[-9:] == [*b"FINAL 42", END]


@pytest.mark.parametrize(
    ("answers", "end"), [(("it is cut off", "ok"), "done"), (("ok", "it is cut off"), "max_tokens")]
)
async def test_a_session_is_truncated_where_its_last_answer_is(answers: tuple[str, str], end: str) -> None:
    run = Run(turn_tokens=6)
    main = await run.begin(USER)
    sub = await run.begin(*SUB)
    for asked, text in zip(run.asked, answers, strict=True):
        asked.say(text)
        await asyncio.sleep(0)
    await asyncio.gather(main, sub)
    assert (run.came_to.end, run.trajectory.finish) == (end, "stop" if end == "done" else "length")


@pytest.mark.parametrize(("max_tokens", "finish"), [(3, "stop"), (6, "length"), (None, "length")])
async def test_a_turn_is_cut_where_a_limit_of_the_run_has_done_it(max_tokens, finish):
    run = Run(turn_tokens=6)
    await run.turn("it is cut off", USER, max_tokens=max_tokens)
    (turn,) = run.came_to.turns
    assert (str(turn.finish), str(run.trajectory.finish)) == (finish, finish)


async def test_a_refused_limit_stays_while_answers_that_were_asked_for_before_arrive() -> None:
    run = Run(max_turns=1)
    asking = await run.begin(USER)
    with pytest.raises(RequestError):
        await run.session.answer(Question((*SUB,)))
    run.asked[0].say("ok")
    await asking
    assert run.came_to.end == "max_turns"


async def test_answers_alike_whose_beginning_the_client_wrote_are_said_once() -> None:
    run = Run(repeated_requests="sample")
    begun = {"role": "assistant", "content": "It is "}
    first = await run.begin(USER, begun, is_retry=False)
    second = await run.begin(USER, begun, is_retry=False)
    for number, asking in ((1, second), (0, first)):  # the session's first answer comes last
        run.asked[number].say("7")
        await asking
    assert len(run.trajectory.segments) == 2
    assert run.came_to.messages[-1]["content"] == "It is 7"


async def test_a_session_that_ran_out_of_time_is_truncated_whatever_turn_still_ends() -> None:
    run = Run(turn_tokens=6)
    environment = {"use": "agent", "agent": "a.py:run", "session_timeout_s": 0.001}
    player = AgentPlayer(run_config("m", rollout={"environment": environment}), CHAT.decode, lambda: CHAT)
    program: asyncio.Future[Closing] = asyncio.get_running_loop().create_future()
    await run.turn("it is cut off", USER)
    asking = await run.begin(*SUB)
    await player._watched(program, run.session)  # type: ignore[arg-type]
    run.asked[-1].say("ok")
    await asking
    assert (run.came_to.end, run.trajectory.finish) == ("max_tokens", "length")


async def test_a_session_that_goes_on_after_a_limit_is_not_truncated() -> None:
    run = Run(max_model_len=80)
    first = await run.turn("ok", USER)
    with pytest.raises(RequestError):
        await run.session.answer(Question((USER, first, {"role": "user", "content": "x" * 80})))
    ends = [run.came_to.end]
    await run.turn("short", ON)
    assert [*ends, run.came_to.end] == ["max_tokens", "done"]


async def test_parallel_samples_of_one_prompt_are_answers_of_their_own() -> None:
    run = Run(repeated_requests="sample")
    asking = [await run.begin(USER, is_retry=False) for _ in range(4)]
    for number, asked in enumerate(run.asked):
        asked.say(f"answer {number}")
    answers = await asyncio.gather(*asking)
    assert {answer.text for answer in answers} == {f"answer {number}" for number in range(4)}
    # Each of their retries gets another one of these.
    again = [await run.session.answer(Question((USER,)), True) for _ in range(4)]
    assert {answer.text for answer in again} == {answer.text for answer in answers}


async def test_a_question_within_other_limits_or_for_another_tool_is_another_question() -> None:
    run = Run()
    assert (await run.turn("cut", USER, max_tokens=3))["content"] == "cut"
    assert (await run.turn("whole", USER, max_tokens=9))["content"] == "whole"
    limits: list[dict[str, Any]] = [{}, {"max_tokens": 3}, {"stop": ("x",)}, {"has_logprobs": True}]
    assert len({Question((USER,), **more).key for more in limits}) == len(limits)
    choices = ["auto", "none", "required", *({"type": "tool", "name": name} for name in ("add", "find"))]
    asked = [anthropic_question({"messages": [USER], "tool_choice": choice}) for choice in choices]
    assert len({question.key for question in asked}) == len(choices)
    assert anthropic_question({"messages": [USER]}).key == asked[0].key


async def test_of_several_stop_sequences_the_one_that_comes_first_in_the_text_ends_it() -> None:
    run = Run()
    asking = await run.begin(USER, stop=("never", "End", "Obs"))
    run.asked[-1].say("so 2 Obs: lies End")
    answer = await asking
    assert (answer.text, answer.finish, answer.stop_sequence) == ("so 2 ", "stop", "Obs")


def test_a_question_with_other_tools_messages_or_prompt_is_another_question_within_whatever_limits():
    add = tool_of("add", "", {})
    find = tool_of("find", "", {})
    questions = [
        Question((USER,)),
        Question((USER,), (add,)),
        Question((USER,), (add, find)),
        Question((USER, ON)),
        Question((), prompt="go"),
        Question((), prompt="on"),
    ]
    assert len({question.request_key for question in questions}) == len(questions)
    assert len({question.key for question in questions}) == len(questions)
    assert Question((USER,), (find, add)).request_key == Question((USER,), (add, find)).request_key


async def test_counting_what_is_too_long_is_refused_and_ends_nothing() -> None:
    run = Run(max_model_len=50)
    await run.turn("fine", USER)
    with pytest.raises(RequestError):
        await run.session.count_tokens(Question((USER,) * 51))
    assert run.session.too_long("51 messages", is_asked=False).code == SESSION_LIMIT
    assert run.came_to.end == "done"
    with pytest.raises(RequestError):
        await run.session.answer(Question((USER,) * 51))
    assert run.came_to.end == "max_tokens"


async def test_calls_in_parallel_wait_for_tokens_that_others_may_leave() -> None:
    run = Run(max_tokens=2048, repeated_requests="sample")
    asking = [await run.begin(USER, is_retry=False) for _ in range(3)]
    for number in range(3):
        run.asked[number].say("fine.")
        await asking[number]
        await asyncio.sleep(0.0)
    assert [answer.result().text for answer in asking] == ["fine."] * 3
    assert sum(len(s.completion_ids) for s in run.trajectory.segments) == 18
    used_up = Run(max_tokens=3)
    await used_up.turn("four", USER)
    with pytest.raises(RequestError):  # nothing runs that could leave it a token
        await used_up.session.answer(Question((*SUB,)))


@pytest.mark.parametrize("refused", [False, True])
async def test_a_turn_that_has_ended_reserves_nothing_whatever_came_between_the_turns(refused: bool) -> None:
    run = Run(max_tokens=200, turn_tokens=150)
    history: list[Message] = [USER]
    for text in ("one", "two", "three"):
        history += [await run.turn(text, *history), ON]
    if refused:
        asking = await run.begin(*history)
        run.asked[-1].answer.set_exception(ValueError("too long"))
        with pytest.raises(RequestError):
            await asking
    (segment,) = run.trajectory.segments
    context = CHAT.extend([], True, [ON])
    used = len(segment.completion_ids) + len(context)
    # Fewer than a turn may have: what is left is asked for, and no turn is waited for.
    await run.begin(*history)
    assert run.asked[-1].max_tokens == 200 - used < 150


async def test_what_turns_that_run_have_reserved_counts_with_what_came_between() -> None:
    run = Run(max_tokens=100, turn_tokens=40)
    history: list[Message] = [USER, await run.turn("one", USER), ON]
    await run.begin(*history)
    waiting = await run.begin(*SUB, max_tokens=60)
    assert (len(run.asked), waiting.done()) == (2, False), "4 said, 20 between, 40 to say"
    run.asked[-1].say("two")
    for _ in range(5):
        await asyncio.sleep(0)
    assert run.asked[-1].max_tokens == 40 and run.asked[-1].prompt.startswith("system\nsub")


async def test_the_key_of_a_session_cannot_be_guessed_from_any_address() -> None:
    """Programs log the addresses at which they ask; the key is in no address."""
    sessions = [Run().session for _ in range(3)]
    gateway = Gateway("m")
    with contextlib.ExitStack() as served:
        addresses = [served.enter_context(gateway.serving(session)) for session in sessions]
    keys = [gateway.placeholder_key, *(session.key for session in sessions)]
    assert len({*keys, *(session.token for session in sessions)}) == 7
    assert not [key for key in keys for address in addresses if key in address]
    assert all(session.token in address for session, address in zip(sessions, addresses, strict=True))


async def test_a_program_that_changes_its_system_prompt_every_turn_reaches_a_limit() -> None:
    run = Run(max_segments=3)
    for number in range(3):
        await run.turn("ok", {"role": "system", "content": f"It is {number} o'clock."}, USER)
    with pytest.raises(RequestError):
        await run.session.answer(Question(({"role": "system", "content": "It is late."}, USER)))
    assert (len(run.trajectory.segments), run.came_to.end) == (3, "max_tokens")


async def test_the_record_of_what_was_asked_grows_with_the_session_and_not_with_its_square() -> None:
    run = Run(max_model_len=1 << 20)
    history: list[Message] = [{"role": "user", "content": "x" * 1000}]
    for _ in range(8):
        history += [await run.turn("y" * 1000, *history), ON]
    held = [len(key) for key in run.session._exchanges]
    assert held == [16] * 8


async def test_nothing_is_kept_of_questions_that_are_refused() -> None:
    run = Run(max_tokens=6)
    await run.turn("first", USER, is_retry=False)
    for question in [Question((USER,)), *(Question((*SUB, ON | {"content": text})) for text in "aab")]:
        with pytest.raises(RequestError, match="max_tokens"):
            await run.session.answer(question, is_retry=False)
    assert [len(exchanges) for exchanges in run.session._exchanges.values()] == [1]
    assert sum(map(len, run.session._repeats.values())) == 1
    assert trained(run) == ["first"]


async def test_nothing_runs_or_is_answered_after_a_session_is_closed() -> None:
    run = Run()
    asking = [await run.begin(USER, is_retry=None) for _ in range(12)]  # more than one answer is repeated
    await run.session.close()
    assert all(asked.answer.cancelled() for asked in run.asked) and run.session.num_running == 0
    await asyncio.gather(*asking, return_exceptions=True)
    assert all(task.cancelled() for task in asking)
    with pytest.raises(RequestError) as refused:
        await run.session.answer(Question((ON,)))
    assert refused.value.code == "session_over" and run.session.num_turns <= 2


def trained(run: Run) -> list[str]:
    """What the model said and is trained, segment by segment."""
    return [CHAT.decode(segment.completion_ids[segment.mask].tolist()) for segment in run.trajectory.segments]


def unread(run: Run) -> list[tuple[str, str]]:
    return [(answer.why, answer.message["content"]) for answer in run.came_to.unread]


async def test_a_question_whose_answer_is_still_generated_gets_it_whatever_its_client_counts() -> None:
    run = Run()
    asking = [await run.begin(USER, is_retry=is_retry) for is_retry in (False, None, False, True)]
    assert len(run.asked) == 1
    run.asked[0].say("ok")
    assert {answer.text for answer in await asyncio.gather(*asking)} == {"ok"}
    assert (trained(run), unread(run)) == (["ok"], [])


async def test_an_answer_that_was_not_delivered_is_given_again_and_is_read_then() -> None:
    run = Run()
    asking = await run.begin(USER)
    run.asked[0].say("ok")
    run.session.note_lost(await asking)
    assert not run.session.read_histories
    again = await run.session.answer(Question((USER,)), is_retry=False)
    assert (again.text, len(run.asked), trained(run), unread(run)) == ("ok", 1, ["ok"], [])


@pytest.mark.parametrize("goes_on", [False, True])
async def test_of_two_answers_to_one_question_the_one_that_was_read_is_trained(goes_on: bool) -> None:
    run = Run()
    begun = [USER, await run.turn("first", USER), ON]
    await run.turn("lost", *begun, is_retry=False)
    read = await run.turn("read", *begun, is_retry=False)
    if goes_on:
        await run.turn("end", *begun, read, ON)
    assert trained(run) == ["first", "readend" if goes_on else "read"]
    assert unread(run) == [("asked_again", "lost")]
    said = [message["content"] for message in run.came_to.messages]
    assert said == ["first", "on", "read", *(["on", "end"] if goes_on else [])]
    assert run.trajectory.text.endswith("end" if goes_on else "read")


async def test_the_earlier_answer_counts_where_the_client_goes_on_with_it() -> None:
    run = Run()
    first = await run.turn("first", USER, is_retry=False)
    await run.turn("second", USER, is_retry=False)
    await run.turn("end", USER, first, ON)
    assert (trained(run), unread(run)) == (["firstend"], [("asked_again", "second")])


async def test_of_equal_answers_to_one_question_one_is_trained() -> None:
    run = Run()
    for _ in range(2):
        answer = await run.turn("same", USER, is_retry=False)
    begun = [USER, answer, ON]
    begun += [await run.turn("on", *begun), ON]
    await run.turn("end", *begun)
    assert (trained(run), unread(run)) == (["sameonend"], [("asked_again", "same")])


async def test_an_answer_like_one_that_was_read_is_not_read_by_the_history_of_that() -> None:
    run = Run()
    begun = [USER, await run.turn("same", USER), ON]
    begun += [await run.turn("on", *begun), ON]
    for text in ("same", "other"):
        await run.turn(text, USER, is_retry=False)
    await run.turn("end", *begun)
    assert (trained(run), unread(run)) == (["other", "sameonend"], [("asked_again", "same")])


@pytest.mark.parametrize("is_refused", [False, True])
async def test_an_answer_counts_where_the_same_is_asked_again_and_not_answered(is_refused: bool) -> None:
    run = Run(max_tokens=6 if is_refused else 0)
    await run.turn("first", USER, is_retry=False)
    asking = await run.begin(USER, is_retry=False)
    if is_refused:
        with pytest.raises(RequestError, match="max_tokens"):
            await asking
    else:
        await run.session.close()
    assert (trained(run), unread(run)) == (["first"], [])


async def test_a_program_that_ends_after_its_last_response_broke_is_a_fault() -> None:
    run = Run()
    begun = [USER, await run.turn("first", USER), ON]
    asking = await run.begin(*begun)
    run.asked[-1].say("lost")
    run.session.note_lost(await asking)
    fault = run.session.find_fault(False)
    assert fault is not None and "its last request had failed" in str(fault) and fault.kind == "lost"
    assert run.session.find_fault(True) is None
    await run.session.answer(Question((*begun,)))
    assert run.session.find_fault(False) is None


async def test_a_program_that_does_without_one_of_two_answers_has_no_fault() -> None:
    run = Run()
    main = await run.begin(USER)
    sub = await run.begin(*SUB)
    for asked in run.asked:
        asked.say("ok")
    await main
    run.session.note_lost(await sub)
    assert run.session.find_fault(False) is None


async def test_a_turn_that_waits_for_tokens_of_others_does_not_wait_for_the_engine(monkeypatch) -> None:
    monkeypatch.setattr("tidemill.services.rollout.gateway.pace.SLOW_S", 0.01)
    run = Run(max_tokens=2000)
    run.pace.note(1, 10.0)
    asking = [await run.begin(USER), await run.begin(*SUB)]
    await asyncio.sleep(0.03)
    assert len(run.asked) == 1
    assert [run.session.find_fault(is_late) for is_late in (False, True)] == [None, None]
    await run.session.close()
    await asyncio.gather(*asking, return_exceptions=True)


async def test_an_engine_that_hangs_in_one_of_two_turns_is_slow_where_the_time_is_over(monkeypatch) -> None:
    monkeypatch.setattr("tidemill.services.rollout.gateway.pace.SLOW_S", 0.01)
    run = Run()
    for _ in range(3):
        run.pace.note(1, 1e-6)
    asking = await run.begin(USER)
    sub = await run.begin(*SUB)
    run.asked[-1].say("ok")
    await sub
    await asyncio.sleep(0.05)
    fault = run.session.find_fault(True)
    assert fault is not None and "the engine was slow" in str(fault) and fault.kind == "engine"
    assert run.session.find_fault(False) is None
    await run.session.close()
    await asyncio.gather(asking, return_exceptions=True)


@pytest.mark.parametrize(("max_tokens", "is_slow"), [(10, True), (2000, False)])
async def test_a_turn_without_an_answer_is_measured_by_all_tokens_that_it_may_have(
    max_tokens: int, is_slow: bool, monkeypatch
) -> None:
    monkeypatch.setattr("tidemill.services.rollout.gateway.pace.SLOW_S", 0.0)
    run = Run(turn_tokens=max_tokens)
    run.pace.note(3, 3.0)  # a second a token
    asking = await run.begin(USER)
    # Three times ten seconds are over, and not three times two thousand.
    run.session._last_asked.begun_at -= 31.0
    assert (run.session.find_fault(True) is not None) == is_slow
    await run.session.close()
    await asyncio.gather(asking, return_exceptions=True)


async def test_a_question_that_is_asked_in_other_limits_is_the_same_question() -> None:
    run = Run()
    await run.turn("lost", USER, max_tokens=99)
    await run.turn("read", USER, max_tokens=98)
    assert (trained(run), unread(run)) == (["read"], [("asked_again", "lost")])


async def test_all_answers_of_an_agent_that_samples_on_purpose_are_trained() -> None:
    run = Run(repeated_requests="sample")
    for text in ("one", "two"):
        await run.turn(text, USER, is_retry=False)
    assert (trained(run), unread(run)) == (["one", "two"], [])


async def test_a_sample_that_is_about_to_be_sent_is_not_the_answer_to_the_next_request() -> None:
    run = Run(repeated_requests="sample")
    first = await run.begin(USER, is_retry=False)
    run.asked[0].say("one")
    # The answer is there, and its response has not begun.
    await asyncio.sleep(0)
    second = await run.begin(USER, is_retry=False)
    assert len(run.asked) == 2
    run.asked[1].say("two")
    await asyncio.gather(first, second)
    assert (trained(run), unread(run)) == (["one", "two"], [])


async def test_a_sample_that_begins_another_one_is_no_beginning_of_it() -> None:
    run = Run(repeated_requests="sample")
    short = await run.turn("yes", USER, is_retry=False, is_streamed=True)
    await run.turn("yes, because", USER, is_retry=False, is_streamed=True)
    for text in ("one", "two"):
        await run.turn(text, USER, short, {"role": "user", "content": text})
    assert (trained(run), unread(run)) == (["yes, because", "yesone", "two"], [])


async def test_a_question_that_comes_again_after_its_answer_was_read_is_another_one() -> None:
    run = Run()
    first = await run.turn("first", USER, is_retry=False)
    await run.turn("end", USER, first, ON)
    await run.turn("second", USER, is_retry=False)
    assert (trained(run), unread(run)) == (["firstend", "second"], [])


async def open_call(run: Run, text: str, *messages: Message) -> list[Message]:
    """A turn in which the model says this and calls a tool; the history with the tool's result."""
    answer = await run.turn(f"{text}{call_line('add')}", *messages, is_retry=False)
    result = {"role": "tool", "content": "7", "tool_call_id": answer["tool_calls"][0]["id"]}
    return [*messages, answer, result]


@pytest.mark.parametrize("then", ["ends", "goes back", "samples"])
async def test_calls_that_were_open_where_an_agent_began_again_are_not_trained(then: str) -> None:
    """A program whose agent fails where a proxy has lost an answer begins a new one."""
    run = Run(repeated_requests="sample" if then == "samples" else "retry")
    with_result = await open_call(run, "first", USER)
    with_lost = await open_call(run, "lost", *with_result)
    await open_call(run, "second", USER)
    if then == "goes back":
        await run.turn("end", *with_lost, is_retry=False)
    texts = [text.replace(call_line("add"), " ") for text in trained(run)]
    expected = {
        "ends": (["first ", "second "], [("asked_again", "lost")]),
        "goes back": (["second ", "first lost end"], []),
        "samples": (["first lost ", "second "], []),
    }
    assert (texts, unread(run)) == expected[then]


@pytest.mark.parametrize("asked", [{"messages": SUB}, {"messages": [], "prompt": "go"}])
async def test_an_agent_that_begins_again_leaves_the_open_calls_of_others(asked: dict[str, Any]) -> None:
    run = Run()
    await open_call(run, "call", USER)
    messages = asked.pop("messages")
    answer = await run.turn("first", *messages, **asked)
    after = {"prompt": "gofirst on"} if asked else {}
    await run.turn("end", *messages, *([] if asked else [answer, ON]), **after)
    await run.turn("second", *messages, **asked, is_retry=False)
    assert unread(run) == [] and len(trained(run)) == 3


async def test_calls_that_were_open_count_until_the_agent_that_began_again_has_an_answer() -> None:
    run = Run()
    with_result = await open_call(run, "first", USER)
    await open_call(run, "last", *with_result)
    asking = await run.begin(USER, is_retry=False)
    run.asked[-1].say("lost")
    run.session.note_lost(await asking)
    assert unread(run) == [("not_delivered", "lost")]
    await run.session.answer(Question((USER,)), is_retry=False)
    assert unread(run) == [("asked_again", "last")]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_stream_that_the_client_took_for_whole_before_its_end_is_not_trained(
    is_streamed: bool,
) -> None:
    run = Run()
    begun = [USER, await run.turn("first", USER), ON]
    await run.turn("0123456789", *begun, is_streamed=is_streamed)
    await run.turn("end", *begun, {"role": "assistant", "content": "01"}, ON)
    # Without a stream the client has read all, and has shortened it.
    assert trained(run) == (["first", "end"] if is_streamed else ["first0123456789", "end"])
    assert unread(run) == ([("cut", "0123456789")] if is_streamed else [])


async def test_a_session_of_which_nothing_was_read_has_no_segment() -> None:
    run = Run()
    asking = await run.begin(USER)
    run.asked[0].say("ok")
    run.session.note_lost(await asking)
    assert run.session.histories.recorded and not run.session.read_histories


async def test_the_last_turn_is_answered_again_before_the_limit_ends_the_session() -> None:
    run = Run(max_turns=1)
    await run.turn("ok", USER, is_retry=False)
    assert (await run.session.answer(Question((USER,)), is_retry=False)).text == "ok"
    with pytest.raises(RequestError):
        await run.session.answer(Question((USER, {"role": "assistant", "content": "ok"}, ON)))
    assert (trained(run), run.came_to.end) == (["ok"], "max_turns")


async def test_what_the_gateway_notes_of_answers_does_not_change_what_is_kept_of_a_turn() -> None:
    run = Run()
    begun = [USER, await run.turn("first", USER), ON]
    await run.turn("lost", *begun, is_retry=False)
    before = run.trajectory
    await run.turn("read", *begun, is_retry=False)
    after = run.trajectory
    assert before.segments[0].turns[1].num_tokens == len("lost") + 1
    assert len(after.segments[0].turns) == 1 and after.segments[0].completion_ids.tolist() == [*b"first", END]
    assert after.segments[0].turns[0].num_tokens == len("first") + 1


async def test_a_limit_that_is_met_again_is_answered_so_that_programs_stop_asking() -> None:
    run = Run(max_turns=1, max_model_len=80)
    answer = await run.turn("ok", USER)
    statuses = []
    for number in range(3):
        with pytest.raises(RequestError) as refused:
            await run.session.answer(Question((USER, answer, {"role": "user", "content": str(number)})))
        statuses.append((refused.value.status, refused.value.code))
    assert statuses == [(400, SESSION_LIMIT), (404, SESSION_LIMIT), (404, SESSION_LIMIT)]
    assert run.came_to.end == "max_turns"


async def test_the_limits_of_histories_and_of_tokens_are_refused_each_by_itself() -> None:
    run = Run(max_tokens=6, max_segments=1)
    answer = await run.turn("first", USER)
    statuses = []
    for question in (Question((*SUB,)), Question((USER, answer, ON))):
        for _ in range(2):
            with pytest.raises(RequestError) as refused:
                await run.session.answer(question)
            statuses.append((refused.value.status, str(refused.value).split("(")[1].split(")")[0]))
    of_histories = [(400, "max_segments"), (404, "max_segments")]
    assert statuses == [*of_histories, (400, "max_tokens"), (404, "max_tokens")]


async def test_a_client_that_shortens_its_history_step_by_step_goes_on() -> None:
    run = Run(max_model_len=80)
    statuses = []
    for length in (300, 200):
        with pytest.raises(RequestError, match="maximum context length") as refused:
            await run.session.answer(Question((USER | {"content": "x" * length},)))
        statuses.append(refused.value.status)
    assert statuses == [400, 400]
    assert (await run.turn("ok", USER))["content"] == "ok" and run.came_to.end == "done"


async def test_a_long_question_is_answered_where_the_machine_can_start_no_thread(monkeypatch):
    async def refuse(*args: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("asyncio.to_thread", refuse)
    run = Run(max_model_len=2 * LONG_CHARACTERS)
    answer = await run.turn("ok", USER | {"content": "x" * LONG_CHARACTERS})
    assert answer["content"] == "ok"
