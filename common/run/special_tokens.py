"""What rewards, judges, environments and people read of the tokens that a model wrote.

Special tokens mark where a thought or a channel begins and ends (gpt-oss, Magistral, Gemma 4), and decoding
usually leaves them out: thought and answer become one text. `model.special_tokens` decides, and `TokenReader`
is the only place that does it:

| value | text | thought |
|---|---|---|
| `shown` | with special tokens, but for those at its end that only end it (end of turn, padding) | None |
| `hidden` | without special tokens | None |
| `parted` | the answer | the thought, empty where there is none |

`auto` is `parted` where the tokenizer has the marks of a thought (`MARKS`) as special tokens; `shown` where
the chat template has other special tokens than those that frame every turn; else `hidden`, which then leaves
out nothing that the model wrote. Only text is made here: token ids stay as they are.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from tidemill.common.config.run import ModelConfig
from tidemill.common.errors import ConfigError

NUM_TAIL_TOKENS = 16
"""Tokens at the end of a prompt among which the mark of an opened thought is looked for."""
QUESTION = "QUESTIONTEXT"
ANSWER = "ANSWERTEXT"
"""Stand for what is said in a chat that is rendered to see the frame of a turn."""

Ids = Sequence[int]


@dataclass(frozen=True, slots=True)
class Marks:
    """How a family of models marks its thoughts: `open` thought `close` answer.

    >>> Marks("Magistral", "[THINK]", "[/THINK]")  # [THINK]2 and 2[/THINK]4
    """

    models: str
    open: str
    close: str
    label: str = ""
    """Text after `open` that is no part of the thought."""
    around_answer: tuple[str, ...] = ()
    """Marks that begin and end the answer, and are no part of it."""


CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
HARMONY = Marks("gpt-oss", CHANNEL, MESSAGE)
"""`<|channel|>analysis<|message|>`thought`<|end|><|start|>assistant<|channel|>final<|message|>`answer
(vllm/parser/harmony.py): the word before `<|message|>` says what follows."""
OF_COMMAND_A = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
MARKS = (
    HARMONY,
    Marks("Magistral", "[THINK]", "[/THINK]"),  # vllm/parser/mistral.py
    Marks("Gemma 4", "<|channel>", "<channel|>", "thought\n"),  # vllm/parser/gemma4.py
    # vllm/reasoning/cohere_command_reasoning_parser.py, vllm/parser/cohere_command.py
    Marks("Command A", "<|START_THINKING|>", "<|END_THINKING|>", "", OF_COMMAND_A),
    Marks("Seed-OSS", "<seed:think>", "</seed:think>"),  # vllm/parser/seed_oss.py
    Marks("MiniMax M3", "<mm:think>", "</mm:think>"),  # vllm/reasoning/minimax_m3_reasoning_parser.py
    Marks("PLaMo 3", "<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),  # vllm/parser/plamo3.py
    # Qwen3, DeepSeek R1, GLM, Kimi K2 and others: an ordinary token of most of them, so part of every text.
    Marks("Qwen3", "<think>", "</think>"),  # vllm/reasoning/basic_parsers.py
)
"""Marks of thoughts that are known, with the parser of vLLM 0.32 that reads them."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What is read of tokens; `thought` is None where thoughts are not parted from the text.

    Example: of `[THINK]2 and 2[/THINK]4</s>` the `text` is "4" and the `thought` "2 and 2" where they are
    parted.
    """

    text: str
    thought: str | None = None


class Vocabulary(Protocol):
    """What is needed of a tokenizer."""

    special_ids: frozenset[int]
    ending_ids: frozenset[int]
    """Special tokens without a meaning at the end of a text: its end, padding, the beginning of the next."""

    def id_of(self, token: str) -> int | None:
        """The id of one token; None where it is not one token."""

    def decode(self, ids: Ids, skips_special: bool) -> str: ...

    def encode(self, text: str) -> list[int]: ...


class LibraryVocabulary:
    """The vocabulary of a tokenizer of transformers; `end_ids` are those that stop a generation."""

    def __init__(self, tokenizer: Any, end_ids: Ids = ()) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special_ids = {number for number, token in added.items() if token.special}
        self.special_ids = frozenset(special_ids | set(tokenizer.all_special_ids))
        ids = [tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id, *end_ids]
        self.ending_ids = frozenset(number for number in ids if number is not None)

    def id_of(self, token: str) -> int | None:
        number = self._tokenizer.convert_tokens_to_ids(token)
        is_known = isinstance(number, int) and self._tokenizer.convert_ids_to_tokens(number) == token
        return number if is_known else None

    def decode(self, ids: Ids, skips_special: bool) -> str:
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=skips_special, clean_up_tokenization_spaces=False
        )
        return text

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


class FileVocabulary:
    """The vocabulary of a tokenizer.json, read without transformers. `settings` are those of
    tokenizer_config.json."""

    def __init__(self, file: Path, settings: Mapping[str, Any], end_ids: Ids = ()) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(file))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        named = {name: settings[name] for name in settings if name.endswith("_token")}
        ends = (named.get(name) for name in ("eos_token", "pad_token", "bos_token"))
        further = settings.get("additional_special_tokens") or settings.get("extra_special_tokens") or ()
        added = self._tokenizer.get_added_tokens_decoder()
        special_ids = {number for number, token in added.items() if token.special}
        special_ids |= self._ids_of(named.values())
        special_ids |= self._ids_of(further.values() if isinstance(further, Mapping) else further)
        self.special_ids = frozenset(special_ids)
        self.ending_ids = frozenset(self._ids_of(ends) | set(end_ids))

    def _ids_of(self, tokens: Iterable[Any]) -> set[int]:
        texts = (token.get("content") if isinstance(token, Mapping) else token for token in tokens)
        ids = (self.id_of(text) for text in texts if isinstance(text, str))
        return {number for number in ids if number is not None}

    def id_of(self, token: str) -> int | None:
        number: int | None = self._tokenizer.token_to_id(token)
        return number

    def decode(self, ids: Ids, skips_special: bool) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skips_special)
        return text

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


Render = Callable[[list[dict[str, str]], bool], str]
"""The text of a chat, with the generation prompt if the second argument says so."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How special tokens are read: `marks` are those that part a thought, and `mentioned` the special tokens
    that have a meaning otherwise.

    Example: `mode` "parted" with the marks `[THINK]` and `[/THINK]`: texts are without the thoughts.
    """

    mode: str
    marks: Marks | None = None
    mentioned: tuple[str, ...] = ()


def choose(setting: str, vocabulary: Vocabulary, template: str, render: Render) -> Choice:
    """How the special tokens of a model are read, by `model.special_tokens`.

    Raises:
        ConfigError: they are to be parted, and the tokenizer has no marks that are known.
    """
    families = [marks for marks in MARKS if _has(vocabulary, marks)]
    special = [marks for marks in families if _has(vocabulary, marks, is_special=True)]
    if setting == "auto" and special:
        return Choice("parted", special[0])
    if setting == "parted":
        if not families:
            pairs = ", ".join(f"{marks.open} {marks.close}" for marks in MARKS)
            raise ConfigError(
                "model.special_tokens is parted, but the tokenizer has none of the marks of a thought that "
                f"are known, as one token each: {pairs}; "
                "set it to shown, and part the text in the reward."
            )
        return Choice("parted", (special or families)[0])
    mentioned = tuple(_mentioned(vocabulary, template, render))
    if special:
        mentioned = (special[0].open, special[0].close)
    if setting == "auto":
        setting = "shown" if mentioned else "hidden"
    return Choice(setting, mentioned=mentioned)


def _has(vocabulary: Vocabulary, marks: Marks, is_special: bool = False) -> bool:
    ids = [vocabulary.id_of(marks.open), vocabulary.id_of(marks.close)]
    if None in ids:
        return False
    return not is_special or vocabulary.special_ids.issuperset(ids)


def _mentioned(vocabulary: Vocabulary, template: str, render: Render) -> Iterator[str]:
    """The special tokens that a chat template has beside those that frame every turn."""
    if not template:
        return
    frame = _frame(render)
    for number in sorted(vocabulary.special_ids - vocabulary.ending_ids):
        token = vocabulary.decode([number], skips_special=False).strip()
        if token and token in template and token not in frame:
            yield token


def _frame(render: Render) -> str:
    """What a template writes around the model's turn, where the model has no part in it."""
    question = [{"role": "user", "content": QUESTION}]
    answered = [*question, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": QUESTION}]
    try:
        before = render(question, True)
        after = render(answered, True).partition(ANSWER)[2]
    except ValueError:
        return ""
    return before + after


@dataclass(frozen=True, slots=True)
class TokenReader:
    """Reads what a model wrote, as `choice` says.

    Example: with `choice` "parted", the ids of `[THINK]2 and 2[/THINK]4` give `Reading("4", "2 and 2")`.
    """

    vocabulary: Vocabulary
    choice: Choice
    _open_id: int | None = field(init=False, default=None)
    _close_id: int | None = field(init=False, default=None)
    _answer_ids: frozenset[int] = field(init=False, default=frozenset())

    def __post_init__(self) -> None:
        marks = self.choice.marks
        if marks is None:
            return
        answer_ids = (self.vocabulary.id_of(token) for token in marks.around_answer)
        object.__setattr__(self, "_open_id", self.vocabulary.id_of(marks.open))
        object.__setattr__(self, "_close_id", self.vocabulary.id_of(marks.close))
        object.__setattr__(self, "_answer_ids", frozenset(n for n in answer_ids if n is not None))

    @property
    def parts(self) -> bool:
        return self.choice.marks is not None

    def read(self, ids: Ids, mask: Sequence[bool] | None = None, prompt_ids: Ids = ()) -> Reading:
        """What is read of a completion of `prompt_ids`.

        Args:
            ids: [T] the completion, of one turn or of a session.
            mask: [T] which tokens are the model's; None: all. The others are the environment's and the chat
                template's, whose special tokens are always left out.
            prompt_ids: what precedes it: it may open the thought.
        """
        if self.choice.mode == "hidden":
            return Reading(self.vocabulary.decode(ids, skips_special=True))
        texts: list[str] = []
        thoughts: list[str] = []
        preceding = [int(token) for token in prompt_ids[-NUM_TAIL_TOKENS:]]
        for is_models, run in _runs(ids, mask):
            if is_models:
                reading = self.read_turn(run, self.is_thought_open(preceding))
                texts.append(reading.text)
                thoughts.append(reading.thought or "")
            else:
                texts.append(self.vocabulary.decode(run, skips_special=True))
            preceding = [*preceding, *run][-NUM_TAIL_TOKENS:]
        text = "".join(texts)
        return Reading(text, "\n\n".join(filter(None, thoughts)) if self.parts else None)

    def read_turn(self, ids: Ids, is_thought_open: bool = False) -> Reading:
        """What is read of one turn of the model."""
        if not self.parts:
            return Reading(self.text_of(ids))
        ids = self._without_end(ids)
        if self.choice.marks is HARMONY:
            return self._read_channels(ids, is_thought_open)
        return self._read_marked(ids, is_thought_open)

    def text_of(self, ids: Ids) -> str:
        """The whole text of tokens, not parted: for what has no place for a thought."""
        if self.choice.mode == "hidden":
            return self.vocabulary.decode(ids, skips_special=True)
        return self.vocabulary.decode(self._without_end(ids), skips_special=False)

    def is_thought_open(self, prompt_ids: Ids) -> bool:
        """Whether a prompt ends with the beginning of a thought, as templates write it for the model."""
        tail = list(prompt_ids[-NUM_TAIL_TOKENS:])
        marks = self.choice.marks
        if marks is None or self._open_id not in tail:
            return False
        text = self.vocabulary.decode(tail, skips_special=False).rstrip()
        opened = f"{CHANNEL}analysis{MESSAGE}" if marks is HARMONY else marks.open
        return "".join(text.split()).endswith((opened, opened + marks.label.rstrip()))

    def example(self) -> tuple[str, Reading]:
        """A completion with the marks of this model, and what is read of it."""
        marks = self.choice.marks
        mentioned = self.choice.mentioned
        if CHANNEL in mentioned or marks is HARMONY:
            text = f"{CHANNEL}analysis{MESSAGE}2 and 2<|end|><|start|>assistant{CHANNEL}final{MESSAGE}4"
        elif marks is not None:
            text = f"{marks.open}{marks.label}2 and 2{marks.close}4"
        elif len(mentioned) > 1:
            text = f"{mentioned[0]}2 and 2{mentioned[1]}4"
        else:
            text = "".join([*mentioned, "4"])
        ends = sorted(self.vocabulary.ending_ids)
        written = [*self.vocabulary.encode(text), *ends[:1]]
        return self.vocabulary.decode(written, skips_special=False), self.read_turn(written)

    def _without_end(self, ids: Ids) -> Ids:
        end = len(ids)
        while end and ids[end - 1] in self.vocabulary.ending_ids:
            end -= 1
        return ids[:end]

    def _read_marked(self, ids: Ids, is_open: bool) -> Reading:
        assert self.choice.marks is not None
        thoughts: list[list[int]] = [[]]
        answer: list[int] = []
        was_open = is_open
        for token in ids:
            if token == self._open_id:
                is_open = True
                was_open = True
                thoughts.append([])
            elif token == self._close_id:
                if not was_open:  # the prompt has opened it
                    thoughts[-1] += answer
                    answer.clear()
                is_open = False
                was_open = True
            elif is_open:
                thoughts[-1].append(token)
            elif token not in self._answer_ids:
                answer.append(token)
        label = self.choice.marks.label
        texts = (self._text(thought).removeprefix(label).strip() for thought in thoughts)
        text = self._text(answer)
        return Reading(text.lstrip() if was_open else text, "\n\n".join(filter(None, texts)))

    def _read_channels(self, ids: Ids, is_open: bool) -> Reading:
        """gpt-oss: messages of several channels. `analysis` is the thought; a call of a tool stays in the
        answer with its header, because without it nobody could tell what is called."""
        thoughts: list[str] = []
        answers: list[str] = []
        for header, body in self._messages(ids, is_open):
            text = self._text(body)
            if header.rpartition(CHANNEL)[2].strip().startswith("analysis"):
                thoughts.append(text.strip())
            elif "to=" in header:
                answers.append(f"{header.removeprefix('assistant')}{MESSAGE}{text}")
            else:
                answers.append(text)
        return Reading("\n".join(filter(None, answers)), "\n\n".join(filter(None, thoughts)))

    def _messages(self, ids: Ids, is_open: bool) -> Iterator[tuple[str, list[int]]]:
        """Header and body of each message. The prompt ends within the first header, or, if `is_open`, behind
        that of a thought."""
        ends = [self.vocabulary.id_of(token) for token in ("<|end|>", "<|call|>", "<|return|>")]
        start_id = self.vocabulary.id_of("<|start|>")
        message_id = self._close_id
        header = f"{CHANNEL}analysis" if is_open else ""
        run: list[int] = []
        """Tokens of the header, or of the body."""
        is_body = is_open
        is_first = not is_open
        for token in ids:
            if token in (start_id, *ends) or (token == self._open_id and is_body):
                if run and is_body:
                    yield header, run
                header = ""
                is_body = False
                is_first = False
                run = [token] if token == self._open_id else []
            elif token == message_id and not is_body:
                header = self._text(run)
                run = []
                is_body = True
                is_first = False
            else:
                run.append(token)
        is_plain = is_first and self._open_id not in run  # no mark at all
        if run and (is_body or is_plain):
            yield header, run

    def _text(self, ids: Ids) -> str:
        return self.vocabulary.decode(ids, skips_special=False)


def end_ids_of(tokenizer: Any, *configured: int | Ids | None) -> tuple[int, ...]:
    """The ids that end a completion, ascending: the tokenizer's, and the first of `configured` that are any:
    a model's generation config, then its config. Chat models often name the end of a turn only there."""
    end_ids = next((ids for ids in configured if ids is not None and ids != []), ())
    listed = [end_ids] if isinstance(end_ids, int) else list(end_ids)
    return tuple(sorted({token for token in (tokenizer.eos_token_id, *listed) if token is not None}))


def _runs(ids: Ids, mask: Sequence[bool] | None) -> Iterator[tuple[bool, list[int]]]:
    """Runs of tokens of the model, and of others."""
    if mask is None:
        yield True, list(ids)
        return
    for is_models, pairs in groupby(zip(mask, ids, strict=True), key=lambda pair: bool(pair[0])):
        yield is_models, [int(token) for _, token in pairs]


def reader_of(model: ModelConfig, tokenizer: Any, end_ids: Ids = ()) -> TokenReader:
    """The reader for a model's tokenizer, as transformers has loaded it.

    Raises:
        ConfigError: the special tokens cannot be parted.
    """
    vocabulary = LibraryVocabulary(tokenizer, end_ids)
    template = getattr(tokenizer, "chat_template", None) or ""
    if isinstance(template, dict):
        template = template.get("default", "")

    def render(messages: list[dict[str, str]], speaks: bool) -> str:
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=speaks))
        except Exception as error:  # templates raise anything
            raise ValueError(str(error)) from None

    return TokenReader(vocabulary, choose(model.special_tokens, vocabulary, str(template), render))
