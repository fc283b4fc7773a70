"""Looks at a model folder from outside: is it complete, and is its context long enough?

Reads the small JSON files only. The services load the model with their own libraries and may still refuse it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tidemill.common.config import DataConfig, ModelConfig, RunConfig, is_path
from tidemill.common.data.dataset import Row
from tidemill.common.data.prompt_lengths import TOKENIZER_FILE, Ruler
from tidemill.common.data.prompt_text import fate_of_overlong
from tidemill.common.errors import ConfigError
from tidemill.common.files import did_you_mean
from tidemill.common.run.chat_template import ChatTemplate, RenderError, read_json
from tidemill.common.run.model_config import overridden
from tidemill.common.run.routers import EXPERT_COUNTS
from tidemill.common.run.special_tokens import FileVocabulary, TokenReader, choose

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model folder says about itself. A hub name has no folder yet."""

    path: Path
    is_remote: bool = False
    architecture: str = ""
    model_type: str = ""
    context: int | None = None
    """Maximum length of a sequence in tokens, None where config.json does not say."""
    weight_bytes: int = 0
    route_bytes: int = 0
    """Bytes that record one token's experts in all layers; 0 where the model has none, or does not say."""


def inspect_model(model: ModelConfig, needs_weights: bool = True) -> ModelFacts:
    folder = Path(model.path)
    if not folder.is_dir():
        if "/" not in model.path and not is_path(model.path):
            hint = did_you_mean(folder, Path.is_dir)
            raise ConfigError(
                f"model.path {model.path}: there is no such folder.{hint} Relative paths in a config start "
                "at the config's folder; a model of the hub is OWNER/NAME."
            )
        if is_path(model.path):
            raise ConfigError(
                f"model.path {model.path} is not a folder.{did_you_mean(folder, Path.is_dir)} "
                "Give the folder of a Hugging Face model with its tokenizer. Relative paths in a config "
                "start at the config's folder."
            )
        return ModelFacts(folder, is_remote=True)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"model folder {folder} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}); save it there "
            "with tokenizer.save_pretrained."
        )
    if not (folder / "config.json").is_file():
        if needs_weights:
            raise ConfigError(
                f"model folder {folder} has no config.json; give the folder of a Hugging Face model."
            )
        return ModelFacts(folder)
    tree = overridden(read_json(folder / "config.json"), model.overrides)
    # Models of text and images keep the context one level down.
    inner = tree.get("text_config")
    levels = (inner if isinstance(inner, dict) else {}, tree)
    lengths = [level.get("max_position_embeddings") for level in levels]
    weights = {file for pattern in WEIGHT_PATTERNS for file in folder.glob(pattern)}
    if needs_weights and not weights:
        raise ConfigError(
            f"model folder {folder} has no weights ({' or '.join(WEIGHT_PATTERNS)}); save them there with "
            "model.save_pretrained."
        )
    facts = ModelFacts(
        folder,
        architecture=str((tree.get("architectures") or [tree.get("model_type", "")])[0]),
        model_type=str(tree.get("model_type", "")),
        context=next((length for length in lengths if isinstance(length, int)), None),
        weight_bytes=sum(file.stat().st_size for file in weights),
        route_bytes=_route_bytes(inner if isinstance(inner, dict) else tree),
    )
    if facts.context is not None and model.max_model_len > facts.context:
        raise ConfigError(
            f"model.max_model_len is {model.max_model_len}, but {folder} has a context of {facts.context} "
            "tokens; lower model.max_model_len."
        )
    return facts


def _route_bytes(text: Mapping[str, Any]) -> int:
    num_experts = max((text[name] or 1 for name in EXPERT_COUNTS if name in text), default=1)
    if num_experts == 1:
        return 0
    per_layer = (text.get("num_experts_per_tok") or 0) * (1 if num_experts <= 256 else 2)
    return int(per_layer * (text.get("num_hidden_layers") or 0))


MAX_TOKENIZED = 10_000
"""Prompts of each set in which unknown text is looked for, where the tokenizer may not know some."""
CHECKED_AT_START = "prompt lengths are checked when the trainer starts"


def check_lengths(
    rows: Mapping[str, Sequence[Row]], model: ModelFacts | None, data: DataConfig, notes: list[str]
) -> None:
    """Compare prompts with `data.max_prompt_tokens`, and with the vocabulary; `notes` get what is too long,
    what the tokenizer does not know, and what cannot be checked."""
    if model is None or model.is_remote or not rows:
        return
    if not (model.path / TOKENIZER_FILE).is_file():
        notes.append(f"{model.path} has no tokenizer.json: {CHECKED_AT_START}")
        return
    ruler = Ruler(model.path, data)
    has_flag = bool(_settings(model.path / "tokenizer_config.json").get("add_eos_token"))
    if ruler.num_ends or (has_flag and not ruler.has_template):
        notes.append(
            f"the tokenizer of {model.path} writes its end token behind every text (add_eos_token); prompts "
            "are without it, because the model continues them"
        )
    for name, prompts in rows.items():
        try:
            overlong = list(ruler.overlong(prompts))
        except RenderError as error:
            notes.append(f"{name}: {error}: {CHECKED_AT_START}")
            continue
        if overlong:
            becomes = fate_of_overlong(overlong, len(prompts), data)
            notes.append(
                f"{name}: {len(overlong):,} of {len(prompts):,} prompts are too long and will be {becomes}"
            )
        notes.extend(_count_unknown(name, prompts, ruler))


def _count_unknown(name: str, prompts: Sequence[Row], ruler: Ruler) -> Iterator[str]:
    """A note on the prompts with text that the tokenizer does not know."""
    num_rows = min(len(prompts), MAX_TOKENIZED)
    unknown = list(ruler.unknown(islice(prompts, num_rows)))
    if unknown:
        text, origin = unknown[0]
        beginning = "the first " if num_rows < len(prompts) else ""
        yield (
            f"{name}: {len(unknown):,} of {beginning}{num_rows:,} prompts have text that the tokenizer does "
            f"not know, such as {text!r} ({origin}): the model reads {ruler.unknown_token} in its place"
        )


def read_special_tokens(model: ModelConfig) -> TokenReader | None:
    """What reads the completions of this model for rewards; None where its folder does not say.

    Raises:
        ConfigError: the model's special tokens cannot be read as `model.special_tokens` says.
    """
    folder = Path(model.path)
    if not (folder / TOKENIZER_FILE).is_file():
        return None
    settings = _settings(folder / "tokenizer_config.json")
    ends: list[Any] = [
        _settings(folder / name).get("eos_token_id") for name in ("generation_config.json", "config.json")
    ]
    end_ids: Any = next((end for end in ends if end is not None), [])
    try:
        vocabulary = FileVocabulary(
            folder / TOKENIZER_FILE, settings, [end_ids] if isinstance(end_ids, int) else end_ids
        )
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(
            f"{folder / TOKENIZER_FILE} is not a tokenizer that can be loaded: {error}."
        ) from None
    template = ChatTemplate.of(folder)

    def render(messages: list[dict[str, str]], speaks: bool) -> str:
        assert template is not None
        try:
            return template.render(messages, add_generation_prompt=speaks)
        except RenderError as error:
            raise ValueError(str(error)) from None

    choice = choose(model.special_tokens, vocabulary, template.source if template else "", render)
    return TokenReader(vocabulary, choice)


def describe_reading(model: ModelConfig, reader: TokenReader) -> str:
    """What rewards will see of a completion of this model, with an example."""
    written, reading = reader.example()
    sees = f"of {written!r} rewards see {reading.text!r}"
    if reading.thought is not None:
        sees += f", and the thought {reading.thought!r} in extra_info"
    is_auto = " (auto)" * (model.special_tokens == "auto")
    return f"{sees}; special tokens are {reader.choice.mode}{is_auto}"


def _settings(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def check_teachers(config: RunConfig) -> None:
    """Compare vocabularies of policy and teachers, where the folders of both are on this machine.

    A teacher gets token ids: with another tokenizer they would mean another text."""
    ours = _vocabulary(config.model.path)
    for name, reward in config.reward.named.items():
        served = config.servers[reward.servers] if reward.teacher else None
        if served is None or served.local is None or not ours or not (theirs := _vocabulary(served.model)):
            continue
        # A teacher may know more tokens: the policy never samples those.
        wrong = [(number, token) for token, number in ours.items() if theirs.get(token) != number]
        if wrong:
            number, token = min(wrong)
            there = f"is {theirs[token]}" if token in theirs else "does not exist"
            raise ConfigError(
                f"reward.rewards.{name}: the teacher {served.model} has another tokenizer than model.path, "
                f"{config.model.path}: token {token!r} is {number} in the policy's and {there} in the "
                f"teacher's; {len(wrong):,} of {len(ours):,} differ. A teacher scores token ids: take one of "
                "the policy's family"
            )


def _vocabulary(model: str) -> dict[str, int]:
    """Ids by token, special ones included; empty where the folder does not say."""
    file = Path(model) / TOKENIZER_FILE
    if not file.is_file():
        return {}
    tree = read_json(file)
    vocabulary = (tree.get("model") or {}).get("vocab")
    tokens = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    return tokens | {token["content"]: token["id"] for token in tree.get("added_tokens") or ()}
