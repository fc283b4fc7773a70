"""Programs of OpenAI's and Anthropic's clients, unchanged, with clients made at the top of their file."""

import pytest

from tests.support.scripted_model import ScriptedModel, agent_player, call_line, make_ticket

CALLS = (call_line("get_weather", location="Paris"), "14 degrees")
EVENT = ('{"name": "fair", "participants": ["Alice"]}',)


@pytest.mark.parametrize(
    ("program", "lines"), [("parsed_chat", EVENT), ("parsed_response", EVENT), ("tool_runner", CALLS)]
)
async def test_a_natural_program_runs_and_its_record_is_what_the_model_read_and_said(program, lines):
    model = ScriptedModel(*lines)
    name = f"tests.support.client_programs:{program}"
    async with agent_player(name, max_model_len=8192, model="owner/model") as player:
        played = await player.play(make_ticket(max_tokens=200), "s", model.ask)
    assert played.session is not None and played.session.forks == ()
    assert played.session.reward == 1.0 and played.finish == "stop" and not model.lines
    ids = [*played.first.prompt_ids.tolist(), *played.first.completion_ids.tolist()]
    starts = [turn.num_prompt_tokens for turn in played.first.turns]
    assert [ids[:start] for start in starts] == model.seen
    ends = [start + turn.num_tokens for start, turn in zip(starts, played.first.turns, strict=True)]
    assert [ids[start:end] for start, end in zip(starts, ends, strict=True)] == model.said
    assert int(played.first.mask.sum()) == sum(map(len, model.said))
