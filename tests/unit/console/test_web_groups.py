"""What the pages hold in memory and make of it, without a run: groups, queries, texts, chats."""

import math

import numpy as np
import pytest

from tests.support.recorded_sessions import MESSAGES, as_session
from tests.support.trajectories import make_trajectory
from tests.support.web_runs import commit_of, completion, question, score_of
from tidemill.common.wire.messages import Lane, Score, ScoreStatus
from tidemill.services.console.records.joins import SampleRecord
from tidemill.services.console.records.sessions import read_session
from tidemill.services.console.text.formats import duration, took, when
from tidemill.services.console.web import texts
from tidemill.services.console.web.groups import (
    MAX_TEXT_CHARACTERS,
    GroupIndex,
    GroupQuery,
    GroupRow,
    Spread,
    range_of,
)
from tidemill.services.console.web.texts import message_of, prompt_messages, training_of, visible


def test_a_spread_is_that_of_all_numbers() -> None:
    values = [1e6 + 0.1, 1e6 + 0.2, 1e6 + 0.4]
    spread = Spread()
    for value in values:
        spread.add(value)
    assert spread.mean == pytest.approx(np.mean(values))
    assert spread.std == pytest.approx(np.std(values, ddof=1))
    assert (spread.count, spread.least, spread.most) == (3, values[0], values[2])


def test_a_group_has_come_as_far_as_the_first_entries_of_its_keys_say() -> None:
    index = GroupIndex()
    index.add(Lane.TRAIN, "1-0", question(1))
    row = index.get(1)
    assert row is not None and row.state == "issued"
    for entry in range(8):  # each of four comes twice
        index.add(Lane.TRAIN, f"{entry + 1}-1", completion(1, entry // 2, "text"))
        assert row.state == ("generating" if entry < 6 else "generated")
    for entry in range(8):
        index.add(Lane.TRAIN, f"{entry + 1}-2", score_of(1, entry // 2))
    assert (row.state, row.lengths.count, row.num_failed, row.rewards.count) == ("scored", 4, 1, 3)
    assert (row.trajectories, row.scores) == (("1-1", "7-1"), ("1-2", "7-2"))
    index.add(Lane.TRAIN, "1-0", commit_of(0))
    assert row.state == "trained" and row.known_places(False).step == 0 and row.num_dropped == 1
    index.add(Lane.TRAIN, "2-0", commit_of(1).model_copy(update={"dropped": ((9, -1, "zero_variance"),)}))
    left_out = index.get(9)
    assert left_out is not None and (left_out.state, left_out.step) == ("dropped", 1)


def test_memory_is_bounded_whatever_entries_hold() -> None:
    row = GroupRow(0)
    for i in range(4096):
        made = make_trajectory(0, i, "x" * 10_000, worker=f"worker-{i}", prompt_text="y" * 9999)
        row.add_trajectory(f"{i + 1}-0", made)
    assert len(row.text) <= MAX_TEXT_CHARACTERS and len(row.workers) == 4 and len(row.prompt) <= 240
    row.add_score("1-0", Score(ticket=0, index=1 << 40, status=ScoreStatus.OK, value=1.0))
    assert row.rewards.count == 0, "an impossible index takes no memory"
    index = GroupIndex(max_groups=10)
    for ticket in range(25):
        index.add(Lane.TRAIN, f"{ticket + 1}-0", question(ticket))
    for ticket in range(25):
        index.add(Lane.TRAIN, f"{ticket + 1}-1", completion(ticket, 0, "text"))
    assert sorted(index.groups[Lane.TRAIN]) == list(range(15, 25)) and index.num_forgotten == 15


def test_an_address_is_read_as_people_type_it_and_says_all_of_a_query_and_no_default() -> None:
    ranges = {"12": (12, 12), "1..2": (1, 2), "..-0.5": (None, -0.5), "3..": (3, None), "x": None, "..": None}
    assert {typed: range_of(typed) for typed in ranges} == ranges
    typed = {"lane": "eval", "reward": "..1", "text": "a&b", "sort": "std", "order": "up", "page": "3"}
    assert GroupQuery.parse(typed).address() == "?lane=eval&reward=..1&text=a%26b&sort=std&order=up&page=3"
    assert GroupQuery.parse({}).address() == "?"
    odd = {"page": "-1", "sort": "nothing", "state": "x", "order": "sideways", "lane": "x"}
    assert GroupQuery.parse(odd).address() == "?"
    assert GroupQuery.parse({"step": "many", "reward": "1"}).misunderstood == ["step"]


def test_unseen_characters_become_marks_and_everything_is_escaped() -> None:
    assert visible("a<b>\x1b\x7f&\u202e") == (
        'a&lt;b&gt;<span class="ctl">ESC DEL</span>&amp;<span class="ctl">U+202E</span>'
    )
    assert visible("y" * 2000, 1000).endswith('y…<span class="hint"> 1,000 more characters</span>')
    assert visible("x" * 100, 10) == "x" * 10 + "…" and visible(None) == ""
    assert visible("line\n\ttab") == "line\n\ttab" and texts.sendable("half \ud800") == "half ?"


def test_numbers_read_well() -> None:
    assert texts.number(-0.00123456, 3) == "−0.00123" and texts.number(12345.0) == "12\u202f345"
    assert texts.number(None) == "–" and texts.number(math.nan) == "nan" and texts.signed(0.5) == "+0.5"
    assert texts.span(1, 1) == "1" and texts.span(1, 2.5) == "1–2.5"
    assert took(0.0123) == "12 ms" and took(3700) == "1 h 01 min" and took(math.nan) == "–"
    assert when(1e300) == "–"
    durations = {41.6: "42 s", 185: "3 min 05 s", 7620: "2 h 07 min", 59.7: "1 min 00 s"}
    assert {seconds: duration(seconds) for seconds in durations} == durations


RENDERED = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi\nyou<|im_end|>\n"
    "<|im_start|>assistant\n",
    "llama": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi\nyou<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "zephyr": "<|system|>\nBe brief.</s>\n<|user|>\nHi\nyou</s>\n<|assistant|>\n",
}


def test_a_prompt_is_a_chat_as_its_template_marks_it_or_its_row_has_it() -> None:
    for name, rendered in RENDERED.items():
        ticket = question(0).model_copy(update={"prompt_text": rendered})
        found = [(message.kind, message.text.removesuffix("</s>\n")) for message in prompt_messages(ticket)]
        assert found == [("system", "Be brief."), ("user", "Hi\nyou")], name
    for text in ("2 + 3 =", f"Explain this: {RENDERED['chatml']}", ""):
        assert prompt_messages(question(0).model_copy(update={"prompt_text": text})) == []
    chat = [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}, "no message"]
    row = {"prompt_text": "x", "extra": {"prompt": chat}}
    (only,) = prompt_messages(question(0).model_copy(update=row))
    assert (only.role, only.kind, only.text) == ("developer", "system", "Be brief.")


def test_a_message_has_its_calls_with_readable_arguments() -> None:
    call = {"function": {"name": "search", "arguments": '{"words":["a","é"]}'}}
    made = message_of({"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"})
    assert made.calls == (("search", '{\n "words": [\n  "a",\n  "é"\n ]\n}'),) and made.thoughts == "hm"
    assert message_of(MESSAGES[0]).calls == (("calculator", "17 * 23"),), "what is no JSON is left as it is"
    assert message_of({"role": "<b>", "content": 3}).kind == "other"


def test_what_was_trained_is_counted_by_turn_and_by_sample() -> None:
    made = as_session(completion(0, 0, ""))
    sample = SampleRecord(0, made)
    turns = [training_of(sample, "", turn) for turn in read_session(made).turns]
    assert [(t.num_tokens, t.num_trained) for t in turns] == [(4, 4), (3, 3), (3, 3)]
    assert training_of(sample, "") == (14, 10, ""), "the environment's four are not"
    assert training_of(SampleRecord(0, made, left_out="too old"), "").why_not == "left out: too old"
    assert training_of(sample, "of an evaluation").why_not == "of an evaluation"
    single = completion(0, 0, "").model_copy(update={"loss_mask": np.zeros(6, dtype=bool)})
    assert training_of(SampleRecord(0, single), "").num_trained == 0
