"""Anthropic's `/v1/messages`: requests in, answers and events out."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tidemill.services.rollout.gateway.dialogue import (
    Answer,
    Api,
    Body,
    Event,
    Message,
    Question,
    RequestError,
    Tool,
    ToolCall,
    arguments_of,
    limit_of,
    named_results,
    objects,
    stops_of,
    text_of,
    tool_of,
    whole_tool_choice_of,
)

BILLING = "x-anthropic-billing-header"
"""A block of the system prompt that begins so is another one in every request, and nothing for the model."""
FINISH = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
UNREAD = ("thinking", "redacted_thinking")


def question_of(body: Body) -> Question:
    """What a request asks. Raises RequestError: it cannot be answered."""
    if body.get("thread") is not None:
        raise RequestError("nothing is stored here; send the whole history", "thread_unsupported_request")
    messages = _system(body.get("system"))
    num_system = len(messages)
    for number, message in enumerate(objects(body, "messages")):
        messages += _messages(message, f"messages[{number}]")
    if len(messages) == num_system:
        raise RequestError("`messages` is empty; send at least one message")
    return Question(
        named_results(messages),
        tuple(_tool(tool) for tool in objects(body, "tools")),
        tool_choice=whole_tool_choice_of(body),
        max_tokens=limit_of(body, "max_tokens"),
        stop=stops_of(body.get("stop_sequences")),
    )


def message_answer(answer: Answer, model: str, body: Body) -> Event:
    return _head(answer, model) | {
        "content": _blocks(answer),
        "stop_reason": FINISH[answer.finish],
        "usage": _usage(answer, answer.num_completion_tokens),
    }


def message_events(answer: Answer, model: str, body: Body) -> Iterator[Event]:
    start = _head(answer, model) | {"content": [], "stop_reason": None, "usage": _usage(answer, 0)}
    yield {"type": "message_start", "message": start}
    yield {"type": "ping"}
    for index, block in enumerate(_blocks(answer)):
        if block["type"] == "text":
            begun, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            arguments = json.dumps(block["input"])
            begun, delta = block | {"input": {}}, {"type": "input_json_delta", "partial_json": arguments}
        yield {"type": "content_block_start", "index": index, "content_block": begun}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ended = {"stop_reason": FINISH[answer.finish], "stop_sequence": None}
    yield {"type": "message_delta", "delta": ended, "usage": _usage(answer, answer.num_completion_tokens)}
    yield {"type": "message_stop"}


MESSAGES = Api(question_of, message_answer, message_events)


def _head(answer: Answer, model: str) -> Event:
    head = {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": model}
    return head | {"stop_sequence": None}


def _usage(answer: Answer, num_output_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": answer.num_prompt_tokens - answer.num_cached_tokens,
        "cache_read_input_tokens": answer.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": num_output_tokens,
    }


def _blocks(answer: Answer) -> list[Event]:
    blocks: list[Event] = [{"type": "text", "text": answer.text}] if answer.text else []
    for call in answer.calls:
        named = {"id": call.id, "name": call.name, "input": json.loads(call.arguments)}
        blocks.append({"type": "tool_use"} | named)
    return blocks


def _system(system: Any) -> list[Message]:
    if isinstance(system, str):
        system = [{"type": "text", "text": system}]
    blocks = objects({"system": system}, "system")
    kept = [block for block in blocks if not str(block.get("text", "")).startswith(BILLING)]
    text = text_of(kept, "system")
    return [{"role": "system", "content": text}] if text else []


def _messages(message: Mapping[str, Any], where: str) -> list[Message]:
    """One of Anthropic's messages: results of tools are messages of their own, and go first."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise RequestError(f"{where} has role {role!r}; expected user or assistant")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = objects(message, "content")
    results = [block for block in blocks if block.get("type") == "tool_result"]
    uses = [block for block in blocks if block.get("type") == "tool_use"]
    others = [block for block in blocks if block not in results and block not in uses]
    messages: list[Message] = [_result(block, where) for block in results]
    text = text_of([block for block in others if block.get("type") not in UNREAD], where)
    if text or uses or not results:
        messages.append({"role": role, "content": text} | _calls(uses))
    return messages


def _result(block: Mapping[str, Any], where: str) -> Message:
    text = text_of(block.get("content"), where)
    return {"role": "tool", "tool_call_id": str(block.get("tool_use_id") or ""), "content": text}


def _calls(uses: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    calls = [
        ToolCall(str(use.get("id") or ""), str(use.get("name")), arguments_of(use.get("input")))
        for use in uses
    ]
    return {"tool_calls": [call.to_message() for call in calls]} if calls else {}


def _tool(tool: Mapping[str, Any]) -> Tool:
    if tool.get("type") not in (None, "custom"):
        raise RequestError(f"a tool of type {tool.get('type')!r} cannot be used; give tools of your own")
    return tool_of(tool.get("name"), tool.get("description"), tool.get("input_schema"))
