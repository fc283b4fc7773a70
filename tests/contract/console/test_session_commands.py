"""Commands that look at a run, on one whose samples are sessions: turn by turn, and nothing of them lost."""

import json

import pytest

from tests.conftest import SERVERS
from tests.support.histories import BEGIN, trajectories, write_small_run
from tests.support.recorded_sessions import ANSWER, QUESTION, RESULT, SECOND, as_session
from tests.support.traces import problems_of

HOSTILE = "[bold red]\x1b[2J\u202e"

# What differs between servers is hidden by `History`, and tested there.
pytestmark = pytest.mark.parametrize("redis_server", sorted(SERVERS)[:1], indirect=True)


@pytest.fixture
def shown(act, keys, tidemill):
    """What a command prints on the small run played as sessions; the words of 7.0 mean harm, 7.1 has none."""
    first, second = [one.model_copy(update={"ticket": 7}) for one in trajectories()[:2]]
    calls = [{"function": {"name": HOSTILE, "arguments": {"x": HOSTILE}}}, "no call", {"function": None}]
    odd = as_session(first, messages=({"role": HOSTILE}, {"role": "assistant", "tool_calls": calls}))
    silent = as_session(second, messages=())
    act(lambda broker: write_small_run(broker, keys, odd, silent, has_sessions=True))
    return lambda *words: tidemill(*words).output


def test_a_session_is_traced_turn_by_turn(shown):
    printed = shown("trace", "4.1")
    order = ["I ask the calculator.", f"calculator({QUESTION})", RESULT, ANSWER, "Say it again.", SECOND]
    places = [printed.index(words) for words in order]
    assert places == sorted(places), "what was said, in its order"
    for expected in (
        "tools", "3, 1 fork, truncated by max_tokens", "10 of the model, 4 of the environment",
        "1.0 s in the engine, 250 ms in the environment", "0.75 from the environment",
        "1 attempt before this one ended in an environment's fault", "2, 1 wrong", "0.125", "0 → 1",
        "fork 1: 6 tokens of prompt, 4 after it, 3 of them trained",
    ):  # fmt: skip
        assert expected in printed, expected


def test_programs_get_every_turn_with_its_words(shown):
    (sample,) = json.loads(shown("trace", "4.1", "--json"))["samples"]
    turns = sample["turns"]
    assert [(turn["segment"], turn["versions"], turn["num_answer_tokens"]) for turn in turns] == [
        (0, [0, 1], 3), (0, [1], 0), (1, [3], 1),
    ]  # fmt: skip
    assert [answer["content"] for answer in turns[0]["answers"]] == [RESULT]
    assert [turn["said"]["content"] for turn in turns[1:]] == [ANSWER, SECOND]
    assert sample["trajectory"]["session"]["forks"][0]["completion_ids"] == [50, 51, 52, 53]


def test_messages_that_fit_no_turn_are_shown_by_themselves(shown):
    assert "which turn said which message is not known" in shown("trace", "7.0")
    (sample,) = json.loads(shown("trace", "7.0", "--json"))["samples"]
    assert [turn["said"] for turn in sample["turns"]] == [None, None, None]
    assert SECOND in shown("trace", "7.1"), "its text, where there are no messages"


@pytest.mark.parametrize("words", [("trace", "7.0"), ("streams", "show", "trajectories", "7.0")])
def test_what_a_session_says_does_nothing(shown, words):
    printed = shown(*words)
    assert "[bold red]" in printed and "\x1b" not in printed and "\u202e" not in printed


def test_a_group_and_a_stream_list_turns_and_all_tokens(shown):
    printed = shown("trace", "3")
    assert "turns" in printed and " 14 " in printed
    assert "14, 3 turns" in shown("streams", "tail", "trajectories")
    whole = shown("streams", "show", "trajectories", "3.0")
    assert RESULT in whole and "truncated by max_tokens" in whole
    tree = json.loads(shown("streams", "show", "trajectories", "3.0", "--json"))
    assert tree["message"]["session"]["messages"][1]["content"] == RESULT


def test_words_of_a_session_are_found_once_with_their_place(shown):
    def found(pattern: str) -> list[str]:
        lines = shown("streams", "grep", pattern, "--ticket", "3", "--json")
        return [json.loads(line)["field"] for line in lines.splitlines()]

    assert found("391 exactly") == ["messages.1.content"] * 2
    assert found(r"17 \* 23") == ["messages.0.tool_calls.0.function.arguments"] * 2
    assert found("said it before") == ["messages.4.content"] * 2, "and not in the completion again"


def test_a_step_says_what_its_sessions_were(shown):
    printed = shown("step", "1")
    for expected in (
        "mean 3, 3 to 3 a session", "40 tokens of the model, 16 of the environment",
        "4.0 s for the engine, 1.0 s for the environment", "4 by max_tokens", "4 in 4 sessions",
    ):  # fmt: skip
        assert expected in printed, expected
    tree = json.loads(shown("step", "1", "--json"))
    assert [batch["num_tokens"] for batch in tree["micro_batches"]] == [28, 28]
    assert tree["groups"][0]["samples"][0]["session"]["turns"][0]["num_calls"] == 2


def test_generation_and_environment_alternate_on_the_timeline(shown, tmp_path):
    file = tmp_path / "trace.json"
    shown("timeline", "--from-step", "0", "--to-step", "1", "-o", str(file))
    events = json.loads(file.read_text())["traceEvents"]
    assert problems_of(events) == []
    (sample,) = [e for e in events if e["name"] == "4.1" and e["ph"] == "X" and "tokens" in e["args"]]
    lane = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (sample["pid"], sample["tid"])]
    inside = [e for e in lane if e["name"].startswith("turn") and 0 <= e["ts"] - sample["ts"] < sample["dur"]]
    assert [(e["name"], e["dur"]) for e in inside] == [
        ("turn 0: generation", 500_000), ("turn 0: environment", 250_000), ("turn 1: generation", 375_000),
        ("turn 2: generation", 125_000),
    ]  # fmt: skip
    assert sample["ts"] == inside[0]["ts"] == 14_000_000 and sample["args"]["tokens"] == 14, BEGIN
