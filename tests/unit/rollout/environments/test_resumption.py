"""Sessions that another worker goes on with: restored, repeated, or begun again."""

from typing import Any

import pytest

from tests.support.environments import THIS
from tests.unit.rollout.environments.test_session import (
    QWEN,
    Script,
    design_of,
    ids_of,
    on_the_loop,
    player_of,
    ticket,
)
from tidemill.common.config.environment import EnvironmentConfig
from tidemill.common.errors import ConfigError, EnvironmentFaultError
from tidemill.common.wire import codec
from tidemill.services.rollout.sessions.parts import PLAY_BYTES, Part, Recording, read_play
from tidemill.services.rollout.sessions.player import Played

on_the_loop = on_the_loop
"""For all tests here too."""


class Kept:
    """What Redis would hold of sample 0, over several lives of workers."""

    def __init__(self) -> None:
        self.fields: dict[bytes, bytes] = {}

    async def keep(self, name: bytes, number: int, part: Part) -> bool:
        self.fields[b"0:%d" % number] = name + codec.encode_payload(part)
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
    kept, script = await died_after_two_turns(use), Script("7")
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
    kept, script = await died_after_two_turns("Guess"), Script("3", "9", "7")
    await kept.play(script, use=f"{THIS}:Guess")
    assert len(script.asked) == 3


async def test_one_that_answers_otherwise_than_before_begins_again() -> None:
    kept, script = await died_after_two_turns("RepeatableGuess"), Script("8", "7")
    played = await kept.play(script, use=f"{THIS}:RepeatableGuess", options={"says": "up"})
    assert len(script.asked) == 2
    assert "8" in QWEN.decode(played.first.completion_ids)
    names = {raw[:PLAY_BYTES] for raw in kept.fields.values()}
    assert len(names) == 2, "its parts are over those of the play before, whose last part counts no more"
    assert len(read_play(kept.fields, 0, ticket().prompt_ids, pytest.fail).parts) == 3


async def test_one_that_cannot_be_restored_is_a_fault_and_begins_again() -> None:
    kept, script = await died_after_two_turns("ResumableGuess"), Script("3", "7")
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
