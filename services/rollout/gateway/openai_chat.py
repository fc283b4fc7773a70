"""OpenAI's `/v1/chat/completions` and `/v1/completions`: requests in, answers and events out."""

import time
from collections.abc import Iterator, Mapping
from itertools import accumulate
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
    has_usage,
    limit_of,
    named_results,
    objects,
    stops_of,
    text_of,
    tool_of,
    whole_tool_choice_of,
)

DONE = "[DONE]"
"""The last event of a stream."""


def chat_question(body: Body) -> Question:
    """What a request for a chat completion asks. Raises RequestError: it cannot be answered."""
    if body.get("n") not in (None, 1):
        raise RequestError("n must be 1: a session has one history; ask again for another answer")
    if body.get("functions"):
        raise RequestError("`functions` is not supported; give them as `tools`")
    messages = objects(body, "messages")
    if not messages:
        raise RequestError("`messages` is empty; send at least one message")
    continues = body.get("continue_final_message")
    if continues is not None and bool(continues) != (messages[-1].get("role") == "assistant"):
        raise RequestError(
            "a last message of the assistant is continued, and no other; leave out continue_final_message"
        )
    return Question(
        named_results([_message(message, number) for number, message in enumerate(messages)]),
        tuple(function_tool(tool) for tool in objects(body, "tools")),
        tool_choice=whole_tool_choice_of(body),
        max_tokens=limit_of(body, "max_completion_tokens", "max_tokens"),
        stop=stops_of(body.get("stop")),
        has_logprobs=bool(body.get("logprobs")),
    )


def chat_answer(answer: Answer, model: str, body: Body) -> Event:
    message = {"refusal": None, **answer.message}
    if answer.calls:
        message["content"] = answer.text or None
    choice = {"index": 0, "message": message, "finish_reason": answer.finish, "logprobs": _logprobs(answer)}
    return _head(answer, model, "chat.completion") | {"choices": [choice], "usage": usage(answer)}


def chat_events(answer: Answer, model: str, body: Body) -> Iterator[Event | str]:
    head = _head(answer, model, "chat.completion.chunk")

    def chunk(delta: Mapping[str, Any], finish: str | None = None, logprobs: Any = None) -> Event:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return head | {"choices": [choice]} | ({"usage": None} if has_usage(body) else {})

    yield chunk({"role": "assistant", "content": ""})
    if reasoning := answer.message.get("reasoning_content"):
        yield chunk({"reasoning_content": reasoning})
    if answer.text:
        yield chunk({"content": answer.text})
    for index, call in enumerate(answer.calls):
        yield chunk({"tool_calls": [{"index": index, **call.to_message()}]})
    yield chunk({}, answer.finish, _logprobs(answer))
    if has_usage(body):
        yield head | {"choices": [], "usage": usage(answer)}
    yield DONE


def text_question(body: Body) -> Question:
    """What a request for a completion asks. Raises RequestError: it cannot be answered."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    is_ids = isinstance(prompt, list) and all(type(item) is int for item in prompt)
    if not prompt or not (isinstance(prompt, str) or is_ids):
        raise RequestError("`prompt` must be one text, or one list of token ids, and not empty")
    for name, plain in (("n", 1), ("best_of", 1), ("echo", False), ("suffix", None)):
        if body.get(name) not in (None, plain):
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
        offsets = accumulate(map(len, texts[:-1]), initial=0)
        choice["logprobs"] = {
            "tokens": texts,
            "token_logprobs": logprobs,
            "top_logprobs": None,
            "text_offset": list(offsets),
        }
    head = _head(answer, model, "text_completion")
    return head | {"choices": [choice], "usage": usage(answer)}


def text_events(answer: Answer, model: str, body: Body) -> Iterator[Event | str]:
    whole = text_answer(answer, model, body)
    used = whole.pop("usage")
    yield whole
    if has_usage(body):
        yield whole | {"choices": [], "usage": used}
    yield DONE


CHAT = Api(chat_question, chat_answer, chat_events)
TEXT = Api(text_question, text_answer, text_events)


def _logprobs(answer: Answer) -> Event | None:
    """Of the tokens that were sampled; others are not known here."""
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in answer.tokens
    ]
    return {"content": content, "refusal": None} if content else None


def usage(answer: Answer) -> dict[str, Any]:
    """What the turn read and wrote."""
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": answer.num_completion_tokens,
        "total_tokens": answer.num_prompt_tokens + answer.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.num_cached_tokens},
    }


def _head(answer: Answer, model: str, kind: str) -> Event:
    prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
    return {"id": f"{prefix}-{answer.id}", "object": kind, "created": int(time.time()), "model": model}


def _message(message: Mapping[str, Any], number: int) -> Message:
    where = f"messages[{number}]"
    role = message.get("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise RequestError(f"{where} has role {role!r}; expected system, user, assistant or tool")
    plain: Message = {
        "role": "system" if role == "developer" else role,
        "content": text_of(message.get("content"), where),
    }
    if calls := objects(message, "tool_calls"):
        plain["tool_calls"] = [_call(call, where).to_message() for call in calls]
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        plain["reasoning_content"] = text_of(reasoning, where)
    return plain | {name: str(message[name]) for name in ("tool_call_id", "name") if message.get(name)}


def _call(call: Mapping[str, Any], where: str) -> ToolCall:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} has a call without a function's name")
    return ToolCall(str(call.get("id") or ""), function["name"], arguments_of(function.get("arguments")))


def function_tool(tool: Mapping[str, Any]) -> Tool:
    """A tool, whose fields `/v1/responses` has beside its type."""
    function = tool.get("function", tool)
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise RequestError(f"a tool of type {tool.get('type')!r} cannot be used; give functions")
    return tool_of(function.get("name"), function.get("description"), function.get("parameters"))
