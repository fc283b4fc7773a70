"""Sessions with a script in place of the engine: what is kept, how they end, what a fault does, and how
another worker goes on with them: restored, repeated, or begun again."""

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.support.environments import THIS
from tests.support.models import run_config
from tests.support.waiting import wait_until
from tests.unit.rollout.sessions.test_template_chat import tokenizer_of
from tidemill.common.config.environment import EnvironmentConfig
from tidemill.common.errors import ConfigError, EnvironmentFaultError
from tidemill.common.wire import codec
from tidemill.common.wire.codec import payload_of
from tidemill.common.wire.messages import SamplingParams, Ticket, Trajectory
from tidemill.common.wire.segments import Session
from tidemill.services.rollout.engines.engine import Generation
from tidemill.services.rollout.environments import load, player
from tidemill.services.rollout.environments.environment import Design
from tidemill.services.rollout.environments.player import EnvironmentPlayer
from tidemill.services.rollout.environments.stages import LocalStage
from tidemill.services.rollout.environments.users_code import metrics_of, observed
from tidemill.services.rollout.sessions.parts import PLAY_BYTES, Part, Recording, read_play
from tidemill.services.rollout.sessions.player import Played
from tidemill.services.rollout.sessions.template_chat import TemplateChat

QWEN = tokenizer_of("qwen3")
EOS = QWEN.convert_tokens_to_ids("<|im_end|>")
CHAT = TemplateChat(QWEN, [EOS])
ATTEMPTS = 2


def ids_of(text: str) -> list[int]:
    return CHAT.encode(text)


class Script:
    """An engine that says these lines, in turn; notes what it was asked."""

    def __init__(self, *lines: str) -> None:
        self.lines = list(lines)
        self.asked: list[tuple[list[int], SamplingParams]] = []

    async def __call__(self, ids: Sequence[int], sampling: SamplingParams) -> Generation:
        self.asked.append((list(ids), sampling))
        line = self.lines.pop(0)
        if line == "hang":
            await asyncio.sleep(3600)
        is_cut = line.endswith("...")
        token_ids = ids_of(line) + ([] if is_cut else [EOS])
        return Generation(
            token_ids, [-0.5] * len(token_ids), ((len(self.asked), 0),), "length" if is_cut else "stop", 3
        )


def ticket(truth: Any = 7, **fields: Any) -> Ticket:
    prompt = [{"role": "user", "content": "Play."}]
    settings = {
        "prompt_ids": CHAT.render(prompt),
        "extra": {"prompt": prompt},
        "sampling": SamplingParams(max_tokens=100),
        "ground_truth": truth,
    } | fields
    return Ticket(ticket=1, step=1, min_version=0, group_size=2, **settings)


@pytest.fixture(autouse=True)
def on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it may block: other tests are about processes."""
    monkeypatch.setattr(
        player, "build_stage", lambda config: LocalStage(design_of(config), config.call_timeout_s)
    )


def design_of(config: EnvironmentConfig) -> Design:
    design = load(config)
    assert isinstance(design, Design)
    return design


def player_of(**section: Any) -> EnvironmentPlayer:
    environment = {"attempts": ATTEMPTS} | section
    config = run_config("m", model={"max_model_len": 4096}, rollout={"environment": environment})
    return EnvironmentPlayer(config, lambda ids: str(QWEN.decode(ids)), lambda: CHAT)


async def play(script: Script, ground_truth: Any = 7, **section: Any) -> tuple[Played, Session]:
    playing = player_of(**section)
    await playing.start()
    try:
        played = await playing.play(ticket(ground_truth), "train-1-0-1", script)
    finally:
        await playing.close()
    assert played.session is not None
    return played, played.session


def answers_of_tools(session: Session) -> list[Any]:
    return [message["content"] for message in session.messages if message["role"] == "tool"]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def test_a_game_is_played_to_its_end_and_every_token_is_where_it_was_sampled() -> None:
    script = Script("3", "7")
    played, session = await play(script, use=f"{THIS}:Guess")
    first = played.first
    assert QWEN.decode(first.prompt_ids) == (
        "<|im_start|>user\nPlay. 1 to 9.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert QWEN.decode(first.completion_ids) == (
        "3<|im_end|>\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n7<|im_end|>"
    )
    of_model = first.completion_ids[first.mask].tolist()
    assert of_model == [*ids_of("3"), EOS, *ids_of("7"), EOS]
    assert [ids for ids, _ in script.asked][1] == [
        *first.prompt_ids,
        *first.completion_ids[: -len(of_model) // 2],
    ]
    assert first.spans == ((1, 0), (2, len(first.completion_ids) - 2))
    assert [turn.reward for turn in session.turns] == [0.25, 1.0]
    assert (session.reward, session.end, played.finish) == (1.25, "done", "stop")
    assert [turn.num_cached_tokens for turn in session.turns] == [3, 3]
    assert session.metrics == {"number": 7.0}
    assert [message["role"] for message in session.messages] == ["assistant", "user", "assistant"]
    (segment,) = Trajectory(ticket=1, index=0, step=1, group_size=2, **played.fields()).segments
    assert segment.completion_ids.tolist() == first.completion_ids.tolist()


async def test_tools_answer_in_order_and_wrong_calls_are_observations() -> None:
    calls = call("multiply", a="6", b=7) + call("divide") + call("multiply", a=1)
    script = Script(calls + call("multiply", a=1 << 64, b=7), "42")
    played, session = await play(script, use="tools", tools=(f"{THIS}:multiply",))
    right, unknown, missing, too_large = answers_of_tools(session)
    assert right == "42"
    assert unknown == "error: there is no tool 'divide'; there is multiply"
    assert missing.startswith("error: multiply: b: Missing required argument")
    assert too_large.startswith("error:")
    first, second = session.turns
    assert (first.num_calls, first.num_wrong_calls, second.num_calls) == (4, 3, 0)
    assert '"name": "multiply"' in QWEN.decode(played.first.prompt_ids)
    assert session.reward is None and session.num_faults == 0


@pytest.mark.parametrize("value", [1 << 64, object()])
def test_what_an_environment_says_and_no_message_can_hold_is_its_fault(value: Any) -> None:
    call = {"function": {"name": "add", "arguments": {"a": value}}}
    with pytest.raises(EnvironmentFaultError):
        observed([{"role": "assistant", "content": "", "tool_calls": [call]}], "step")


def test_metrics_that_are_no_single_number_are_left_out() -> None:
    assert metrics_of({"one": torch.tensor([1.0]), "two": torch.tensor([1.0, 2.0])}) == {"one": 1.0}


async def test_trls_class_plays_unchanged() -> None:
    lines = call("add", amount=9), call("add", amount=9), call("add", amount=1), "done"
    played, session = await play(Script(*lines), use=f"{THIS}:Counter", ground_truth=18)
    assert answers_of_tools(session) == ["now 9", "now 18", "error: Game over."]
    assert session.reward == 1.0
    prompt = QWEN.decode(played.first.prompt_ids)
    assert "Play. Count." in prompt and "_hidden" not in prompt and "get_reward" not in prompt


async def test_skyrl_gyms_class_gives_the_chat_and_the_rewards() -> None:
    use = f"{THIS}:Skyrl"
    script = Script("5", "7")
    played, session = await play(script, use=use, options={"hint": "A digit."}, ground_truth="7")
    assert "A digit.<|im_end|>" in QWEN.decode(played.first.prompt_ids)
    assert (session.reward, session.metrics) == (1.0, {"hints": 1.0})


@pytest.mark.parametrize(
    ("lines", "changes", "end", "num_turns"),
    [
        (["3"] * 9, {"max_turns": 2}, "max_turns", 2),
        (["3", "4", "5"], {"max_tokens": 40}, "max_tokens", 2),
        (["3..."], {}, "max_tokens", 1),
        (["3", "hang"], {"session_timeout_s": 0.05}, "timeout", 1),
    ],
)
async def test_a_session_that_reaches_a_limit_is_truncated_and_keeps_its_reward(
    lines, changes, end, num_turns
):
    played, session = await play(Script(*lines), use=f"{THIS}:Guess", **changes)
    assert (session.end, played.finish, len(session.turns)) == (end, "length", num_turns)
    assert session.late == ("session" if end == "timeout" else "")
    assert bool(played.first.mask[-1])
    assert session.reward == pytest.approx(0.25 * num_turns)


async def test_only_a_turn_without_room_is_given_less() -> None:
    script = Script("3", "7")
    await play(script, use=f"{THIS}:Guess", max_tokens=120)
    assert script.asked[0][1] == SamplingParams(max_tokens=100)
    assert script.asked[1][1].max_tokens < 100


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("raise", "step raised RuntimeError: the board is broken"),
        ("mute", "step raised MuteError: its text cannot be read"),
        ("nonsense", "step returned int 3; expected (observation, reward, done)"),
        ("hang", "step took longer than"),
    ],
)
async def test_a_fault_is_played_again_and_then_handed_on_and_everything_is_closed(line, said):
    load(EnvironmentConfig(use=f"{THIS}:AsyncGuess"))
    load_closed().clear()

    class Saying(Script):
        async def __call__(self, ids: Sequence[int], sampling: SamplingParams) -> Generation:
            return Generation([*ids_of(line), EOS], [-0.5] * (len(ids_of(line)) + 1), ((0, 0),), "stop")

    with pytest.raises(EnvironmentFaultError) as fault:
        await play(Saying(), call_timeout_s=0.05, late="fault", use=f"{THIS}:AsyncGuess")
    assert said in str(fault.value)
    assert len(load_closed()) == ATTEMPTS


@pytest.mark.parametrize("line", ["loop", "score"])
async def test_a_call_without_an_end_is_the_policys_doing_and_costs_one_limit_of_time(line: str) -> None:
    """One play, not `attempts` of them; what is there is kept."""
    script = Script("2", line)
    played, session = await play(script, call_timeout_s=0.05, use=f"{THIS}:Endless")
    late = {"loop": "call", "score": "reward"}[line]
    assert (session.end, session.late, session.num_faults, played.finish) == ("timeout", late, 0, "length")
    assert [turn.num_tokens for turn in session.turns] == [len(ids_of(said)) + 1 for said in ("2", line)]
    assert session.turns[0].reward == 0.25 and session.reward == 0.25
    assert session.messages[-1]["content"] == line


async def test_what_the_policy_cannot_cause_is_a_fault_also_where_it_is_late() -> None:
    with pytest.raises(EnvironmentFaultError, match="reset took longer"):
        await play(Script(), call_timeout_s=0.05, use=f"{THIS}:Endless", ground_truth="loop")


@pytest.mark.parametrize(
    ("use", "late", "truncates"),
    [
        ("my_env.py:Env", "auto", True),
        ("tools", "auto", True),
        ("openenv:http://h:1", "auto", False),
        ("openenv:http://h:1", "truncate", True),
        ("my_env.py:Env", "fault", False),
    ],
)
def test_who_is_blamed_for_a_late_call_depends_on_what_answers(use: str, late: Any, truncates: bool) -> None:
    assert EnvironmentConfig(use=use, late=late, tools=("t.py:f",)).truncates_late is truncates


def load_closed() -> list[int]:
    """Users' files are modules of their own: not the one that this test imports."""
    closed: list[int] = sys.modules["tidemill_users_environments"].AsyncGuess.closed
    return closed


async def test_a_play_that_is_cancelled_closes_its_environment() -> None:
    playing = player_of(use=f"{THIS}:AsyncGuess")
    await playing.start()
    load_closed().clear()
    script = Script("hang")
    play = asyncio.ensure_future(playing.play(ticket(), "x", script))
    await wait_until(lambda: script.asked)
    play.cancel()
    await asyncio.gather(play, return_exceptions=True)
    await playing.close()
    assert load_closed() == [7]


async def test_a_long_answer_loses_its_middle() -> None:
    played, _ = await play(Script("3", "7"), use=f"{THIS}:Guess", max_result_tokens=4)
    assert "hi\n[2 tokens left out]\ner" in QWEN.decode(played.first.completion_ids)


async def test_a_result_that_cannot_be_shown_is_an_observation_and_no_fault() -> None:
    script = Script(call("nest", depth=1) + call("nest", depth=100_000), "done")
    _, session = await play(script, use="tools", tools=(f"{THIS}:nest",))
    shallow, deep = answers_of_tools(session)
    assert shallow == "[[]]" and deep.startswith("error:") and session.num_faults == 0


async def test_an_answer_longer_than_the_model_reads_truncates_the_session_and_can_be_sent() -> None:
    """The model decides what its tools write: it must not end its siblings by it."""
    use = {"use": "tools", "tools": (f"{THIS}:repeat",)}
    script = Script(call("repeat", count=1_000_000))
    played, session = await play(script, **use)
    assert (session.end, len(session.turns)) == ("max_tokens", 1)
    sample = Trajectory(ticket=1, index=0, step=1, group_size=2, **played.fields())
    assert "tokens left out" in answers_of_tools(session)[0] and payload_of(sample, 100_000)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"use": f"{THIS}:NoStep"}, r"step\(self\).*expected step\(self, text\)"),
        ({"use": f"{THIS}:Gues"}, "has no 'Gues'; did you mean 'Guess'"),
        ({"use": f"{THIS}:Guess", "options": {"x": 1}}, "cannot be made with rollout.environment.options"),
        ({"use": "nowhere.py:Guess"}, "does not exist on this machine"),
        ({"use": f"{THIS}:THIS"}, "is str; expected a class with step"),
        ({"use": "tools", "tools": (f"{THIS}:undescribed",)}, "Expected are a type for each argument"),
        ({"use": "tools", "tools": (f"{THIS}:Guess",)}, "is no function"),
    ],
)
def test_what_is_wrong_with_an_environment_is_said_before_the_first_session(section, said):
    with pytest.raises(ConfigError, match=said):
        _ = design_of(EnvironmentConfig(**section)).kinds


class Kept:
    """What Redis would hold of sample 0, over several lives of workers."""

    def __init__(self) -> None:
        self.fields: dict[bytes, bytes] = {}

    async def keep(self, name: bytes, number: int, recorded: Part) -> bool:
        self.fields[b"0:%d" % number] = name + codec.encode_payload(recorded)
        return True

    async def play(self, script: Script, **section: Any) -> Played:
        prompt_ids = ticket().prompt_ids
        play = read_play(self.fields, 0, prompt_ids, pytest.fail)

        async def ask(ids: Any, sampling: Any, on_tokens: Any = None) -> Any:
            return await script(ids, sampling)

        playing = player_of(**{"attempts": 1} | section)
        await playing.start()
        try:
            return await playing.play(ticket(), "s", Recording(ask, play, self.keep))
        finally:
            await playing.close()


async def died_after_two_turns(use: str) -> Kept:
    kept = Kept()
    with pytest.raises(IndexError):  # the script has no third line
        await kept.play(Script("3", "9"), use=f"{THIS}:{use}")
    assert len(kept.fields) == (0 if use == "Guess" else 4)
    return kept


@pytest.mark.parametrize("use", ["ResumableGuess", "RepeatableGuess"])
async def test_a_session_goes_on_after_its_last_whole_turn_as_if_nothing_had_happened(use: str) -> None:
    kept = await died_after_two_turns(use)
    script = Script("7")
    played = await kept.play(script, use=f"{THIS}:{use}")
    undisturbed = await Kept().play(Script("3", "9", "7"), use=f"{THIS}:{use}")
    assert played.first.completion_ids.tolist() == undisturbed.first.completion_ids.tolist()
    assert played.first.mask.tolist() == undisturbed.first.mask.tolist()
    assert played.session is not None and undisturbed.session is not None
    assert played.session.messages == undisturbed.session.messages
    assert (played.session.reward, played.session.end) == (undisturbed.session.reward, "done")
    ((ids, _),) = script.asked
    assert ids == [*played.first.prompt_ids, *played.first.completion_ids[: -len([*ids_of("7"), 0])]]


async def test_one_that_says_nothing_of_itself_begins_again() -> None:
    kept = await died_after_two_turns("Guess")
    script = Script("3", "9", "7")
    await kept.play(script, use=f"{THIS}:Guess")
    assert len(script.asked) == 3


async def test_one_that_answers_otherwise_than_before_begins_again() -> None:
    kept = await died_after_two_turns("RepeatableGuess")
    script = Script("8", "7")
    played = await kept.play(script, use=f"{THIS}:RepeatableGuess", options={"says": "up"})
    assert len(script.asked) == 2
    assert "8" in QWEN.decode(played.first.completion_ids)
    names = {raw[:PLAY_BYTES] for raw in kept.fields.values()}
    assert len(names) == 2, "its parts are over those of the play before, whose last part counts no more"
    assert len(read_play(kept.fields, 0, ticket().prompt_ids, pytest.fail).parts) == 3


async def test_one_that_cannot_be_restored_is_a_fault_and_begins_again() -> None:
    kept = await died_after_two_turns("ResumableGuess")
    script = Script("3", "7")
    use = f"{THIS}:ResumableGuess"
    with pytest.raises(EnvironmentFaultError, match="restore"):
        await kept.play(script, use=use, options={"faults": ["restore"]})
    played = await kept.play(script, attempts=2, use=use, options={"faults": ["restore"]})
    assert played.session is not None and (len(script.asked), played.session.num_faults) == (2, 1)


async def test_after_a_fault_a_session_goes_on_from_its_last_turn() -> None:
    script = Script("3", "9", "7")
    options = {"use": f"{THIS}:ResumableGuess", "options": {"faults": ["9"]}}
    played = await Kept().play(script, attempts=2, **options)
    assert played.session is not None and played.session.num_faults == 1
    assert script.lines == [] and [turn.num_tokens for turn in played.session.turns] == [2, 2, 2]


async def test_a_session_has_its_time_once_in_the_hands_of_all_who_play_it() -> None:
    kept = await died_after_two_turns("ResumableGuess")
    last = kept.fields[b"0:3"]
    late = codec.decode_payload(last[PLAY_BYTES:], Part).model_copy(update={"elapsed_s": 1e6})
    kept.fields[b"0:3"] = last[:PLAY_BYTES] + codec.encode_payload(late)
    played = await kept.play(Script("hang"), use=f"{THIS}:ResumableGuess")
    assert played.session is not None and (played.session.end, len(played.session.turns)) == ("timeout", 2)


def test_a_resumable_class_has_both_methods_and_they_are_no_tools() -> None:
    with pytest.raises(ConfigError, match="restore"):
        design_of(EnvironmentConfig(use=f"{THIS}:HalfResumable"))
    kinds = design_of(EnvironmentConfig(use=f"{THIS}:ResumableBox")).kinds
    (kind,) = kinds.values()
    assert kind.resumes == "restore"
    assert [tool["function"]["name"] for tool in kind.tools] == ["put"]


async def test_tools_have_nothing_to_restore() -> None:
    kept = Kept()
    call = '<tool_call>\n{"name": "multiply", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    tools = {"use": "tools", "tools": [f"{THIS}:multiply"]}
    with pytest.raises(IndexError):
        await kept.play(Script(call), **tools)
    script = Script("6")
    played = await kept.play(script, **tools)
    assert len(script.asked) == 1 and played.session is not None
    assert [message["content"] for message in played.session.messages if message["role"] == "tool"] == ["6"]
