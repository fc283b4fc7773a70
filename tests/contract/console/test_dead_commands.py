"""`tidemill dead` as people and programs call it, on letters that mean harm."""

import functools
import json
from collections.abc import Callable

import pytest
from typer.testing import Result

from tests.support.letters import dead_letter_next, make_ticket, tickets_of, write_letter
from tests.support.numbered import append_numbered
from tests.support.trajectories import make_config, make_trajectory
from tidemill.common.errors import ConfigError
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import publish_config
from tidemill.common.streams import length

ESCAPE = "\x1b[2J\x1b]0;owned\x07"
RIGHT_TO_LEFT = "\u202e"
HOSTILE = f"[bold red]{ESCAPE}{RIGHT_TO_LEFT}\nfake line"


@pytest.fixture
def dead(act, keys, tidemill) -> Callable[..., Result]:
    """Call `tidemill dead ...` on the test's run."""
    act(lambda broker: publish_config(broker, keys, make_config(streams={"lease_s": 1.0})))
    return functools.partial(tidemill, "dead")


def test_hostile_letters_are_shown_and_do_nothing(dead, act, keys):
    fields = {"error": HOSTILE, "worker": HOSTILE, "ticket": 3, "index": 1}
    hostile = make_trajectory(3, 1, text=HOSTILE)
    letter_id = act(lambda broker: write_letter(broker, keys, "trajectories", hostile, **fields))
    act(lambda broker: write_letter(broker, keys, HOSTILE, HOSTILE.encode(), error=HOSTILE, died_at=1e300))
    outputs = [dead("show").output, dead("show", letter_id, "--hex").output, dead("requeue", "--all").output]
    for output in outputs:
        assert not {"\x1b", "\x07", RIGHT_TO_LEFT} & set(output) and "\nfake line" not in output
    assert "[bold red]" in outputs[0] + outputs[1], "markup is text"
    assert r"\x1b[2J" in outputs[1]


def test_a_letter_is_shown_with_its_message_decoded_or_its_bytes(dead, act, keys):
    assert dead("show").output == "no dead letters\n"

    # A sample, a ticket without its other fields, and bytes that are no msgpack at all.
    def write(stream, content):
        return act(lambda broker: write_letter(broker, keys, stream, content, error="boom"))

    sample = write("trajectories", make_trajectory(3, 1, text="it was 7"))
    half = write("prompts", b"\x81\xa6ticket\x05")
    garbage = write("prompts", b"\xc1\x00garbage" * 100)
    for letter_id, expected in {
        sample: ("boom", "3.1", "it was 7", "[0, 1, 2]", "trajectory, decoded"),
        half: ("not validated", "ticket", "Field required"),
        garbage: ("c1 00 67 61", "..garbage", "more bytes; --hex shows all"),
    }.items():
        output = dead("show", letter_id).output
        assert [words for words in expected if words not in output] == []
    assert "more bytes" not in dead("show", garbage, "--hex").output
    tree = json.loads(dead("show", sample, "--json").output)
    assert tree["message"]["completion_ids"] == [0, 1, 2]
    assert (tree["ticket"], tree["index"], tree["error"]) == (3, 1, "boom")
    assert bytes.fromhex(tree["fields_hex"]["v"]) == b"1.0"
    assert "... and 2 older ones" in dead("show", "--limit", "1").output
    assert dead("requeue", half).exit_code == 1, "what was named could not be put back"
    assert dead("requeue", "--all").exit_code == 0


def test_a_letter_put_back_by_hand_leaves_the_list(dead, act, keys):
    async def die(broker: Broker) -> None:
        await append_numbered(broker, keys.prompts(), [(3, make_ticket(3))])
        async with tickets_of(broker, keys) as consumer:
            await dead_letter_next(consumer, keys)

    act(die)
    (listed,) = json.loads(dead("show", "--json").output)
    assert (listed["stream"], listed["ticket"], listed["attempts"]) == ("prompts", 3, 5)
    again = dead("requeue", listed["id"])
    assert again.exit_code == 0 and "put back  the next rollout worker takes it" in again.output
    assert json.loads(dead("show", "--json").output) == []


def test_what_was_chosen_is_dropped_after_asking_and_nothing_else(dead, act, keys):
    origins = ("scores", "scores", "scores:eval")
    ids = [act(lambda broker, o=origin: write_letter(broker, keys, o, b"\xc1")) for origin in origins]
    for line, named in {
        "drop --all": "--yes",
        "drop": "--all",
        "drop 1-0 --all": "--all",
        "drop 1-0 --worker a --yes": "filters",
        "show 1-1": "'1-1'",
    }.items():
        with pytest.raises(ConfigError) as caught:
            dead(*line.split())
        assert named in str(caught.value)
    assert act(lambda broker: length(broker, keys.dead)) == 3
    assert dead("drop", ids[0], "--yes").exit_code == 0
    assert dead("drop", "--all", "--stream", "scores:eval", "-y").exit_code == 0
    assert [item["id"] for item in json.loads(dead("show", "--json").output)] == [ids[1]]
