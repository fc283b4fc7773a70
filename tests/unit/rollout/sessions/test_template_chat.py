"""Chat formats with the real templates of well-known models, around tokenizers of single bytes."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tidemill.services.rollout.sessions.template_chat import TemplateChat

TRL = find_spec("trl")  # importing it takes seconds
assert TRL is not None and TRL.origin is not None
TEMPLATES = Path(TRL.origin).parent / "chat_templates"
ENDS = {  # the first one is the tokenizer's own; all of them stop the engine
    "qwen3": ["<|im_end|>", "<|endoftext|>"], "qwen3_5_think": ["<|im_end|>", "<|endoftext|>"],
    "llama3_1": ["<|eot_id|>", "<|eom_id|>"], "gemma3": ["<end_of_turn>"],
    "gemma4": ["<turn|>", "<|tool_response>"], "gptoss": ["<|return|>", "<|call|>"],
}  # fmt: skip
SPECIAL = ["<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>", "<start_of_turn>"]
SPECIAL += ["<|turn>", "<|tool_call>", "<tool_call|>", "<tool_response|>", '<|"|>']
SPECIAL += ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"]
PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "A."}}},
        },
    }
]
HIGHER = [{"role": "user", "content": "Higher."}]
SEVEN = [{"role": "tool", "name": "add", "content": "7", "tool_call_id": "call_0"}]


def tokenizer_of(name: str, template: str | None = None) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=ENDS[name][0],
        bos_token="<bos>",
        chat_template=template or (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"),
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [*ENDS[name], *SPECIAL]})
    tokenizer.add_tokens(PLAIN)
    return tokenizer


def chat_of(name: str, **options: Any) -> tuple[TemplateChat, Any]:
    tokenizer = tokenizer_of(name)
    return TemplateChat(tokenizer, tokenizer.convert_tokens_to_ids(ENDS[name]), **options), tokenizer


def extended(name: str, turn: str, messages: list[Any], is_stopped: bool = True, tools: Any = ()) -> str:
    """The text of a turn and of what follows it."""
    chat, tokenizer = chat_of(name)
    ids = chat.encode(turn)
    return str(tokenizer.decode(ids + chat.extend(ids, is_stopped, messages, tools)))


QWEN_SPEAKS = "<|im_start|>assistant\n"
QWEN_HIGHER = f"\n<|im_start|>user\nHigher.<|im_end|>\n{QWEN_SPEAKS}"
QWEN_RESULT = f"\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n{QWEN_SPEAKS}"
LLAMA_SPEAKS = "<|start_header_id|>assistant<|end_header_id|>\n\n"
LLAMA_HIGHER = f"<|start_header_id|>user<|end_header_id|>\n\nHigher.<|eot_id|>{LLAMA_SPEAKS}"
LLAMA_RESULT = f'<|start_header_id|>ipython<|end_header_id|>\n\n"7"<|eot_id|>{LLAMA_SPEAKS}'
GPTOSS_RESULT = (
    '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"7"<|end|><|start|>assistant'
)


@pytest.mark.parametrize(
    ("name", "end", "expected"),
    [
        ("qwen3", "<|im_end|>", QWEN_HIGHER),
        ("qwen3", "<|endoftext|>", QWEN_HIGHER),
        ("qwen3_5_think", "<|im_end|>", f"{QWEN_HIGHER}<think>\n"),
        ("llama3_1", "<|eot_id|>", LLAMA_HIGHER),
        ("gemma3", "<end_of_turn>", "\n<start_of_turn>user\nHigher.<end_of_turn>\n<start_of_turn>model\n"),
        ("gemma4", "<turn|>", "\n<|turn>user\nHigher.<turn|>\n<|turn>model\n"),
        ("gptoss", "<|return|>", "<|start|>user<|message|>Higher.<|end|><|start|>assistant"),
    ],
)
def test_a_question_follows_a_turn_that_ended_itself_whatever_it_ended_with(name, end, expected):
    turn = f"<think>\nhm\n</think>\n\n50{end}"
    assert extended(name, turn, HIGHER) == turn + expected


@pytest.mark.parametrize("name", ENDS)
def test_a_truncated_turn_is_closed_as_the_template_closes_it(name: str) -> None:
    close = "<|end|>" if name == "gptoss" else ENDS[name][0]
    cut = extended(name, "50", HIGHER, is_stopped=False)
    whole = extended(name, f"50{close}", HIGHER)
    assert cut == whole


@pytest.mark.parametrize(
    ("name", "end", "expected"),
    [
        ("qwen3", "<|im_end|>", QWEN_RESULT),
        ("llama3_1", "<|eom_id|>", LLAMA_RESULT),
        ("gemma4", "<|tool_response>", 'response:add{value:<|"|>7<|"|>}<tool_response|>'),
        ("gptoss", "<|call|>", GPTOSS_RESULT),
    ],
)
def test_a_result_follows_a_call(name: str, end: str, expected: str) -> None:
    assert extended(name, f"call{end}", SEVEN, tools=TOOLS) == f"call{end}{expected}"


def test_two_results_of_parallel_calls_follow_each_other() -> None:
    text = extended("qwen3", "calls<|im_end|>", [*SEVEN, {**SEVEN[0], "content": "8"}], tools=TOOLS)
    assert "<tool_response>\n7\n</tool_response>\n<tool_response>\n8\n</tool_response>" in text


@pytest.mark.parametrize(("messages", "said"), [(SEVEN, "refuses"), ([*HIGHER, *HIGHER], "alternate")])
def test_a_template_without_tools_or_with_strict_turns_says_no(messages: list[Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        extended("gemma3", "50<end_of_turn>", messages)


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gemma4"])
def test_what_is_extended_equals_a_rendering_where_the_template_keeps_all_that_was_said(name: str) -> None:
    chat, _ = chat_of(name)
    question = [{"role": "system", "content": "Guess."}, {"role": "user", "content": "Begin."}]
    turn = chat.encode(f"50{ENDS[name][0]}")
    rendered = chat.render([*question, {"role": "assistant", "content": "50"}, *HIGHER])
    assert chat.render(question) + turn + chat.extend(turn, True, HIGHER) == rendered


def test_without_a_template_only_text_goes_between_the_turns() -> None:
    chat, tokenizer = chat_of("qwen3", has_template=False)
    assert not chat.has_template
    assert tokenizer.decode(chat.extend([1], True, HIGHER)) == "Higher."


CALL = '{"name": "add", "arguments": {"a": 3}}'


@pytest.mark.parametrize(
    ("name", "text", "said", "calls"),
    [
        ("qwen3", f"One.\n<tool_call>\n{CALL}\n</tool_call>", "One.", [("add", {"a": 3})]),
        ("qwen3", f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>", "", [("add", {"a": 3})] * 2),
        ("qwen3", f"<think>\n<tool_call>{CALL}</tool_call>\n</think>\n\n7", "7", []),
        (
            "qwen3_5_think",
            "hm</think>\n\n<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n</function>\n</tool_call>",
            "",
            [("add", {"a": "3"})],
        ),
        ("llama3_1", '{"name": "add", "parameters": {"a": 3}}', "", [("add", {"a": 3})]),
        ("llama3_1", f"<|python_tag|>{CALL}; {CALL}", "", [("add", {"a": 3})] * 2),
        ("llama3_1", '{"a": 3} is all', '{"a": 3} is all', []),
        ("gemma3", f"```json\n[{CALL}, {CALL}]\n```", "", [("add", {"a": 3})] * 2),
        ("gemma3", '{"name": "add", "arguments": "{\\"a\\": 3}"}', "", [("add", {"a": 3})]),
        ("gemma3", "7", "7", []),
    ],
)
def test_calls_are_read_in_the_form_that_the_template_shows(name, text, said, calls):
    chat, _ = chat_of(name)
    parsed = chat.parse(chat.encode(text + ENDS[name][0]), TOOLS)
    assert [(call.name, call.arguments) for call in parsed.calls] == calls
    assert not any(call.error for call in parsed.calls)
    assert parsed.message["content"] == said
    assert len(parsed.message.get("tool_calls", ())) == len(calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3", '<tool_call>\n{"name": "add", "arguments": {"a": 3}\n</tool_call>'),
        ("qwen3", '<tool_call>{"name": "add"'),
        ("qwen3", '<tool_call>{"arguments": {}}</tool_call>'),
        ("qwen3", '<tool_call>{"name": "add", "arguments": "x"}</tool_call>'),
        ("qwen3", "<tool_call>" + "[" * 100_000),
        ("llama3_1", "<|python_tag|>add(3)"),
        ("llama3_1", '{"name": "add", "parameters": {"a": 3}'),
    ],
)
def test_a_call_that_cannot_be_read_says_why_and_is_no_exception(name: str, text: str) -> None:
    chat, _ = chat_of(name)
    (call,) = chat.parse(chat.encode(text), TOOLS).calls
    assert "must be" in call.error


def test_without_tools_nothing_is_read_as_a_call() -> None:
    chat, _ = chat_of("gemma3")
    parsed = chat.parse(chat.encode(CALL))
    assert (parsed.calls, parsed.message) == ((), {"role": "assistant", "content": CALL})


@pytest.mark.parametrize(
    "number", ["18446744073709551616", "-9223372036854775809", "NaN", "1e999", "[Infinity]"]
)
def test_a_number_that_only_python_reads_is_a_wrong_call(number: str) -> None:
    chat, _ = chat_of("qwen3")
    text = f'<tool_call>\n{{"name": "add", "arguments": {{"a": {number}}}}}\n</tool_call>'
    (call,) = chat.parse(chat.encode(text), TOOLS).calls
    assert (call.name, call.arguments) == ("add", {}) and call.error


PARTIAL = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nrm"
WHOLE = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("last", [PARTIAL, WHOLE.removesuffix("\n</tool_call>")])
def test_a_call_that_was_cut_off_is_not_made_with_the_parameters_that_are_there(last: str) -> None:
    chat, _ = chat_of("qwen3")
    first, second = chat.parse(chat.encode(f"{WHOLE}\n{last}"), TOOLS, is_cut=True).calls
    assert (first.arguments, first.error) == ({"a": 1}, "")
    assert second.arguments == {} and second.error
    (whole,) = chat.parse(chat.encode(WHOLE), TOOLS, is_cut=True).calls
    assert not whole.error


def test_half_a_character_is_read_as_one_that_is_lost() -> None:
    chat, _ = chat_of("qwen3")
    cut = [{"role": "user", "content": "a\ud83d"}]
    lost = [{"role": "user", "content": "a\ufffd"}]
    tools = [
        {"type": "function", "function": {"name": "add", "description": "Add \ud83d.", "parameters": {}}}
    ]
    assert chat.render(cut) == chat.render(lost) and chat.render(cut, tools)
