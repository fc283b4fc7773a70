"""Requests as clients send them, and answers as they read them."""

from typing import Any

import pytest

from tidemill.services.rollout.gateway.apis import responses_answer, responses_question
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
