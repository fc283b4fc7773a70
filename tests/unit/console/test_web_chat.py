"""Prompts and sessions as chats: roles as templates mark them, calls, and what was trained."""

import numpy as np
import pytest

from tests.support.recorded_sessions import MESSAGES, as_session
from tests.support.web_runs import completion, make_ticket
from tidemill.common.history.records import SampleRecord
from tidemill.common.history.sessions import read_session
from tidemill.services.console.web.texts import message_of, prompt_messages, training_of

RENDERED = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi\nyou<|im_end|>\n"
    "<|im_start|>assistant\n",
    "llama": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi\nyou<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "zephyr": "<|system|>\nBe brief.</s>\n<|user|>\nHi\nyou</s>\n<|assistant|>\n",
}


@pytest.mark.parametrize("name", RENDERED)
def test_messages_of_a_rendered_prompt_are_told_apart(name: str) -> None:
    ticket = make_ticket(0).model_copy(update={"prompt_text": RENDERED[name]})
    found = [(message.kind, message.text.removesuffix("</s>\n")) for message in prompt_messages(ticket)]
    assert found == [("system", "Be brief."), ("user", "Hi\nyou")]


def test_other_text_is_no_chat_unless_its_row_is_one() -> None:
    for text in ("2 + 3 =", f"Explain this: {RENDERED['chatml']}", ""):
        assert prompt_messages(make_ticket(0).model_copy(update={"prompt_text": text})) == []
    chat = [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}, "no message"]
    (only,) = prompt_messages(
        make_ticket(0).model_copy(update={"prompt_text": "x", "extra": {"prompt": chat}})
    )
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
    whole = training_of(sample, "")
    assert (whole.num_tokens, whole.num_trained) == (14, 10), "the environment's four are not"
    assert training_of(SampleRecord(0, made, left_out="too old"), "").why_not == "left out: too old"
    assert training_of(sample, "of an evaluation").why_not == "of an evaluation"
    single = completion(0, 0, "").model_copy(update={"loss_mask": np.zeros(6, dtype=bool)})
    assert training_of(SampleRecord(0, single), "").num_trained == 0
