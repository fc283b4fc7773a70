"""`tidemill streams` as people and programs call it, on a run whose models mean harm."""

import asyncio
import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import Result

from tests.support.histories import letters, write_small_run
from tests.support.trajectories import make_trajectory
from tidemill.common.errors import ConfigError
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import Consumer, append
from tidemill.common.wire.keys import REWARD_GROUP
from tidemill.common.wire.messages import Trajectory

ESCAPE, RIGHT_TO_LEFT = "\x1b[2J\x1b]0;owned\x07", "\u202e"
HOSTILE = f"[bold red]{ESCAPE}{RIGHT_TO_LEFT}\nfake line" + "x" * 100_000


@pytest.fixture
def streams(act, keys, tidemill) -> Callable[..., Result]:
    """Call `tidemill streams ...` on the small run, which has a hostile tenth ticket."""
    hostile = make_trajectory(9, 0, text=HOSTILE, prompt_text=HOSTILE, worker=HOSTILE)

    async def write(broker: Broker) -> None:
        await write_small_run(broker, keys, hostile, *letters(error=HOSTILE))
        await broker.execute("XADD", keys.trajectories(), "*", "v", "9.0", "p", HOSTILE.encode())

    act(write)
    return functools.partial(tidemill, "streams")


def samples(result: Result) -> list[str]:
    messages = [json.loads(line)["message"] for line in result.output.splitlines()]
    return [f"{message['ticket']}.{message['index']}" for message in messages]


def test_all_streams_are_listed_with_what_they_hold(streams):
    listed = {row["stream"]: row for row in json.loads(streams("show", "--json").output)}
    assert listed["prompts"]["redis_entries"] == 5
    assert (listed["commits"]["first_id"], listed["commits"]["last_id"]) == ("1-0", "2-0")
    assert listed["scores:eval"]["redis_entries"] == 0 and listed["scores:eval"]["last_time"] is None
    assert "trajectories" in streams("show").output


def test_readers_are_listed_with_what_they_hold(streams, act, keys):
    async def take_three(broker: Broker) -> Any:
        key = keys.trajectories()
        async with Consumer(
            broker, key, REWARD_GROUP, "s", Trajectory, lease_s=60, dead_key=keys.dead
        ) as consumer:
            await consumer.fetch(3, 1.0)
            return await asyncio.to_thread(lambda: json.loads(streams("show", "--json").output))

    row = next(row for row in act(take_three) if row["stream"] == "trajectories")
    assert (row["group"], row["pending"]) == ("reward", 3)


def test_the_tail_is_the_newest_in_their_order(streams):
    assert samples(streams("tail", "scores", "-n", "3", "--json")) == ["3.1", "4.0", "4.1"]


@pytest.mark.parametrize(
    ("stream", "options", "expected"),
    [
        ("trajectories", ["--ticket", "3"], ["3.0", "3.1"]),
        ("trajectories", ["--step", "1..", "--worker", "rollout-0"], ["2.0", "2.1", "4.0", "4.1"]),
        ("trajectories", ["--reward", "0.75.."], ["0.0", "3.1", "4.1"]),
        ("trajectories", ["--reward", "..-0.5"], ["4.0"]),
        ("trajectories", ["--version", "1..1"], ["4.1"]),
        ("trajectories", ["--time", "2026-09-21T14:13:20Z..2026-09-21T14:13:23Z"], ["0.0", "1.0"]),
        ("scores", ["--step", "0"], ["0.0", "0.1", "1.0", "1.1"]),
        ("scores", ["--version", "1.."], ["4.1"]),
        ("trajectories", ["--reward", "5.."], []),
        ("trajectories", ["--reward", "0.75..", "--ticket", "..3"], ["0.0", "3.1"]),
        ("scores", ["--ticket", "..0", "--reward", "0"], ["0.1"]),
    ],
)
def test_a_part_is_selected_by_what_it_belongs_to(streams, stream, options, expected):
    assert samples(streams("tail", stream, *options, "-n", "20", "--json")) == expected


def test_an_entry_is_shown_by_sample_number_or_id(streams):
    assert "completion 1 of ticket 4" in streams("show", "trajectories", "4.1").output
    assert samples(streams("show", "scores", "1", "--json")) == ["1.0", "1.1"]
    assert "zero_variance" in streams("show", "commits", "1").output
    assert streams("show", "commits", "2-0").output == streams("show", "commits", "1").output


def test_found_texts_come_with_their_samples_and_each_prompt_once(streams):
    found = [
        json.loads(line) for line in streams("grep", "ticket 3|READ 3", "-i", "--json").output.splitlines()
    ]
    assert [(hit["field"], hit["ticket"], hit["index"]) for hit in found] == [
        ("prompt", 3, 0),
        ("completion", 3, 0),
        ("completion", 3, 1),
        ("detail.judge.words", 3, 0),
        ("detail.judge.words", 3, 1),
    ]
    (place,) = found[0]["matches"]
    assert found[0]["text"][place["start"] : place["end"]] == place["text"] == "ticket 3"


def test_a_search_stops_where_it_shall_and_says_when_there_is_nothing(streams):
    few = streams("grep", "ticket", "-n", "2", "--reward", "..-0.5")
    assert few.exit_code == 0 and few.output.count("4.0") == 2
    assert streams("grep", "ticket 3", "--reward", "1..").exit_code == 1
    assert "no answer within" in streams("grep", "no answer", "--stream", "scores").output
    assert "read 4.1" in streams("grep", r"read 4\.1$", "--stream", "scores").output


@pytest.mark.parametrize(
    "line",
    [
        ("tail", "trajectories", "-n", "20", "--full"),
        ("tail", "trajectories", "-n", "20"),
        ("tail", "dead"),
        ("show", "trajectories", "9.0"),
        ("show", "trajectories", "9.0", "--full"),
        ("grep", "owned", "--full"),
        ("grep", "(?s)bold.*"),
        ("grep", "owned", "--stream", "dead"),
    ],
)
def test_what_a_model_has_written_is_shown_and_does_nothing(streams, line):
    shown = streams(*line).output
    assert "owned" in shown or "bold" in shown
    assert "\x1b" not in shown and "\x07" not in shown and RIGHT_TO_LEFT not in shown
    if "--full" not in line:
        assert len(shown) < 50_000


def test_long_texts_are_cut_with_a_note(streams):
    assert "more characters; --full shows all" in streams("show", "trajectories", "9.0").output
    assert "more characters" not in streams("show", "trajectories", "9.0", "--full").output


def test_an_entry_that_cannot_be_decoded_is_shown_as_what_it_is(streams):
    (line,) = streams("tail", "trajectories", "-n", "1", "--json").output.splitlines()
    assert "cannot be read by this version" in json.loads(line)["error"]
    assert "cannot be decoded" in streams("tail", "trajectories", "-n", "1").output
    assert "cannot be decoded" in streams("show", "trajectories", json.loads(line)["id"]).output


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (("tail", "rollouts"), "there is no stream 'rollouts'. There are prompts"),
        (("tail", "scores", "--step", "5..2"), "holds nothing"),
        (("tail", "scores", "--step", "few"), "--step 'few' is not understood"),
        (("tail", "scores", "--time", "yesterday"), "--time 'yesterday' is not understood"),
        (("tail", "prompts", "--reward", "1"), "--reward does not apply to the stream prompts"),
        (("tail", "scores", "--lane", "test"), "lanes train and eval"),
        (("show", "trajectories", "four"), "is no ticket"),
        (("show", "commits", "1.2"), "an id such as 13-0, or a step"),
        (("show", "commits", "77"), "has no entry 77 in commits"),
        (("grep", "("), "no regular expression"),
    ],
)
def test_mistakes_are_answered_in_plain_words(streams, line, words):
    with pytest.raises(ConfigError) as caught:
        streams(*line)
    assert words in str(caught.value) and caught.value.exit_code == 2


def test_what_comes_is_followed_until_it_is_ended(streams, redis_server, keys, monkeypatch):
    from tidemill.services.console.records import streams as commands

    printed: list[int] = []
    monkeypatch.setattr(
        commands, "_print_records", lambda view, stream, records: printed.append(len(records))
    )

    pause = asyncio.sleep

    async def write_on(seconds: float) -> None:
        """In the place of a pause: two entries come, of which one is selected; then the person has enough."""
        if seconds == 0:  # no pause, but a turn of the loop
            return await pause(0)
        if len(printed) > 1:
            raise KeyboardInterrupt
        broker = await Broker.connect(redis_server.url)
        await append(broker, keys.trajectories(), make_trajectory(3, 2), make_trajectory(8, 0))
        await broker.close()

    monkeypatch.setattr(commands.asyncio, "sleep", write_on)
    streams("tail", "trajectories", "--ticket", "3", "--follow")
    assert printed == [2, 1]
