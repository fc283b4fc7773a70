"""From the ids that the model sampled to the answer that a client gets."""

import json
import secrets
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from tidemill.services.rollout.engines.engine import Generation
from tidemill.services.rollout.gateway.dialogue import Answer, FinishReason, Message, Question, ToolCall
from tidemill.services.rollout.sessions.chat import ChatFormat, Parsed
from tidemill.services.rollout.sessions.player import Decode


def cut_at(generation: Generation, stops: Sequence[str], decode: Decode) -> Generation:
    """The generation up to the first of a client's stop sequences; the same one where there is none."""
    ids = generation.token_ids
    text = decode(ids) if stops else ""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    if not found:
        return generation
    num_tokens = max(1, num_within(ids, min(found), decode))
    return replace(
        generation,
        token_ids=ids[:num_tokens],
        logprobs=generation.logprobs[:num_tokens],
        spans=tuple(span for span in generation.spans if span[1] < num_tokens),
        finish="stop",
    )


def num_within(ids: Sequence[int], num_chars: int, decode: Decode) -> int:
    """Tokens at the start whose text is not longer."""
    return bisect_right(range(len(ids)), num_chars, key=lambda i: len(decode(ids[: i + 1])))


def read(
    generation: Generation,
    question: Question,
    chat: ChatFormat,
    decode: Decode,
    num_prompt_tokens: int,
    is_cut: bool = False,
) -> tuple[Answer, Parsed]:
    """The answer, and all calls in it, those that cannot be made too. It `is_cut` where a limit or a client's
    stop sequence has ended it, not the model."""
    ids = generation.token_ids
    parsed = chat.parse(ids, question.tools, is_cut) if question.messages else Parsed({})
    made = [call for call in parsed.calls if not call.error] if question.allows_calls else []
    if not question.messages or (parsed.calls and not made):
        # Calls that cannot be made are text for the client: its own loop answers the model.
        message: Message = {"role": "assistant", "content": decode(ids)}
    else:
        message = {"role": "assistant", "content": str(parsed.message.get("content") or "")}
        if reasoning := parsed.message.get("reasoning_content"):
            message["reasoning_content"] = reasoning
    if made:
        message["tool_calls"] = [
            ToolCall(f"call_{secrets.token_hex(12)}", call.name, json.dumps(call.arguments)).to_message()
            for call in made
        ]
    finish: FinishReason = "length" if generation.finish == "length" else "tool_calls" if made else "stop"
    num_cached = max(0, generation.num_cached_tokens)
    texts = (decode([token]) for token in ids) if question.has_logprobs else ()
    tokens = tuple(zip(texts, generation.logprobs, strict=False))
    name = secrets.token_hex(12)
    return Answer(name, message, finish, num_prompt_tokens, len(ids), num_cached, tokens), parsed
