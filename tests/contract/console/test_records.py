"""`tidemill streams`, `trace` and `step` on a run whose every number was written down before.

Some texts of it mean harm: what a model, a judge or a broken process has written is shown and does nothing.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import SERVERS
from tests.support.histories import DIGESTS, commits, letters, trajectories, write_small_run
from tests.support.numbered import append_numbered
from tests.support.recorded_sessions import ANSWER, QUESTION, RESULT, SECOND, as_session
from tests.support.traces import problems_of
from tests.support.trajectories import make_config, make_trajectory
from tidemill.common.errors import ConfigError
from tidemill.common.history import History
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import PROFILES, publish_config
from tidemill.common.streams import append
from tidemill.common.streams.consumer import Consumer
from tidemill.common.wire.keys import REWARD_GROUP
from tidemill.common.wire.messages import FIRST_DEMONSTRATION, Score, ScoreStatus, Trajectory
from tidemill.services.console.look import streams
from tidemill.services.console.look.joins import STAGES, SampleFacts
from tidemill.services.console.look.timeline import Stretch, Trace, read_stretch

ESCAPE = "\x1b[2J\x1b]0;owned\x07"
RIGHT_TO_LEFT = "\u202e"
HOSTILE = f"[bold red]{ESCAPE}{RIGHT_TO_LEFT}\nfake line" + "x" * 100_000

# What differs between servers is hidden by `History`, and tested there.
pytestmark = pytest.mark.parametrize("redis_server", sorted(SERVERS)[:1], indirect=True)


@pytest.fixture
def call(act, keys, tidemill) -> Callable[..., str]:
    """What a command prints on the small run. Ticket 3 has a second score, ticket 7 waits for more of
    everything, ticket 9 is hostile, and the last trajectory cannot be decoded."""
    again = Score(ticket=3, index=0, status=ScoreStatus.OK, value=9.0, worker="reward-late")
    tried = Score(
        ticket=7, index=0, status=ScoreStatus.OK, value=1.0, attempts=2, worker="reward-0", latency_s=3.5,
        tries=(("judge", 2.0, 0.0, f"HTTP 429 {HOSTILE[:50]}"), ("judge", 1.0, 0.5, "")),
    )  # fmt: skip
    waiting = [make_trajectory(7, index, group_size=4, text=HOSTILE, worker=HOSTILE) for index in (0, 1)]
    hostile = make_trajectory(9, 0, text=HOSTILE, prompt_text=HOSTILE, worker=HOSTILE)

    async def write(broker: Broker) -> None:
        await write_small_run(broker, keys, again, tried, *waiting, hostile, *letters(error=HOSTILE))
        await broker.execute("XADD", keys.trajectories(), "*", "v", "9.0", "p", HOSTILE.encode())

    act(write)
    return lambda *words: tidemill(*words).output


@pytest.fixture
def played(act, keys, tidemill) -> Callable[..., str]:
    """The same on the small run played as sessions; the words of 7.0 mean harm, 7.1 has none."""
    samples = trajectories()
    first = samples[0].model_copy(update={"ticket": 7})
    second = samples[1].model_copy(update={"ticket": 7})
    name = HOSTILE[:60]
    calls = [{"function": {"name": name, "arguments": {"x": name}}}, "no call", {"function": None}]
    odd = as_session(first, messages=({"role": name}, {"role": "assistant", "tool_calls": calls}))
    silent = as_session(second, messages=())
    act(lambda broker: write_small_run(broker, keys, odd, silent, has_sessions=True))
    return lambda *words: tidemill(*words).output


def samples(printed: str) -> list[str]:
    messages = [json.loads(line)["message"] for line in printed.splitlines()]
    return [f"{message['ticket']}.{message['index']}" for message in messages]


def assert_shown(call: Callable[..., str], expected: dict[str, tuple[str, ...]]) -> None:
    printed = {line: call(*line.split()) for line in expected}
    missing = {}
    for line, words in expected.items():
        missing[line] = [word for word in words if word not in printed[line]]
    assert missing == {line: [] for line in expected}


def test_all_streams_are_listed_with_what_they_hold_and_their_readers(call, act, keys):
    async def take_three(broker: Broker) -> Any:
        key = keys.trajectories()
        consumer = Consumer(broker, key, REWARD_GROUP, "s", Trajectory, lease_s=60, dead_key=keys.dead)
        async with consumer:
            await consumer.fetch(3, 1.0)
            return await asyncio.to_thread(lambda: json.loads(call("streams", "show", "--json")))

    listed = {row["stream"]: row for row in act(take_three)}
    assert listed["prompts"]["redis_entries"] == 5 and listed["prompts"]["group"] == ""
    assert (listed["commits"]["first_id"], listed["commits"]["last_id"]) == ("1-0", "2-0")
    assert listed["scores:eval"]["redis_entries"] == 0 and listed["scores:eval"]["last_time"] is None
    assert (listed["trajectories"]["group"], listed["trajectories"]["pending"]) == ("reward", 3)
    assert "reward: " in call("streams", "show")


def test_a_part_of_a_stream_is_selected_by_what_it_belongs_to(call):
    for line, expected in {
        "scores -n 4 --ticket ..4": ["3.1", "4.0", "4.1", "3.0"],
        "trajectories --ticket 3": ["3.0", "3.1"],
        "trajectories --step 1.. --worker rollout-0": ["2.0", "2.1", "4.0", "4.1"],
        "trajectories --reward 0.75..1 --ticket ..4": ["0.0", "3.1", "4.1"],
        "trajectories --reward ..-0.5": ["4.0"],
        "trajectories --version 1..1": ["4.1"],
        "trajectories --time 2026-09-21T14:13:20Z..2026-09-21T14:13:23Z": ["0.0", "1.0"],
        "scores --step 0 --ticket ..4": ["0.0", "0.1", "1.0", "1.1"],
        "scores --version 1..": ["4.1"],
        "scores --ticket ..0 --reward 0": ["0.1"],
        "trajectories --reward 50..": [],
        "trajectories --reward 0.75.. --ticket ..2": ["0.0"],
        "prompts --lane eval": [],
    }.items():
        assert samples(call("streams", "tail", *line.split(), "--json")) == expected, line


def test_an_entry_is_shown_by_sample_number_or_id(call):
    assert samples(call("streams", "show", "scores", "1", "--json")) == ["1.0", "1.1"]
    assert call("streams", "show", "commits", "2-0") == call("streams", "show", "commits", "1")
    assert_shown(
        call,
        {
            "streams show trajectories 4.1": ("completion 1 of ticket 4",),
            "streams show commits 1": ("zero_variance",),
            "streams tail weights": ("full", DIGESTS[2]),
            "streams tail commits": ("0.125", DIGESTS[1]),
            "streams tail prompts": ("prompt of ticket 4", "needs version"),
        },
    )


def test_found_texts_come_with_their_samples_and_each_prompt_once(call):
    lines = call("streams", "grep", "ticket 3|READ 3", "-i", "--json").splitlines()
    records = [json.loads(line) for line in lines]
    assert [(hit["field"], hit["ticket"], hit["index"]) for hit in records] == [
        ("prompt", 3, 0),
        ("completion", 3, 0),
        ("completion", 3, 1),
        ("detail.judge.words", 3, 0),
        ("detail.judge.words", 3, 1),
    ]
    (match,) = records[0]["matches"]
    assert records[0]["text"][match["start"] : match["end"]] == match["text"] == "ticket 3"


def test_a_search_stops_where_it_shall_and_its_exit_code_says_whether_there_was_anything(call, tidemill):
    few = tidemill("streams", "grep", "ticket", "-n", "2", "--reward", "..-0.5")
    assert few.exit_code == 0 and few.output.count("4.0") == 2
    assert tidemill("streams", "grep", "ticket 3", "--reward", "10..").exit_code == 1
    assert "no answer within" in call("streams", "grep", "no answer", "--stream", "scores")
    assert "read 4.1" in call("streams", "grep", r"read 4\.1$", "--stream", "scores")
    assert "1.1 failed_score" in call("streams", "grep", "failed", "--stream", "commits")


def assert_harmless(call: Callable[..., str], *lines: str) -> None:
    for line in lines:
        output = call(*line.split())
        assert "owned" in output or "[bold" in output, line
        assert not {"\x1b", "\x07", RIGHT_TO_LEFT} & set(output), line
        assert "--full" in line or len(output) < 80_000


def test_what_others_have_written_is_shown_and_does_nothing(call):
    assert_harmless(
        call,
        "streams tail trajectories -n 20 --full",
        "streams tail trajectories -n 20",
        "streams tail dead",
        "streams show trajectories 9.0",
        "streams show trajectories 9.0 --full",
        "streams grep owned --full",
        "streams grep (?s)bold.*",
        "streams grep owned --stream dead",
        "trace 7",
        "trace 7.0",
    )
    assert "more characters; --full shows all" in call("streams", "show", "trajectories", "9.0")
    assert "more characters" not in call("streams", "show", "trajectories", "9.0", "--full")


def test_an_entry_that_cannot_be_decoded_is_shown_as_what_it_is(call):
    (line,) = call("streams", "tail", "trajectories", "-n", "1", "--json").splitlines()
    assert "cannot be read by this version" in json.loads(line)["error"]
    assert "cannot be decoded" in call("streams", "tail", "trajectories", "-n", "1")
    assert "cannot be decoded" in call("streams", "show", "trajectories", json.loads(line)["id"])


def test_mistakes_are_refused_with_what_is_wrong(call, tmp_path):
    for line, named in {
        "streams tail rollouts": "'rollouts'",
        "streams tail scores:eval --lane train": "--lane",
        "streams tail scores --step 5..2": "5 is greater than 2",
        "streams tail scores --step few": "--step 'few'",
        "streams tail scores --ticket -1": "--ticket",
        "streams tail scores --time yesterday": "--time 'yesterday'",
        "streams tail prompts --reward 1": "--reward",
        "streams show trajectories four": "'four'",
        "streams show commits 1.2": "a step such as",
        "streams show commits 77": "77",
        "streams show scores": "which entry",
        "streams grep (": "'('",
        "trace 99": "tickets 0 to 4",
        "trace 3.7": "0, 1",
        "trace x.1": "'x.1'",
        "step 7": "steps 0 to 1",
        f"step 5..9 -o {tmp_path}/a": "steps 5 to 9",
        f"step 1..0 -o {tmp_path}/a": "1..0",
        "step 0..1": "-o trace.json",
        f"step 0..1 -o {tmp_path}/nowhere/a": "nowhere",
    }.items():
        with pytest.raises(ConfigError) as caught:
            call(*line.split())
        assert named in str(caught.value) and caught.value.exit_code == 2, line


def test_what_comes_is_followed_until_it_is_ended(call, redis_server, keys, monkeypatch):
    printed: list[int] = []
    monkeypatch.setattr(streams, "_print_records", lambda view, stream, records: printed.append(len(records)))
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

    monkeypatch.setattr(streams.asyncio, "sleep", write_on)
    call("streams", "tail", "trajectories", "--ticket", "3", "--follow")
    assert printed == [2, 1]


def test_a_sample_leads_to_its_step_and_a_dropped_group_to_the_one_that_replaced_it(call):
    def traced(words: str) -> Any:
        return json.loads(call("trace", words, "--json"))

    tree = traced("4.1")
    (sample,) = tree["samples"]
    assert tree["commit"]["step"] == 1 and tree["is_trained"]
    assert sample["places"] == [{"mini_batch": 0, "micro_batch": 1, "position": 1}]
    assert (sample["advantage"], sample["score"]["value"]) == (1.0, 1.0)
    assert tree["commit"]["digest"] == tree["manifest"]["digest"] == DIGESTS[2]
    left_out = [(s["advantage"], s["left_out"]) for s in traced("1")["samples"]]
    assert left_out == [(0.0, ""), (None, "failed_score")], "advantages stay with their samples"
    tree = traced("2")
    assert (tree["is_trained"], tree["dropped_as"], tree["replaced_by"]) == (False, "zero_variance", 4)
    (first,) = traced("3.0")["samples"]
    assert (first["score"]["value"], first["later_scores"][0]["value"]) == (0.25, 9.0), "the first counts"


def test_a_trace_shows_what_became_of_a_ticket_and_of_a_sample(call):
    assert_shown(
        call,
        {
            "trace 4.1": (
                "1 made tokens 2 to 2",
                "the judge read 4.1",
                "completion 1 of ticket 4",
                "micro 1",
            ),
            "trace 3": ("3.0", "3.1", "0.25", "0.75", "rollout-1", "completion 0 of ticket 3"),
            "trace 1.1": ("failed_score", "no answer within 5 s"),
            "trace 2": ("zero_variance", "ticket 4", "it could not be read"),
            "trace 4": ("ticket 2",),
            "trace 3.0": ("9 from reward-late",),
            "trace 7.0": ("2.0 s: HTTP 429", "500 ms: answered", "2 of 4 samples generated, 1 scored"),
        },
    )


def test_the_parts_of_a_step_add_up(call, act, keys):
    tree = json.loads(call("step", "1", "--json"))
    assert [group["ticket"] for group in tree["groups"]] == [3, 4]
    rewards = []
    for group in tree["groups"]:
        rewards.append([sample["reward"] for sample in group["samples"]])
    assert rewards == [[0.25, 0.75], [-1.0, 1.0]]
    assert tree["commit"]["dropped"] == [[2, -1, "zero_variance"]] and tree["reversed_groups"] == []
    assert [batch["keys"] for batch in tree["micro_batches"]] == [[[4, 0], [3, 0]], [[3, 1], [4, 1]]]
    assert [batch["num_tokens"] for batch in tree["micro_batches"]] == [6, 6]
    sample = json.loads(call("step", "0", "--json"))["groups"][1]["samples"][0]
    assert sample["key"] == [1, 0] and list(sample["stages_s"]) == list(STAGES)
    assert list(sample["stages_s"].values()) == pytest.approx([1.0, 2.0, 0.3, 0.2, 6.0], abs=1e-5)
    advantages = {"3": [1.0, -1.0], "4": [-1.0, 1.0]}
    fields = {"step": 2, "version": 3, "passes": 3, "advantages": advantages}
    flipped = commits()[1].model_copy(update=fields)
    act(lambda broker: append_numbered(broker, keys.commits, [(2, flipped)]))
    assert json.loads(call("step", "2", "--json"))["reversed_groups"] == [3]
    assert "times over" not in call("step", "1")
    assert_shown(
        call,
        {
            "step 0": ("failed_score: 1 sample (1.1)",),
            "step 1": (
                "version 1 → 2", "wait groups", "60%", DIGESTS[2], "zero_variance: 1 group (2)",
                "4.1, 7.5 s after the step began: queued 1.0 s, generated 3.0 s",
            ),
            "step 2": ("ticket 3: its advantages fall where its rewards rise", "3 times over"),
        },
    )  # fmt: skip


def test_a_step_to_come_is_profiled_on_request(call, tidemill, act, keys, tmp_path):
    config = make_config(trainer={"steps": 6})
    act(lambda broker: publish_config(broker, keys, config))
    with pytest.raises(ConfigError, match="is not here"):
        tidemill("step", "next", "--profile")
    folder = tmp_path / keys.run_id / PROFILES
    folder.parent.mkdir()
    begun = len(commits())
    assert f"step {begun + 1}" in call("step", "next", "--profile")
    assert f"step {begun + 2}" in call("step", str(begun + 2), "--profile")
    assert sorted(path.name for path in folder.iterdir()) == [f"step-{begun + 1}", f"step-{begun + 2}"]
    for step in (begun, 6):
        with pytest.raises(ConfigError, match="cannot be profiled"):
            tidemill("step", str(step), "--profile")


def test_a_timeline_has_all_of_its_steps_and_what_was_under_way(call, tmp_path, monkeypatch):
    asked: list[object] = []
    for kind in (Trace, Stretch, SampleFacts):  # records are not put into words as the command ends
        monkeypatch.setattr(kind, "__repr__", lambda record: str(asked.append(record)))
    file = tmp_path / "trace.json"

    def names(first: str, last: str) -> set[str]:
        printed = call("step", f"{first}..{last}", "-o", str(file))
        assert "trace.json: steps" in printed
        events = json.loads(file.read_text())["traceEvents"]
        assert problems_of(events) == []
        return {event["name"] for event in events if event["ph"] == "X"}

    assert {"step 0", "step 1", "4.1", "ticket 3", "7.0"} <= names("0", "1")
    later = names("1", "9")
    assert "step 1" in later and not {"step 0", "0.0"} & later, "it begins with the first of its own tickets"
    assert asked == []


def test_a_session_is_traced_turn_by_turn(played):
    assert_harmless(played, "trace 7.0", "streams show trajectories 7.0")
    printed = played("trace", "4.1")
    order = ["I ask the calculator.", f"calculator({QUESTION})", RESULT, ANSWER, "Say it again.", SECOND]
    places = [printed.index(words) for words in order]
    assert places == sorted(places), "what was said, in its order"
    assert_shown(
        played,
        {
            "trace 4.1": (
                "max_tokens",
                "10 of the model",
                "250 ms in the",
                "0.75 from",
                "2, 1 wrong",
                "0 → 1",
            ),
            "trace 7.0": ("which turn said which message is not known",),
            "trace 7.1": (SECOND,),
            "trace 3": ("turns", " 14 "),
            "streams tail trajectories": ("14, 3 turns",),
            "streams show trajectories 3.0": (RESULT, "max_tokens"),
            "step 1": ("mean 3, 3 to 3", "40 tokens", "4.0 s for the engine", "4 by max_tokens", "4 in 4"),
        },
    )


def test_programs_get_every_turn_with_its_words(played):
    (sample,) = json.loads(played("trace", "4.1", "--json"))["samples"]
    turns = sample["turns"]
    numbers = ("segment", "versions", "num_trained", "num_answer_tokens")
    numbers_of_turns = []
    for turn in turns:
        numbers_of_turns.append([turn[name] for name in numbers])
    assert numbers_of_turns == [[0, [0, 1], 4, 3], [0, [1], 3, 0], [1, [3], 3, 1]]
    assert [answer["content"] for answer in turns[0]["answers"]] == [RESULT]
    assert [turn["said"]["content"] for turn in turns[1:]] == [ANSWER, SECOND]
    assert sample["trajectory"]["session"]["forks"][0]["completion_ids"] == [50, 51, 52, 53]
    (sample,) = json.loads(played("trace", "7.0", "--json"))["samples"]
    assert [turn["said"] for turn in sample["turns"]] == [None, None, None], "messages that fit no turn"
    tree = json.loads(played("step", "1", "--json"))
    assert [batch["num_tokens"] for batch in tree["micro_batches"]] == [28, 28]
    assert tree["groups"][0]["samples"][0]["session"]["turns"][0]["num_calls"] == 2


def test_words_of_a_session_are_found_once_with_their_place(played):
    for pattern, field in {
        "391 exactly": "messages.1.content",
        r"17 \* 23": "messages.0.tool_calls.0.function.arguments",
        "said it before": "messages.4.content",  # and not in the completion again
    }.items():
        lines = played("streams", "grep", pattern, "--ticket", "3", "--json").splitlines()
        assert [json.loads(line)["field"] for line in lines] == [field] * 2


def test_generation_and_environment_alternate_on_the_timeline(played, tmp_path):
    file = tmp_path / "trace.json"
    played("step", "0..1", "-o", str(file))
    events = json.loads(file.read_text())["traceEvents"]
    assert problems_of(events) == []
    (sample,) = [e for e in events if e["name"] == "4.1" and e["ph"] == "X" and "tokens" in e["args"]]
    lane = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (sample["pid"], sample["tid"])]
    inside = [e for e in lane if e["name"].startswith("turn") and 0 <= e["ts"] - sample["ts"] < sample["dur"]]
    assert [(e["name"], e["dur"]) for e in inside] == [
        ("turn 0: generation", 500_000), ("turn 0: environment", 250_000), ("turn 1: generation", 375_000),
        ("turn 2: generation", 125_000),
    ]  # fmt: skip
    assert sample["ts"] == inside[0]["ts"] == 14_000_000 and sample["args"]["tokens"] == 14


async def test_a_timeline_of_a_step_with_demonstrations_has_no_samples_of_later_steps(broker, keys) -> None:
    """Numbers of demonstrations are above those of all tickets."""
    demonstration = make_trajectory(FIRST_DEMONSTRATION + 1, 0, worker="trainer")
    later = make_trajectory(90, 0)
    commit = commits()[0]
    groups = (*commit.groups, demonstration.ticket)
    await append(broker, keys.trajectories(), demonstration, *trajectories(), later)
    await append_numbered(broker, keys.commits, [(0, commit.model_copy(update={"groups": groups}))])
    stretch = await read_stretch(History(keys.run_id, None, broker), 0, 0, max_staleness=1)
    assert {(0, 0), (4, 1), demonstration.key} <= stretch.samples.keys()
    assert later.key not in stretch.samples
