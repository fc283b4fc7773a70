"""Requests as clients send them, and answers as they read them."""

from typing import Any

import pytest

from tidemill.services.rollout.gateway.apis import (
    anthropic_answer,
    anthropic_events,
    anthropic_question,
    chat_question,
    responses_answer,
    responses_question,
)
from tidemill.services.rollout.gateway.dialogue import Answer, RequestError
from tidemill.services.rollout.sessions.chat import call_of

CLOSE = {"type": "function", "name": "close", "parameters": {"type": "object"}}
SEARCH = {"type": "web_search", "external_web_access": False}
BODY: dict[str, Any] = {
    "input": [{"role": "user", "content": "go"}],
    "tools": [CLOSE, {"type": "namespace", "name": "agents", "tools": [CLOSE]}, SEARCH],
}


def test_functions_of_a_namespace_are_functions_that_have_it_in_their_names() -> None:
    """As codex 0.171 offers them, and its search in what a provider has stored."""
    question = responses_question(BODY)
    assert [tool["function"]["name"] for tool in question.tools] == ["close", "agents__close"]
    calls = [call_of(f"call_{name}", name, "{}") for name in ("close", "agents__close")]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    items = responses_answer(Answer("a", message, "tool_calls", 1, 2), "m", BODY)["output"]
    assert [(item["name"], item.get("namespace")) for item in items] == [("close", None), ("close", "agents")]
    # What the client sends back is what was said.
    outputs = [{"type": "function_call_output", "call_id": item["call_id"], "output": "7"} for item in items]
    later = responses_question(BODY | {"input": [*BODY["input"], *items, *outputs]})
    assert later.identities[1] == ("assistant", "", (("close", "{}"), ("agents__close", "{}")))


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "web_search"},
        {"type": "namespace", "name": "n", "tools": [{"type": "file_search", "name": "x"}]},
        {"type": "namespace", "name": "n", "tools": 7},
    ],
)
def test_tools_that_a_provider_runs_are_refused(tool: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        responses_question(BODY | {"tools": [tool]})


def test_an_answer_that_calls_tools_ends_with_them_also_where_a_stop_sequence_has_cut_it() -> None:
    message = {"role": "assistant", "content": "so", "tool_calls": [call_of("c", "close", "{}")]}
    answer = Answer("a", message, "tool_calls", 1, 2, stop_sequence="STOP")
    whole = anthropic_answer(answer, "m", {})
    start, *_, message_delta, _ = anthropic_events(answer, "m", {})
    ends = [
        (said["stop_reason"], said["stop_sequence"])
        for said in (whole, start["message"], message_delta["delta"])
    ]
    assert ends == [("tool_use", None), (None, None), ("tool_use", None)]


@pytest.mark.parametrize(
    ("blocks", "roles"),
    [
        ([], ["user"]),
        ([{"type": "text", "text": ""}], ["user"]),
        ([{"type": "tool_result", "tool_use_id": "c", "content": "7"}], ["tool"]),
        (
            [
                {"type": "tool_result", "tool_use_id": "c", "content": "7"},
                {"type": "text", "text": ""},
            ],
            ["tool"],
        ),
        (
            [
                {"type": "text", "text": "on"},
                {"type": "tool_result", "tool_use_id": "c", "content": "7"},
            ],
            ["tool", "user"],
        ),
    ],
)
def test_results_of_tools_are_messages_before_what_else_a_message_says(blocks, roles):
    question = anthropic_question({"messages": [{"role": "user", "content": blocks}]})
    assert [message["role"] for message in question.messages] == roles


@pytest.mark.parametrize(
    ("last", "continues", "is_taken"),
    [
        ("assistant", True, True),
        ("assistant", None, True),
        ("assistant", False, False),
        ("user", False, True),
        ("user", True, False),
    ],
)
def test_whether_a_last_message_is_continued_is_no_choice_of_the_client(last, continues, is_taken):
    body = {"messages": [{"role": last, "content": "It is"}], "continue_final_message": continues}
    if is_taken:
        assert chat_question(body).messages[-1]["role"] == last
    else:
        with pytest.raises(RequestError, match="continue_final_message"):
            chat_question(body)
