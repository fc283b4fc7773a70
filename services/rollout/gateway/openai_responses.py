"""OpenAI's `/v1/responses`, without a memory: every request brings its whole history."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from tidemill.services.rollout.gateway.dialogue import (
    Answer,
    Api,
    Body,
    Event,
    Message,
    Question,
    RequestError,
    ToolCall,
    arguments_of,
    limit_of,
    named_results,
    objects,
    text_of,
    whole_tool_choice_of,
)
from tidemill.services.rollout.gateway.openai_chat import function_tool


def question_of(body: Body) -> Question:
    """What a request asks. Raises RequestError: it cannot be answered."""
    for name in ("previous_response_id", "conversation"):
        if body.get(name):
            raise RequestError(
                f"`{name}` is not supported: nothing is stored here. Send the whole history as `input`, "
                "with the items of earlier responses"
            )
    if body.get("background"):
        raise RequestError("`background` is not supported")
    messages = _messages(body)
    if not messages:
        raise RequestError("`input` is empty; send at least one message")
    return Question(
        named_results(messages),
        tuple(function_tool(tool) for tool in objects(body, "tools")),
        tool_choice=whole_tool_choice_of(body),
        max_tokens=limit_of(body, "max_output_tokens"),
    )


def response(answer: Answer, model: str, body: Body) -> Event:
    is_cut = answer.finish == "length"
    return _head(answer, model, body) | {
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _items(answer),
        "usage": {
            "input_tokens": answer.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.num_cached_tokens},
            "output_tokens": answer.num_completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.num_prompt_tokens + answer.num_completion_tokens,
        },
    }


def response_events(answer: Answer, model: str, body: Body) -> Iterator[Event]:
    for number, event in enumerate(_events(answer, model, body)):
        yield event | {"sequence_number": number}


RESPONSES = Api(question_of, response, response_events)


def _events(answer: Answer, model: str, body: Body) -> Iterator[Event]:
    start = _head(answer, model, body) | {"status": "in_progress", "output": [], "usage": None}
    yield {"type": "response.created", "response": start}
    yield {"type": "response.in_progress", "response": start}
    for index, item in enumerate(_items(answer)):
        place = {"output_index": index}
        is_call = item["type"] == "function_call"
        empty: Event = {"arguments": ""} if is_call else {"content": []}
        begun = item | empty | {"status": "in_progress"}
        yield {"type": "response.output_item.added", **place, "item": begun}
        place |= {"item_id": item["id"]}
        yield from _call_events(item, place) if is_call else _text_events(item, place)
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    end = response(answer, model, body)
    yield {"type": f"response.{end['status']}", "response": end}


def _call_events(item: Event, place: Event) -> Iterator[Event]:
    kind, arguments = "response.function_call_arguments", item["arguments"]
    yield {"type": f"{kind}.delta", **place, "delta": arguments}
    yield {"type": f"{kind}.done", **place, "arguments": arguments, "name": item["name"]}


def _text_events(item: Event, place: Event) -> Iterator[Event]:
    place = place | {"content_index": 0}
    (part,) = item["content"]
    yield {"type": "response.content_part.added", **place, "part": part | {"text": ""}}
    yield {"type": "response.output_text.delta", **place, "delta": part["text"], "logprobs": []}
    yield {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": []}
    yield {"type": "response.content_part.done", **place, "part": part}


def _head(answer: Answer, model: str, body: Body) -> Event:
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "metadata": {},
        "parallel_tool_calls": True,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "temperature": None,
        "top_p": None,
        "previous_response_id": None,
    }


def _items(answer: Answer) -> list[Event]:
    items: list[Event] = []
    status = "incomplete" if answer.finish == "length" else "completed"
    if answer.text or not answer.calls:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        message = {"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "status": status}
        items.append(message | {"content": [part]})
    for number, call in enumerate(answer.calls):
        named = {"call_id": call.id, "name": call.name, "arguments": call.arguments, "status": status}
        items.append({"type": "function_call", "id": f"fc_{answer.id}_{number}"} | named)
    return items


def _messages(body: Body) -> list[Message]:
    messages: list[Message] = []
    if instructions := body.get("instructions"):
        messages.append({"role": "system", "content": text_of(instructions, "instructions")})
    if isinstance(body.get("input"), str):
        return [*messages, {"role": "user", "content": body["input"]}]
    for number, item in enumerate(objects(body, "input")):
        _add(messages, item, f"input[{number}]")
    return messages


def _add(messages: list[Message], item: Mapping[str, Any], where: str) -> None:
    """An item goes into a message of its own, or into the assistant's that it is a part of."""
    kind, role = item.get("type") or "message", item.get("role")
    if kind == "reasoning":
        return
    if kind == "function_call_output":
        output = text_of(item.get("output"), where)
        messages.append({"role": "tool", "tool_call_id": str(item.get("call_id") or ""), "content": output})
    elif kind == "function_call":
        call = ToolCall(
            str(item.get("call_id") or ""), str(item.get("name")), arguments_of(item.get("arguments"))
        )
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call.to_message())
    elif kind == "message" and role in ("system", "developer", "user", "assistant"):
        content = text_of(item.get("content"), where)
        messages.append({"role": "system" if role == "developer" else role, "content": content})
    else:
        raise RequestError(f"{where} of type {kind!r} (role {role!r}) cannot be read")
