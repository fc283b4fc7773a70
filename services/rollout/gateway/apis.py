"""The wire formats of OpenAI and Anthropic: requests in, answers and the events of streams out.

`/v1/responses` and `/v1/messages` have no memory here: every request brings its whole history.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

from tidemill.services.rollout.gateway.dialogue import (
    Answer,
    Body,
    Question,
    RequestError,
    Tool,
    limit_of,
    messages_of,
    objects,
    stops_of,
    text_of,
    tool_choice_of,
    tool_of,
    wants_usage,
)

Event = dict[str, Any]
"""An answer, or a part of one in a stream."""
Located = Iterator[tuple[str, Mapping[str, Any]]]
"""Messages in the form of OpenAI's chat, each after its place in the request, which errors name:
("messages[2]", {"role": "user", ...})."""
DONE = "[DONE]"
"""The last event of OpenAI's streams."""
BILLING = "x-anthropic-billing-header"
"""Begins a block of Claude Code's system prompt that differs in every request, and is not for the model: with
it each request would be a new history."""
IN_NAMESPACE = "__"
"""Between the name of a namespace and that of a function in it, in what the model reads."""
ANTHROPIC_FINISH = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
NOT_TEXT = ("thinking", "redacted_thinking", "tool_use", "tool_result")
"""Anthropic's blocks that are not a part of a message's text."""


class Api(NamedTuple):
    """One API: a function that reads its requests, and two that write its answers. Those get the answer, the
    model's name, and the request."""

    question_of: Callable[[Body], Question]
    """Raises RequestError: it cannot be answered."""
    answer_of: Callable[[Answer, str, Body], Event]
    """The answer in one piece."""
    events_of: Callable[[Answer, str, Body], Iterable[Event | str]]
    """The answer as events of a stream."""


def chat_question(body: Body) -> Question:
    if body.get("n") not in (None, 1):
        raise RequestError("n must be 1: a session has one history; ask again for another answer")
    if body.get("functions"):
        raise RequestError("`functions` is not supported; give them as `tools`")
    messages = objects(body, "messages")
    if not messages:
        raise RequestError("`messages` is empty; send at least one message")
    # The answer always continues a last message of the assistant: what vLLM does only where it is asked to.
    continues = body.get("continue_final_message")
    ends_with_assistant = messages[-1].get("role") == "assistant"
    if continues is not None and bool(continues) != ends_with_assistant:
        raise RequestError(
            "a last message of the assistant is continued, and no other; leave out continue_final_message"
        )
    return Question(
        messages_of((f"messages[{number}]", message) for number, message in enumerate(messages)),
        _function_tools(body),
        tool_choice=tool_choice_of(body),
        max_tokens=limit_of(body, "max_completion_tokens", "max_tokens"),
        stop=stops_of(body.get("stop")),
        has_logprobs=bool(body.get("logprobs")),
    )


def chat_answer(answer: Answer, model: str, body: Body) -> Event:
    message = {"refusal": None, **answer.message}
    if answer.calls:
        # As OpenAI's: null, and no empty text, where a message has calls alone.
        message["content"] = answer.text or None
    choice = {"index": 0, "message": message, "finish_reason": answer.finish, "logprobs": _logprobs(answer)}
    return _openai_head(answer, model, "chat.completion") | {"choices": [choice], "usage": _usage(answer)}


def chat_events(answer: Answer, model: str, body: Body) -> Iterator[Event | str]:
    head = _openai_head(answer, model, "chat.completion.chunk")

    def chunk(delta: Mapping[str, Any], finish: str | None = None, logprobs: Any = None) -> Event:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        event = head | {"choices": [choice]}
        return event | {"usage": None} if wants_usage(body) else event

    message = dict(answer.message)
    if answer.calls:
        # In a stream each call has its number, too.
        message["tool_calls"] = [{"index": index, **call} for index, call in enumerate(answer.calls)]
    yield chunk(message)
    yield chunk({}, answer.finish, _logprobs(answer))
    # OpenAI's clients read the usage from a last event that has no choices.
    if wants_usage(body):
        yield head | {"choices": [], "usage": _usage(answer)}
    yield DONE


def text_question(body: Body) -> Question:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    # By `type`: true and false are instances of int.
    is_ids = isinstance(prompt, list) and all(type(item) is int for item in prompt)
    if not prompt or not (isinstance(prompt, str) or is_ids):
        raise RequestError("`prompt` must be one text, or one list of token ids, and not empty")
    for name, default in (("n", 1), ("best_of", 1), ("echo", False), ("suffix", None)):
        if body.get(name) not in (None, default):
            raise RequestError(f"`{name}` is not supported")
    logprobs = body.get("logprobs")
    return Question(
        (),
        max_tokens=limit_of(body, "max_tokens"),
        stop=stops_of(body.get("stop")),
        prompt=prompt,
        has_logprobs=logprobs is not None and logprobs is not False,  # a number here, and 0 asks for them
    )


def text_answer(answer: Answer, model: str, body: Body) -> Event:
    choice = {"index": 0, "text": answer.text, "finish_reason": answer.finish, "logprobs": None}
    if answer.tokens:
        texts, logprobs = zip(*answer.tokens, strict=True)
        choice["logprobs"] = {
            "tokens": texts,
            "token_logprobs": logprobs,
            "top_logprobs": None,
            # Where each token begins in the text: after those before it.
            "text_offset": list(accumulate(map(len, texts[:-1]), initial=0)),
        }
    head = _openai_head(answer, model, "text_completion")
    return head | {"choices": [choice], "usage": _usage(answer)}


def text_events(answer: Answer, model: str, body: Body) -> Iterator[Event | str]:
    whole = text_answer(answer, model, body)
    usage = whole.pop("usage")
    yield whole
    if wants_usage(body):
        yield whole | {"choices": [], "usage": usage}
    yield DONE


def _openai_head(answer: Answer, model: str, kind: str) -> Event:
    prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
    return {"id": f"{prefix}-{answer.id}", "object": kind, "created": int(time.time()), "model": model}


def _usage(answer: Answer) -> Event:
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": answer.num_completion_tokens,
        "total_tokens": answer.num_prompt_tokens + answer.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.num_cached_tokens},
    }


def _logprobs(answer: Answer) -> Event | None:
    """Logprobs of the sampled tokens; those of alternatives are not known here."""
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in answer.tokens
    ]
    return {"content": content, "refusal": None} if content else None


def _function_tools(body: Body) -> tuple[Tool, ...]:
    """The tools; `/v1/responses` has their fields beside `type`, the chat API in `function`."""
    tools: list[Tool] = []
    for tool in objects(body, "tools"):
        if tool.get("type") == "namespace":
            tools += _tools_of_namespace(tool)
            continue
        # Codex offers this by default: a search that the provider answers from what it has stored. There is
        # none here, so the model is not shown it; refused, codex could not be used at all.
        if tool.get("type") == "web_search" and tool.get("external_web_access") is False:
            continue
        function = tool.get("function", tool)
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise RequestError(f"a tool of type {tool.get('type')!r} cannot be used; give functions")
        tools.append(tool_of(function.get("name"), function.get("description"), function.get("parameters")))
    return tuple(tools)


def _tools_of_namespace(namespace: Body) -> Iterator[Tool]:
    """The functions of a tool of type `namespace`: the model reads the namespace in their names."""
    for tool in objects(namespace, "tools"):
        if tool.get("type") != "function":
            raise RequestError(f"a tool of type {tool.get('type')!r} cannot be used; give functions")
        name = _full_name(namespace.get("name"), tool.get("name"))
        yield tool_of(name, tool.get("description"), tool.get("parameters"))


def _full_name(namespace: Any, name: Any) -> Any:
    """The name of a function as the model reads it, such as `agents__close` in the namespace `agents`."""
    return f"{namespace}{IN_NAMESPACE}{name}" if namespace and name else name


def _namespaces(body: Body) -> dict[str, tuple[str, str]]:
    """Functions of namespaces, by the names that the model reads: "agents__close" -> ("agents", "close")."""
    names = {}
    for namespace in objects(body, "tools"):
        if namespace.get("type") != "namespace":
            continue
        for tool in objects(namespace, "tools"):
            pair = (str(namespace.get("name")), str(tool.get("name")))
            names[_full_name(*pair)] = pair
    return names


def responses_question(body: Body) -> Question:
    for name in ("previous_response_id", "conversation"):
        if body.get(name):
            raise RequestError(
                f"`{name}` is not supported: nothing is stored here. Send the whole history as `input`, "
                "with the items of earlier responses"
            )
    if body.get("background"):
        raise RequestError("`background` is not supported")
    messages = messages_of(_responses_messages(body))
    if not messages:
        raise RequestError("`input` is empty; send at least one message")
    return Question(
        messages,
        _function_tools(body),
        tool_choice=tool_choice_of(body),
        max_tokens=limit_of(body, "max_output_tokens"),
    )


def _responses_messages(body: Body) -> Located:
    """Items as messages; a call, which is an item of its own, goes into the assistant's message before it."""
    instructions = body.get("instructions")
    if instructions:
        yield "instructions", {"role": "system", "content": instructions}
    if isinstance(body.get("input"), str):
        yield "input", {"role": "user", "content": body["input"]}
        return
    said: tuple[str, dict[str, Any]] | None = None  # the assistant's message, while calls may follow
    for number, item in enumerate(objects(body, "input")):
        where = f"input[{number}]"
        kind = item.get("type") or "message"
        role = item.get("role")
        # Left out: histories are compared without reasoning, which many clients drop.
        if kind == "reasoning":
            continue
        if kind == "function_call":
            said = said or (where, {"role": "assistant", "tool_calls": []})
            name = _full_name(item.get("namespace"), item.get("name"))
            function = {"name": name, "arguments": item.get("arguments")}
            said[1]["tool_calls"].append({"id": item.get("call_id"), "function": function})
            continue
        if said:
            yield said
            said = None
        if kind == "function_call_output":
            yield where, {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
        elif kind != "message" or role not in ("system", "developer", "user", "assistant"):
            raise RequestError(f"{where} of type {kind!r} (role {role!r}) cannot be read")
        elif role == "assistant":
            said = (where, {"role": role, "content": item.get("content"), "tool_calls": []})
        else:
            yield where, {"role": role, "content": item.get("content")}
    if said:
        yield said


def responses_answer(answer: Answer, model: str, body: Body) -> Event:
    is_cut = answer.finish == "length"
    return _response_head(answer, model, body) | {
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _items(answer, body),
        "usage": {
            "input_tokens": answer.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.num_cached_tokens},
            "output_tokens": answer.num_completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.num_prompt_tokens + answer.num_completion_tokens,
        },
    }


def responses_events(answer: Answer, model: str, body: Body) -> Iterator[Event]:
    for number, event in enumerate(_unnumbered_events(answer, model, body)):
        yield event | {"sequence_number": number}


def _unnumbered_events(answer: Answer, model: str, body: Body) -> Iterator[Event]:
    start = _response_head(answer, model, body) | {"status": "in_progress", "output": [], "usage": None}
    yield {"type": "response.created", "response": start}
    yield {"type": "response.in_progress", "response": start}
    for index, item in enumerate(_items(answer, body)):
        location: Event = {"output_index": index}
        is_call = item["type"] == "function_call"
        empty: Event = {"arguments": ""} if is_call else {"content": []}
        begun = item | empty | {"status": "in_progress"}
        yield {"type": "response.output_item.added", **location, "item": begun}
        location |= {"item_id": item["id"]}
        if is_call:
            kind = "response.function_call_arguments"
            arguments = item["arguments"]
            yield {"type": f"{kind}.delta", **location, "delta": arguments}
            yield {"type": f"{kind}.done", **location, "arguments": arguments, "name": item["name"]}
        else:
            location |= {"content_index": 0}
            (content_part,) = item["content"]
            yield {"type": "response.content_part.added", **location, "part": content_part | {"text": ""}}
            yield {
                "type": "response.output_text.delta",
                **location,
                "delta": content_part["text"],
                "logprobs": [],
            }
            yield {
                "type": "response.output_text.done",
                **location,
                "text": content_part["text"],
                "logprobs": [],
            }
            yield {"type": "response.content_part.done", **location, "part": content_part}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    end = responses_answer(answer, model, body)
    yield {"type": f"response.{end['status']}", "response": end}


def _response_head(answer: Answer, model: str, body: Body) -> Event:
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


def _items(answer: Answer, body: Body) -> list[Event]:
    """The answer as items: its text as a message, then each of its calls."""
    namespaces = _namespaces(body)
    items: list[Event] = []
    status = "incomplete" if answer.finish == "length" else "completed"
    if answer.text or not answer.calls:
        content_part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        message = {"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "status": status}
        items.append(message | {"content": [content_part]})
    for number, call in enumerate(answer.calls):
        item = {"type": "function_call", "id": f"fc_{answer.id}_{number}", "call_id": call["id"]}
        item |= {**call["function"], "status": status}
        if item["name"] in namespaces:
            # As the client has sent it: apart, and not in one name as the model reads it.
            namespace, name = namespaces[item["name"]]
            item |= {"namespace": namespace, "name": name}
        items.append(item)
    return items


def anthropic_question(body: Body) -> Question:
    if body.get("thread") is not None:
        raise RequestError("nothing is stored here; send the whole history", "thread_unsupported_request")
    if not objects(body, "messages"):
        raise RequestError("`messages` is empty; send at least one message")
    tools: list[Tool] = []
    for tool in objects(body, "tools"):
        if tool.get("type") not in (None, "custom"):
            raise RequestError(f"a tool of type {tool.get('type')!r} cannot be used; give tools of your own")
        tools.append(tool_of(tool.get("name"), tool.get("description"), tool.get("input_schema")))
    return Question(
        messages_of(_anthropic_messages(body)),
        tuple(tools),
        tool_choice=tool_choice_of(body),
        max_tokens=limit_of(body, "max_tokens"),
        stop=stops_of(body.get("stop_sequences")),
    )


def _anthropic_messages(body: Body) -> Located:
    """Messages; results of tools, which are blocks of a message here, become messages of their own, before
    it."""
    system = body.get("system")
    blocks = [{"text": system}] if isinstance(system, str) else objects(body, "system")
    for_model = [block for block in blocks if not str(block.get("text", "")).startswith(BILLING)]
    text = text_of(for_model, "system")
    if text:
        yield "system", {"role": "system", "content": text}
    for number, message in enumerate(objects(body, "messages")):
        where = f"messages[{number}]"
        role = message.get("role")
        content = message.get("content")
        if role not in ("user", "assistant", "system"):
            raise RequestError(f"{where} has role {role!r}; expected user or assistant")
        blocks = [{"text": content}] if isinstance(content, str) else objects(message, "content")
        results = [block for block in blocks if block.get("type") == "tool_result"]
        for result in results:
            call_id = result.get("tool_use_id")
            output = result.get("content")
            yield where, {"role": "tool", "tool_call_id": call_id, "content": output}
        calls = [
            {"id": use.get("id"), "function": {"name": use.get("name"), "arguments": use.get("input")}}
            for use in blocks
            if use.get("type") == "tool_use"
        ]
        said = [block for block in blocks if block.get("type") not in NOT_TEXT]
        says_something = any(block.get("text") != "" for block in said)
        # A message of results alone is in those already; any other counts, also an empty one.
        if says_something or calls or not results:
            yield where, {"role": role, "content": said, "tool_calls": calls}


def anthropic_answer(answer: Answer, model: str, body: Body) -> Event:
    content = {"content": _blocks(answer), "usage": _anthropic_usage(answer, answer.num_completion_tokens)}
    return _anthropic_head(answer, model) | content | _anthropic_end(answer)


def anthropic_events(answer: Answer, model: str, body: Body) -> Iterator[Event]:
    start: Event = {"content": [], "usage": _anthropic_usage(answer, 0)}
    start |= {"stop_reason": None, "stop_sequence": None}
    yield {"type": "message_start", "message": _anthropic_head(answer, model) | start}
    yield {"type": "ping"}
    for index, block in enumerate(_blocks(answer)):
        if block["type"] == "text":
            begun = block | {"text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            arguments = json.dumps(block["input"])
            begun = block | {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": arguments}
        yield {"type": "content_block_start", "index": index, "content_block": begun}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    usage = _anthropic_usage(answer, answer.num_completion_tokens)
    yield {"type": "message_delta", "delta": _anthropic_end(answer), "usage": usage}
    yield {"type": "message_stop"}


def _anthropic_head(answer: Answer, model: str) -> Event:
    return {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": model}


def _anthropic_end(answer: Answer) -> Event:
    """Why the answer ended, and at which of the client's stop sequences."""
    if answer.finish == "stop" and answer.stop_sequence:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_sequence}
    return {"stop_reason": ANTHROPIC_FINISH[answer.finish], "stop_sequence": None}


def _anthropic_usage(answer: Answer, num_output_tokens: int) -> dict[str, int]:
    return {
        # Anthropic counts cached tokens beside the input, OpenAI within it.
        "input_tokens": answer.num_prompt_tokens - answer.num_cached_tokens,
        "cache_read_input_tokens": answer.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": num_output_tokens,
    }


def _blocks(answer: Answer) -> list[Event]:
    blocks: list[Event] = [{"type": "text", "text": answer.text}] if answer.text else []
    for call in answer.calls:
        name = call["function"]["name"]
        arguments = json.loads(call["function"]["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
    return blocks


APIS = {
    "chat/completions": Api(chat_question, chat_answer, chat_events),
    "completions": Api(text_question, text_answer, text_events),
    "responses": Api(responses_question, responses_answer, responses_events),
    "messages": Api(anthropic_question, anthropic_answer, anthropic_events),
}
"""Path below `/v1/` -> API."""
