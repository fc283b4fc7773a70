"""What is read of tokens that a model wrote: special tokens shown, hidden, or parted into thought and answer.

The tokenizers are made of single bytes; the templates are those of the models, as TRL has them.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tidemill.common.config.run import ModelConfig
from tidemill.common.errors import ConfigError
from tidemill.common.run.chat_template import read_json
from tidemill.common.run.special_tokens import MARKS, FileVocabulary, TokenReader, choose, reader_of

TRL = find_spec("trl")  # importing it takes seconds
assert TRL is not None
assert TRL.origin is not None
TEMPLATES = Path(TRL.origin).parent / "chat_templates"
TOKENS: dict[str, tuple[list[str], list[str]]] = {
    "gptoss": (["<|return|>", "<|call|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>"], []),
    "gemma4": (["<turn|>", "<|turn>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"], []),
    "magistral": (["</s>", "[INST]", "[/INST]", "[THINK]", "[/THINK]"], []),
    "qwen3": (["<|im_end|>", "<|endoftext|>", "<|im_start|>"], ["<think>", "</think>", "<tool_call>"]),
    "llama3_1": (["<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"], []),
    "gemma3": (["<end_of_turn>", "<start_of_turn>"], []),
    "unknown": (["</s>", "<|user|>", "<|model|>", "<|muse|>", "<|reply|>"], []),
}
"""Special tokens, of which the first ends a turn, and ordinary added ones."""
MAGISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
UNKNOWN = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% else %}<|model|>"
    "{% if m.thinking %}<|muse|>{{ m.thinking }}{% endif %}<|reply|>{{ m.content }}</s>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|model|>{% endif %}"
)


def tokenizer_of(name: str) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special, plain = TOKENS[name]
    templates = {"magistral": MAGISTRAL, "unknown": UNKNOWN}
    template = (
        templates[name] if name in templates else (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=special[0],
        pad_token="<pad>",
        bos_token="<s>",
        chat_template=template,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens(plain)
    return tokenizer


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def reader(name: str, setting: str = "auto") -> tuple[TokenReader, Any]:
    tokenizer = tokenizer_of(name)
    model = ModelConfig(path="model", special_tokens=setting)
    return reader_of(model, tokenizer, tokenizer.convert_tokens_to_ids(TOKENS[name][0][:1])), tokenizer


GPTOSS = (
    "<|channel|>analysis<|message|>2 and 2<|end|><|start|>assistant<|channel|>final<|message|>It is 4."
    "<|return|>"
)
GPTOSS_CALL = (
    "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary to=functions.f json"
    '<|message|>{"a": 1}<|call|>'
)
SHOWN_CALL = '<|channel|>commentary to=functions.f json<|message|>{"a": 1}'


@pytest.mark.parametrize(
    ("name", "written", "thought", "answer"),
    [
        ("gptoss", GPTOSS, "2 and 2", "It is 4."),
        ("gptoss", GPTOSS_CALL, "Look.", SHOWN_CALL),
        ("gptoss", f' to=functions.f{SHOWN_CALL.replace(" to=functions.f", "")}<|call|>', "",
         f' to=functions.f{SHOWN_CALL.replace(" to=functions.f", "")}'),
        ("gptoss", "<|channel|>analysis<|message|>2 and", "2 and", ""),
        ("gptoss", "<|channel|>fin", "", ""),
        ("gptoss", "<|channel|>commentary<|message|>So,<|end|><|start|>assistant<|channel|>final<|message|>4",
         "", "So,\n4"),
        ("gptoss", "It is 4.<|return|>", "", "It is 4."),
        ("gemma4", "<|channel>thought\n2 and 2\n<channel|>It is 4.<turn|>", "2 and 2", "It is 4."),
        ("gemma4", "<|channel>thought\n<channel|>It is 4.<turn|>", "", "It is 4."),
        ("gemma4", "It is 4.<turn|>", "", "It is 4."),
        ("magistral", "[THINK]2 and 2[/THINK]\nIt is 4.</s>", "2 and 2", "It is 4."),
        ("magistral", "[THINK]2 and", "2 and", ""),
        ("magistral", "2 and 2[/THINK]It is 4.</s>", "2 and 2", "It is 4."),
        ("magistral", "[THINK]2[/THINK]So [THINK]and 2[/THINK]4</s>", "2\n\nand 2", "So 4"),
        ("magistral", " It is 4.</s></s><pad>", "", " It is 4."),
        ("magistral", "", "", ""),
    ],
)  # fmt: skip
def test_known_marks_that_are_special_tokens_part_thought_and_answer_by_themselves(
    name, written, thought, answer
):
    reads, tokenizer = reader(name)
    reading = reads.read(ids_of(tokenizer, written))
    assert (reading.thought, reading.text) == (thought, answer)


@pytest.mark.parametrize(
    ("name", "prompt", "is_open"),
    [
        ("magistral", "[INST]q[/INST][THINK]", True),
        ("magistral", "[INST]q[/INST][THINK]\n", True),
        ("magistral", "[INST]write [THINK] now[/INST]", False),
        ("magistral", "[INST]q[/INST]", False),
        ("gemma4", "<|turn>model\n<|channel>thought\n", True),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", False),
        ("gptoss", "<|start|>assistant<|channel|>analysis<|message|>", True),
        ("gptoss", "<|start|>assistant<|channel|>final<|message|>", False),
        ("gptoss", "<|start|>assistant", False),
    ],
)
def test_a_thought_that_the_prompt_has_opened_is_a_thought_also_where_nothing_closes_it(
    name, prompt, is_open
):
    reads, tokenizer = reader(name)
    reading = reads.read(ids_of(tokenizer, "2 and"), prompt_ids=ids_of(tokenizer, prompt))
    assert (reading.thought, reading.text) == (("2 and", "") if is_open else ("", "2 and"))


def test_text_that_only_looks_like_a_mark_is_no_mark():
    reads, tokenizer = reader("magistral")
    spelled = [token for letter in "[THINK]" for token in ids_of(tokenizer, letter)]
    assert reads.read(spelled).text == "[THINK]"


@pytest.mark.parametrize(
    ("name", "mode"),
    [("gptoss", "parted"), ("gemma4", "parted"), ("magistral", "parted"), ("qwen3", "hidden"),
     ("gemma3", "hidden"), ("llama3_1", "shown"), ("unknown", "shown")],
)  # fmt: skip
def test_the_default_hides_nothing_that_a_template_gives_a_meaning(name, mode):
    assert reader(name)[0].choice.mode == mode


def test_of_an_unknown_format_special_tokens_are_shown_but_for_those_that_only_end_the_text():
    reads, tokenizer = reader("unknown")
    assert reads.choice.mentioned == ("<|muse|>", "<|reply|>")
    reading = reads.read(ids_of(tokenizer, "<|muse|>2 and 2<|reply|>4</s><pad>"))
    assert (reading.text, reading.thought) == ("<|muse|>2 and 2<|reply|>4", None)


@pytest.mark.parametrize("name", ["gptoss", "gemma4", "magistral", "unknown", "qwen3"])
def test_hidden_is_the_text_without_special_tokens(name):
    reads, tokenizer = reader(name, "hidden")
    ids = ids_of(tokenizer, "".join(TOKENS[name][0]) + "4")
    reading = reads.read(ids)
    assert (
        (reading.text, reading.thought)
        == (tokenizer.decode(ids, skip_special_tokens=True), None)
        == ("4", None)
    )


def test_ordinary_tokens_of_a_thought_are_text_unless_they_are_to_be_parted():
    text = "<think>\n2 and 2\n</think>\n\n4"
    reads, tokenizer = reader("qwen3")
    assert reads.read(ids_of(tokenizer, f"{text}<|im_end|>")).text == text
    reads, tokenizer = reader("qwen3", "parted")
    reading = reads.read(ids_of(tokenizer, f"{text}<|im_end|>"))
    assert (reading.thought, reading.text) == ("2 and 2", "4")


def test_marks_that_are_not_known_cannot_be_parted():
    with pytest.raises(ConfigError, match=r"model.special_tokens .* \[THINK\] \[/THINK\]"):
        reader("unknown", "parted")


@pytest.mark.parametrize(
    ("setting", "text", "thought"),
    [
        ("auto", "onetwothree", "a\n\nb"),
        ("shown", "[THINK]a[/THINK]onetwo[THINK]b[/THINK]three", None),
        ("hidden", "aonetwobthree", None),
    ],
)
def test_of_a_session_only_what_the_model_wrote_is_read_so(setting, text, thought):
    reads, tokenizer = reader("magistral", setting)
    turns = ["[THINK]a[/THINK]one</s>", "[INST]two[/INST]", "[THINK]b[/THINK]three</s>"]
    pieces = [ids_of(tokenizer, turn) for turn in turns]
    mask = [number != 1 for number, piece in enumerate(pieces) for _ in piece]
    reading = reads.read([token for piece in pieces for token in piece], mask)
    assert (reading.text, reading.thought) == (text, thought)


@pytest.mark.parametrize("name", TOKENS)
def test_a_tokenizers_file_alone_leads_to_the_same_choice(name, tmp_path):
    reads, tokenizer = reader(name)
    tokenizer.save_pretrained(tmp_path)
    settings = read_json(tmp_path / "tokenizer_config.json")
    vocabulary = FileVocabulary(tmp_path / "tokenizer.json", settings)

    def render(messages: Any, speaks: bool) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=speaks))

    choice = choose("auto", vocabulary, tokenizer.chat_template, render)
    assert choice == reads.choice
    assert TokenReader(vocabulary, choice).example() == reads.example()


def test_every_known_mark_is_named_once():
    names = [mark for marks in MARKS for mark in (marks.open, marks.close)]
    assert len(set(names)) == len(names)
