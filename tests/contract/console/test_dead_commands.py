"""`tidemill dead` as people and programs call it, on letters that mean harm."""

import functools
import json
from collections.abc import Callable

import pytest
from typer.testing import Result

from tests.support.letters import bury_next, make_ticket, tickets_of, write_letter
from tests.support.numbered import append_numbered
from tests.support.trajectories import make_config, make_trajectory
from tidemill.common.errors import ConfigError
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import publish_config
from tidemill.common.streams import length

ESCAPE, RIGHT_TO_LEFT = "\x1b[2J\x1b]0;owned\x07", "\u202e"
HOSTILE = f"[bold red]{ESCAPE}{RIGHT_TO_LEFT}\nfake line"


@pytest.fixture
def dead(act, keys, tidemill) -> Callable[..., Result]:
    """Call `tidemill dead ...` on the test's run."""
    act(lambda broker: publish_config(broker, keys, make_config(streams={"lease_s": 1.0})))
    return functools.partial(tidemill, "dead")


def test_a_run_without_dead_letters_says_so(dead):
    assert dead("show").output == "no dead letters\n"
    assert json.loads(dead("show", "--json").output) == []


def test_hostile_letters_are_shown_and_do_nothing(dead, act, keys):
    hostile = make_trajectory(3, 1, text=HOSTILE)
    letter_id = act(
        lambda broker: write_letter(
            broker, keys, "trajectories", hostile, error=HOSTILE, worker=HOSTILE, ticket=3, index=1
        )
    )
    act(lambda broker: write_letter(broker, keys, HOSTILE, HOSTILE.encode(), error=HOSTILE, died_at=1e300))
    outputs = [dead("show").output, dead("show", letter_id, "--hex").output, dead("requeue", "--all").output]
    for output in outputs:
        assert "\x1b" not in output and "\x07" not in output and RIGHT_TO_LEFT not in output
        assert "\nfake line" not in output
    assert "[bold red]" in outputs[0] + outputs[1], "markup is text"
    assert r"\x1b[2J" in outputs[1]


def test_a_letter_is_shown_with_its_message_decoded(dead, act, keys):
    sample = make_trajectory(3, 1, text="it was 7")
    letter_id = act(lambda broker: write_letter(broker, keys, "trajectories", sample, error="boom"))
    shown = dead("show", letter_id).output
    for expected in ("boom", "3.1", "it was 7", "[0, 1, 2]", "trajectory, decoded"):
        assert expected in shown
    tree = json.loads(dead("show", letter_id, "--json").output)
    assert tree["message"]["completion_ids"] == [0, 1, 2]
    assert (tree["ticket"], tree["index"], tree["error"]) == (3, 1, "boom")
    assert bytes.fromhex(tree["fields_hex"]["v"]) == b"1.0"


def test_what_cannot_be_decoded_is_shown_as_bytes_and_as_what_they_claim(dead, act, keys):
    # A ticket without its other fields, and bytes that are no msgpack at all.
    ids = [
        act(lambda broker, payload=payload: write_letter(broker, keys, "prompts", payload))
        for payload in (b"\x81\xa6ticket\x05", b"\xc1\x00garbage" * 100)
    ]
    claims = dead("show", ids[0]).output
    assert "not validated" in claims and "ticket" in claims and "field required" in claims.lower()
    garbage = dead("show", ids[1]).output
    assert "c1 00 67 61" in garbage and "..garbage" in garbage
    assert "more bytes; --hex shows all" in garbage
    assert "more bytes" not in dead("show", ids[1], "--hex").output


def test_a_letter_that_is_not_there_is_a_plain_error(dead):
    with pytest.raises(ConfigError, match="no dead letter '1-1'"):
        dead("show", "1-1")


def test_a_letter_put_back_by_hand_leaves_the_list(dead, act, keys):
    async def die(broker: Broker) -> None:
        await append_numbered(broker, keys.prompts(), [(3, make_ticket(3))])
        async with tickets_of(broker, keys) as consumer:
            await bury_next(consumer, keys)

    act(die)
    (listed,) = json.loads(dead("show", "--json").output)
    assert (listed["stream"], listed["ticket"], listed["attempts"]) == ("prompts", 3, 5)
    again = dead("requeue", listed["id"])
    assert again.exit_code == 0 and "put back  the next rollout worker takes it" in again.output
    assert "no dead letters" in dead("show").output


def test_a_letter_that_was_named_and_is_refused_exits_with_1(dead, act, keys):
    letter_id = act(lambda broker: write_letter(broker, keys, "prompts", b"\xc1"))
    refused = dead("requeue", letter_id)
    assert refused.exit_code == 1 and "would only die again" in refused.output
    assert dead("requeue", "--all").exit_code == 0


class TestDrop:
    def test_asks_first(self, dead, act, keys):
        act(lambda broker: write_letter(broker, keys, "scores", b"\xc1"))
        with pytest.raises(ConfigError, match="cannot be undone; say --yes"):
            dead("drop", "--all")
        assert act(lambda broker: length(broker, keys.dead)) == 1

    def test_removes_what_was_named_and_nothing_else(self, dead, act, keys):
        ids = [act(lambda broker: write_letter(broker, keys, "scores", b"\xc1")) for _ in range(2)]
        assert dead("drop", ids[0], "--yes").exit_code == 0
        assert [item["id"] for item in json.loads(dead("show", "--json").output)] == ids[1:]

    def test_removes_what_the_filters_leave(self, dead, act, keys):
        for origin in ("scores", "scores:eval"):
            act(lambda broker, origin=origin: write_letter(broker, keys, origin, b"\xc1"))
        assert dead("drop", "--all", "--stream", "scores:eval", "-y").exit_code == 0
        assert [item["stream"] for item in json.loads(dead("show", "--json").output)] == ["scores"]

    @pytest.mark.parametrize("arguments", [(), ("1-0", "--all")])
    def test_takes_ids_or_all(self, dead, arguments):
        with pytest.raises(ConfigError, match="takes the ids"):
            dead("drop", *arguments)
