"""What a tokenizer does not know, whatever its kind."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tidemill.common.config import DataConfig
from tidemill.common.data.dataset import Row
from tidemill.common.data.prompt_lengths import TOKENIZER_FILE, Ruler
from tidemill.common.errors import ConfigError

PIECES = [("<unk>", 0.0), ("a", -1.0), ("b", -1.0)]
IDS = {"<unk>": 0, "a": 1, "b": 2}
BYTES = {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
MODELS = {
    "unigram": models.Unigram(PIECES, 0, False),
    "words": models.WordLevel(IDS, unk_token="<unk>"),
    "pairs": models.BPE(IDS, [], unk_token="<unk>", fuse_unk=True),
}
KNOW_ALL = {
    "unigram on bytes": models.Unigram([*PIECES, *((piece, -9.0) for piece in BYTES)], 0, True),
    "pairs on bytes": models.BPE(IDS | BYTES, [], unk_token="<unk>", byte_fallback=True),
    "pairs without a token for it": models.BPE({"a": 1}, []),
}


def ruler_of(folder: Path, model: models.Model, begins: bool = False) -> Ruler:
    """`begins`: the unknown token stands at the beginning of each text, too."""
    tokenizer = Tokenizer(model)
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing("<unk> $A", None, [("<unk>", 0)])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<unk>"] if tokenizer.token_to_id("<unk>") is not None else [])
    tokenizer.save(str(folder / TOKENIZER_FILE))
    return Ruler(folder, DataConfig(train="none", chat_template="never"))


def unknown(ruler: Ruler, *texts: str) -> list[tuple[str, str]]:
    rows = [Row(text, "", None, {}, number, f"row {number}") for number, text in enumerate(texts)]
    return list(ruler.unknown(rows))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_each_prompt_with_text_that_the_tokenizer_does_not_know_is_named_once(tmp_path, model):
    ruler = ruler_of(tmp_path, model)
    assert unknown(ruler, "a b", "a 日本 b ñ", "<unk> b", "ñ") == [("日本", "row 1"), ("ñ", "row 3")]
    assert ruler.unknown_token == "<unk>"


def test_a_token_that_also_begins_each_prompt_is_no_unknown_text(tmp_path):
    ruler = ruler_of(tmp_path, MODELS["words"], begins=True)
    assert unknown(ruler, "a b", "a ñ") == [("ñ", "row 1")]


@pytest.mark.parametrize("model", KNOW_ALL.values(), ids=KNOW_ALL)
def test_where_nothing_stands_for_unknown_text_no_prompt_is_named(tmp_path, model):
    ruler = ruler_of(tmp_path, model)
    assert unknown(ruler, "a", "日本") == [] and ruler.unknown_token == ""


def test_a_tokenizer_without_a_token_for_unknown_text_is_a_mistake_with_its_file(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot encode a prompt: .*must have a token"):
        ruler_of(tmp_path, models.WordLevel({"a": 0}, unk_token="<unk>"))
