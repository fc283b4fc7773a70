"""The chat format of a tokenizer with a chat template, and of one without.

The text between two turns is found by rendering a small chat in which a mark stands for the model's turn: it
is all that follows the mark, without what the model itself has written to end its turn. So a template may
drop thinking, merge system messages, or print a date before the mark: that is not looked at, and nothing that
was sampled is rendered.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from tidemill.common.config.run import RunConfig
from tidemill.common.data.image_columns import IMAGE_PART, TEXT_PART
from tidemill.common.run.appended_tokens import num_appended_by
from tidemill.common.run.special_tokens import TokenReader
from tidemill.common.wire.codec import pack, sendable
from tidemill.services.rollout.sessions.calls import find_calls, format_of, read_call
from tidemill.services.rollout.sessions.chat import (
    Call,
    ChatFormat,
    ChatMessage,
    Parsed,
    SimulatedChat,
    Tools,
    call_of,
    num_shared,
)

MARK = "MODELSTURN"
"""Stands for what the model said. No template changes a plain word."""
MOST_CHARS_PER_TOKEN = 16
"""Far more than text has."""
THINK = "<think>"
THOUGHT = "</think>"
CALL = "<tool_call>"
CALLED = "</tool_call>"


class TemplateChat:
    """The chat format of one model. Not thread-safe, because tokenizers are not."""

    def __init__(
        self,
        tokenizer: Any,
        eos_ids: Sequence[int],
        call_format: str = "auto",
        has_template: bool = True,
        reader: TokenReader | None = None,
        reserved: Sequence[str] | None = None,
    ) -> None:
        """`reader` makes text of a turn; without one, special tokens are hidden. `reserved`, of a model that
        sees, are the names of tokens that stand for pictures or around them."""
        self._reader = reader
        self._reserved = reserved
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(eos_ids)
        self._special_ids = frozenset(tokenizer.all_special_ids)
        template = getattr(tokenizer, "chat_template", None) if has_template else None
        if isinstance(template, dict):
            template = template.get("default")
        self.has_template = bool(template)
        self._num_ends = 0 if self.has_template else num_appended_by(tokenizer)
        self._own_parser = call_format == "auto" and bool(getattr(tokenizer, "response_template", None))
        self._call_format = format_of(str(template or "")) if call_format == "auto" else call_format
        self._speaks = self._opening() if self.has_template else ""
        ids = self._encode(self._speaks)
        self._opening_id = ids[0] if ids and ids[0] in self._special_ids else None
        self._opens_thought = reader is not None and reader.is_thought_open(ids)
        # For this object alone: a cache on the method would keep every chat, and its tokenizer, alive.
        self._ending = lru_cache(maxsize=256)(self._ending_of)

    def encode(self, text: str) -> list[int]:
        return self._encode(without_names(text, self._reserved or ()))

    def _encode(self, text: str) -> list[int]:
        """The ids of text that the template has written, or that has no names of reserved tokens."""
        # The template has written the special tokens; the tokenizer would add another BOS. It takes no
        # lone surrogates, which JSON of clients and servers may hold.
        encoded = self._tokenizer(sendable(text), add_special_tokens=False, return_attention_mask=False)
        ids: list[int] = encoded["input_ids"]
        return ids

    def render(self, messages: Sequence[ChatMessage], tools: Tools = ()) -> list[int]:
        if not self.has_template:
            ids: list[int] = self._tokenizer(sendable(_text_of(messages)))["input_ids"]
            return ids[: len(ids) - self._num_ends]  # the model continues it
        is_prefilled = bool(messages) and messages[-1].get("role") == "assistant"
        return self._encode(self._rendered(messages, tools, speaks=not is_prefilled, continues=is_prefilled))

    def extend(
        self, turn_ids: Sequence[int], is_stopped: bool, messages: Sequence[ChatMessage], tools: Tools = ()
    ) -> list[int]:
        if not self.has_template:
            return self.encode(_text_of(messages))
        caller = _called_by(messages)
        is_prefilled = messages[-1].get("role") == "assistant"
        chat = [*_marked(caller), *messages]
        after = self._encode(self._after_mark(chat, tools, speaks=not is_prefilled, continues=is_prefilled))
        shared = num_shared(after, self._ending(caller))
        last = turn_ids[-1] if is_stopped and turn_ids else None
        end = self._place_of_end(after, shared, last)
        if end is None:
            return after
        return after[end + 1 :] if last is not None else after[end:]

    def parse(self, turn_ids: Sequence[int], tools: Tools = (), is_cut: bool = False) -> Parsed:
        """Calls are looked for only if there are tools."""
        if tools and self._own_parser:
            return self._parse_own(turn_ids, tools, is_cut)
        ids = list(turn_ids)
        while ids and ids[-1] in self._eos_ids:
            ids.pop()
        thought, text = self._read(ids, bool(tools))
        calls: tuple[Call, ...] = ()
        if tools:
            is_open = is_cut and text.rfind(CALL) > text.rfind(CALLED)
            text, calls = find_calls(text, self._call_format)
            calls = _whole(calls, is_open)
        return Parsed(_message(text, thought, calls), calls)

    def _read(self, ids: list[int], has_tools: bool) -> tuple[str, str]:
        """Thinking and the rest of a turn."""
        if self._reader is not None and self._reader.parts:
            reading = self._reader.read_turn(ids, self._opens_thought)
            return reading.thought or "", reading.text
        # The marks of calls are special tokens of some tokenizers: without them no call is found.
        is_hidden = not has_tools and (self._reader is None or self._reader.choice.mode == "hidden")
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=is_hidden, clean_up_tokenization_spaces=False
        )
        return self._split_thought(text)

    def shorten(self, text: str, max_tokens: int) -> str:
        if len(text.encode(errors="replace")) <= max_tokens:  # a token has a byte at least
            return text
        # To tokenize all of a very long one would hold up every session.
        most_chars = MOST_CHARS_PER_TOKEN * max_tokens
        is_huge = len(text) > most_chars
        if is_huge:
            mark = f"\n[{len(text) - most_chars} characters left out]\n"
            text = text[: most_chars // 2] + mark + text[-(most_chars // 2) :]
        ids = self.encode(text)
        if len(ids) <= max_tokens:
            return text
        head = (max_tokens + 1) // 2
        tail = max_tokens // 2
        first = str(self._tokenizer.decode(ids[:head], clean_up_tokenization_spaces=False))
        last = str(self._tokenizer.decode(ids[len(ids) - tail :], clean_up_tokenization_spaces=False))
        return f"{first}\n[{'more than ' * is_huge}{len(ids) - max_tokens} tokens left out]\n{last}"

    def _split_thought(self, text: str) -> tuple[str, str]:
        """Thinking and the rest. A call within thinking is no call; a template may have opened it."""
        begins = text.lstrip().startswith(THINK) or self._speaks.rstrip().endswith(THINK)
        if not begins and THOUGHT not in text:
            return "", text
        thought, _, said = text.partition(THOUGHT)
        return thought.replace(THINK, "", 1).strip(), said.lstrip("\n")

    def _parse_own(self, turn_ids: Sequence[int], tools: Tools, is_cut: bool) -> Parsed:
        """Parse by the model's own response template, which transformers reads."""
        text: str = self._tokenizer.decode(list(turn_ids), skip_special_tokens=False)
        try:
            parsed = self._tokenizer.parse_response(text, prefix=self._speaks, tools=list(tools))
        except Exception as error:  # parsers of users' templates raise anything
            call = Call("", error=f"the call cannot be read: {error}")
            return Parsed(_message(text, "", (call,)), (call,))
        # The template does not say whether the last call has its end.
        calls = _whole([read_call(call) for call in parsed.get("tool_calls") or ()], is_open=is_cut)
        thought = str(parsed.get("reasoning_content") or parsed.get("thinking") or "")
        return Parsed(_message(str(parsed.get("content") or ""), thought, calls), calls)

    def _place_of_end(self, after: Sequence[int], shared: int, last: int | None) -> int | None:
        """Index in `after` of the token that ends the turn: the one that the model wrote, else one that ends
        generations, else the template's own. The first `shared` tokens are the same if nothing follows."""
        near = list(after[: shared + 1])
        if last is not None and last in near:
            return near.index(last)
        ends = [i for i, token in enumerate(near) if token in self._eos_ids]
        if ends:
            return ends[0]
        special = [i for i, token in enumerate(near) if token in self._special_ids]
        special = [i for i in special if near[i] != self._opening_id]
        within = [i for i in special if i < shared]
        if within:
            return within[-1]
        return special[0] if special else None

    def _ending_of(self, caller: tuple[str, str] | None) -> list[int]:
        """Ids after the mark in a chat that ends with it."""
        return self._encode(self._after_mark(_marked(caller), (), speaks=False))

    def _after_mark(
        self, messages: Sequence[ChatMessage], tools: Tools, speaks: bool, continues: bool = False
    ) -> str:
        text = self._rendered(messages, tools, speaks=speaks, continues=continues)
        _, mark, after = text.partition(MARK)
        if not mark:
            content = "calls of tools" if messages[1].get("tool_calls") else "what the model said"
            raise ValueError(f"the chat template leaves out {content} before these messages")
        return after

    def _opening(self) -> str:
        """The generation prompt: what the template writes before the model's turn."""
        chat = [{"role": "user", "content": MARK}]
        try:
            with_it = self._rendered(chat, (), speaks=True)
            without = self._rendered(chat, (), speaks=False)
        except ValueError:
            return ""
        return with_it.removeprefix(without) if with_it.startswith(without) else ""

    def _rendered(
        self, messages: Sequence[ChatMessage], tools: Tools, speaks: bool, continues: bool = False
    ) -> str:
        """Text of a chat. Templates want arguments as objects, except those that want text."""
        from jinja2 import TemplateError

        if self._reserved is not None:
            messages = [_in_parts(message, self._reserved) for message in messages]
            tools = without_names(list(tools), self._reserved)
        for arguments_are_text in (False, True):
            try:
                text: str = self._tokenizer.apply_chat_template(
                    [dict(with_arguments(message, arguments_are_text)) for message in messages],
                    tools=list(tools) or None,
                    tokenize=False,
                    add_generation_prompt=speaks,
                    continue_final_message=continues,
                )
                return text
            except TypeError as error:
                if arguments_are_text:
                    raise ValueError(f"the chat template refuses these messages: {error}") from None
            except (TemplateError, ValueError, KeyError, AttributeError, RecursionError) as error:
                raise ValueError(f"the chat template refuses these messages: {error}") from None
        raise AssertionError("unreachable")


def open_chat(config: RunConfig) -> ChatFormat:
    """The chat format of the run's model, read from its folder; `SimulatedChat` for the simulated engine.

    Raises:
        ConfigError: the model's folder cannot be used.
    """
    if not config.rollout.engine_traits.loads_model:
        return SimulatedChat(config.rollout.simulated.vocab_size)
    from tidemill.services.rollout.engines.model import open_model

    folder = open_model(config.model)
    has_template = config.data.chat_template != "never"
    call_format = config.rollout.environment.call_format
    reserved: list[str] | None = None
    if config.images is not None:
        from tidemill.common.images.processor import load_processor

        processor = load_processor(config.model.path, config.images)
        reserved = [
            str(name) for name in folder.tokenizer.convert_ids_to_tokens(list(processor.reserved_ids))
        ]
    return TemplateChat(folder.tokenizer, folder.eos_ids, call_format, has_template, folder.reader, reserved)


def _called_by(messages: Sequence[ChatMessage]) -> tuple[str, str] | None:
    """The tool and the id of the call that the first message answers; None where it answers none."""
    if not messages or messages[0].get("role") != "tool":
        return None
    return str(messages[0].get("name") or "tool"), str(messages[0].get("tool_call_id") or "")


def _marked(caller: tuple[str, str] | None) -> list[ChatMessage]:
    """A question, and the mark as the model's answer or call."""
    question = {"role": "user", "content": "."}
    if caller is None:
        return [question, {"role": "assistant", "content": MARK}]
    name, call_id = caller
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": {"x": MARK}}}
    if call_id:
        call["id"] = call_id
    return [question, {"role": "assistant", "content": "", "tool_calls": [call]}]


def with_arguments(message: ChatMessage, as_text: bool) -> ChatMessage:
    """The message with its calls' arguments as text (OpenAI's form) or as objects (for most templates)."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call.get("function") or call)
        arguments = function.get("arguments")
        if as_text and not isinstance(arguments, str):
            function["arguments"] = json.dumps(arguments)
        elif not as_text and isinstance(arguments, str):
            try:
                function["arguments"] = json.loads(arguments)
            except (ValueError, RecursionError):
                function["arguments"] = {}
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls}


def _in_parts(message: ChatMessage, reserved: Sequence[str]) -> dict[str, Any]:
    """The message as the template of a model that sees wants it: its content as a list of parts. A picture is
    a part without its reference, and no text has the name of a reserved token."""
    content = message.get("content")
    if not isinstance(content, list):
        content = [{"type": TEXT_PART, "text": str(content)}] if content else []
    parts = [{"type": IMAGE_PART} if item.get("type") == IMAGE_PART else item for item in content]
    others = {name: value for name, value in message.items() if name not in ("role", "content")}
    kept = without_names({"content": parts, **others}, reserved)
    return {"role": message.get("role"), **kept}


def without_names(value: Any, names: Sequence[str]) -> Any:
    """The value, in whose texts a space parts each of these names, so that it is read as text.

    In a prompt the name of a token that stands for pixels would take the place of a picture. In a session the
    model may have spelled it, and a tool repeated it, which is nobody's fault.
    """
    if isinstance(value, str):
        for name in names:
            value = value.replace(name, f"{name[:1]} {name[1:]}")
        return value
    if isinstance(value, Mapping):
        return {key: without_names(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [without_names(item, names) for item in value]
    return value


def _whole(calls: Sequence[Call], is_open: bool) -> tuple[Call, ...]:
    """The calls; if `is_open`, the last one gets an error, because it has no end. So do calls whose arguments
    are JSON only in Python (integers above 64 bits, NaN, infinities)."""
    whole = list(calls)
    for index, call in enumerate(whole):
        try:
            pack(call.arguments)
            json.dumps(call.arguments, allow_nan=False)
        except (ValueError, OverflowError, RecursionError) as error:
            problem = f"the arguments of a call must be JSON with numbers of 64 bits: {error}"
            whole[index] = Call(call.name, error=problem)
    if is_open and whole:
        whole[-1] = Call(whole[-1].name, error="the answer was cut off within this call")
    return tuple(whole)


def _message(text: str, thought: str, calls: Sequence[Call]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [
            call_of(f"call_{number}", call.name, json.dumps(call.arguments))
            for number, call in enumerate(calls)
        ]
    return message


def _text_of(messages: Sequence[ChatMessage]) -> str:
    return "".join(content_text(message.get("content")) for message in messages)


def content_text(content: Any) -> str:
    """The text of a message's content, which may be a list of blocks."""
    if isinstance(content, list):
        return "".join(str(block.get("text", "")) for block in content if isinstance(block, Mapping))
    return "" if content is None else str(content)
