"""Prompts: rows as token ids, in an order that one integer describes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.support.training import trainer_config
from tidemill.common.config.data import DataConfig
from tidemill.common.errors import ConfigError
from tidemill.common.run.dataset import Row
from tidemill.services.trainer.batch import prompts as module
from tidemill.services.trainer.batch.prompt_plan import PromptPlan
from tidemill.services.trainer.batch.prompts import (
    Prompt,
    PromptSource,
    encode_rows,
    load_eval_prompts,
    load_tokenizer,
    load_training_prompts,
)

TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "<s>{{ m.role }} {{ m.content }}{% if not loop.last %} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %} <s>assistant {% endif %}"
)


def make_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """Words are tokens; `<s>` is put before a text unless special tokens are off."""
    words = "<unk> <s> system user assistant Be brief . ? Think Answer : So"
    vocab = {word: index for index, word in enumerate([*words.split(), *map(str, range(100))])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>")
    tokenizer.chat_template = template
    return tokenizer


def make_rows(*prompts: Any) -> list[Row]:
    return [
        Row(prompt, "test", str(i), {"i": i}, i, f"a.jsonl line {i + 1}") for i, prompt in enumerate(prompts)
    ]


def make_source(num_rows: int = 10, seed: int = 0, shuffle: bool = True) -> PromptSource:
    ids = [np.array([row], np.int32) for row in range(num_rows)]
    return PromptSource([Prompt(ids[row], "", "", None, {}, row) for row in range(num_rows)], seed, shuffle)


def data(**fields: Any) -> DataConfig:
    return DataConfig(train="unused.jsonl", **fields)


def words(tokenizer: PreTrainedTokenizerFast, prompt: Prompt) -> str:
    return " ".join(tokenizer.convert_ids_to_tokens(prompt.ids.tolist()))


def order(source: PromptSource, positions: range) -> list[int]:
    return [source.prompt_at(position).row for position in positions]


def test_each_epoch_visits_every_row_once_in_an_order_of_its_own() -> None:
    source = make_source()
    epochs = [order(source, range(10 * epoch, 10 * epoch + 10)) for epoch in range(4)]
    assert all(sorted(rows) == list(range(10)) for rows in epochs)
    assert len({tuple(rows) for rows in epochs}) == 4
    assert order(make_source(3, shuffle=False), range(7)) == [0, 1, 2, 0, 1, 2, 0]
    with pytest.raises(ValueError, match="-1"):
        source.prompt_at(-1)


def test_the_order_is_a_function_of_seed_and_position_alone_and_the_same_in_every_release() -> None:
    resumed = make_source()
    assert order(resumed, range(23, 40)) == order(make_source(), range(40))[23:]
    assert order(resumed, range(3)) == order(make_source(), range(3)), "also of an earlier position"
    assert order(make_source(seed=1), range(10)) != order(make_source(), range(10))
    assert order(make_source(8, seed=3), range(16)) == [0, 4, 7, 1, 5, 6, 3, 2, 0, 6, 2, 1, 3, 7, 4, 5]


def test_a_resume_on_other_prompts_is_refused() -> None:
    config = trainer_config()
    saved = PromptPlan([make_source()], config).state(3)
    assert saved == {"fingerprint": make_source().fingerprint}
    PromptPlan([make_source()], config).restore(saved)
    prompt = make_source().prompts[0]
    changed = Prompt(prompt.ids, "", "", "another truth", {}, 0)
    others = [make_source(9), make_source(seed=1), make_source(shuffle=False)]
    for other in [*others, PromptSource([changed, *make_source().prompts[1:]], 0, True)]:
        with pytest.raises(ConfigError, match="fingerprint"):
            PromptPlan([other], config).restore(saved)


def chat(*messages: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in messages]


PREFILLED = chat(("user", "1 ?"), ("assistant", "Answer :"))
DIALOGUE = chat(("system", "So"), ("user", "1 ?"), ("assistant", "2"), ("user", "3 ?"))
BRIEF = {"system_prompt": "Be brief .", "prompt_suffix": " Think ."}


@pytest.mark.parametrize(
    ("template", "prompt", "fields", "expected"),
    [
        (None, "1 2 ?", {"prompt_suffix": " Answer :"}, "<s> 1 2 ? Answer :"),
        (None, chat(("user", "1 ?")), {}, "<s> 1 ?"),
        (TEMPLATE, "1 ?", {"chat_template": "never", "system_prompt": "So"}, "<s> 1 ?"),
        (TEMPLATE, "1 ?", BRIEF, "<s> system Be brief . <s> user 1 ? Think . <s> assistant"),
        (TEMPLATE, PREFILLED, {}, "<s> user 1 ? <s> assistant Answer :"),
        # The row's own system prompt wins, and the suffix goes to the last question.
        (
            TEMPLATE,
            DIALOGUE,
            BRIEF,
            "<s> system So <s> user 1 ? <s> assistant 2 <s> user 3 ? Think . <s> assistant",
        ),
    ],
)
def test_a_row_becomes_the_text_of_its_template_without_doubled_special_tokens(
    template: str | None, prompt: Any, fields: dict[str, str], expected: str
) -> None:
    tokenizer, rows = make_tokenizer(template), make_rows(prompt)
    with capture_logs() as logs:
        (made,) = encode_rows(rows, tokenizer, data(**fields))
    assert words(tokenizer, made) == expected
    assert rows == make_rows(prompt), "the row itself is not changed"
    assert made.ids.dtype == np.int32 and not made.ids.flags.writeable
    assert (made.data_source, made.ground_truth, made.extra, made.row) == ("test", "0", {"i": 0}, 0)
    # Judges and reward models have templates of their own, into which the policy's must not go.
    is_wrapped = isinstance(prompt, str) and made.text != prompt
    assert made.own_text == (prompt if is_wrapped else "")
    assert bool(logs) is ("never" in fields.values()), "a system prompt has no effect without a template"


@pytest.mark.parametrize(
    ("template", "prompt", "fields", "named"),
    [
        (None, "1", {"chat_template": "always"}, "data.chat_template"),
        (None, chat(("user", "1"), ("user", "2")), {}, "a.jsonl line 2"),
        (TEMPLATE, chat(("tool", "1")), {}, "a.jsonl line 2.*unknown role tool"),
        ("{{ '' }}", "1", {}, "a.jsonl line 1"),
        (None, "1 2 3 4", {"max_prompt_tokens": 4}, "a.jsonl line 2.*5 tokens.*1 of 2"),
        (None, "1", {"max_prompt_tokens": 1, "overlong_prompts": "drop"}, "all 2 .*a.jsonl line 1"),
    ],
)
def test_what_cannot_be_a_prompt_is_named(
    template: str | None, prompt: Any, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        encode_rows(make_rows("1", prompt), make_tokenizer(template), data(**fields))


def test_prompts_that_are_too_long_can_be_dropped_with_a_count() -> None:
    config = data(max_prompt_tokens=4, overlong_prompts="drop")
    with capture_logs() as logs:
        kept = encode_rows(make_rows("1", "1 2 3 4", "2"), make_tokenizer(), config)
    assert [prompt.row for prompt in kept] == [0, 2]
    assert (logs[0]["num_overlong"], logs[0]["num_rows"], logs[0]["longest"]) == (1, 3, 5)


@pytest.mark.parametrize(
    ("side", "limit", "kept"),
    [("left", 3, "2 3 4"), ("right", 3, "<s> 1 2"), ("middle", 3, "<s> 3 4"), ("middle", 4, "<s> 1 3 4")],
)
def test_prompts_that_are_too_long_can_be_cut(side: str, limit: int, kept: str) -> None:
    tokenizer, config = make_tokenizer(), data(max_prompt_tokens=limit, overlong_prompts=side)
    with capture_logs() as logs:
        short, long = encode_rows(make_rows("1", "1 2 3 4"), tokenizer, config)
    assert words(tokenizer, long) == long.text == kept
    assert (long.own_text, short.text) == ("1 2 3 4", "1")
    assert (logs[0]["num_overlong"], logs[0]["num_rows"]) == (1, 2) and side in logs[0]["event"]


def test_a_chat_is_cut_after_its_template() -> None:
    tokenizer = make_tokenizer(TEMPLATE)
    whole = encode_rows(make_rows("1 2 3 4"), tokenizer, data())[0].ids.tolist()
    cut = encode_rows(make_rows("1 2 3 4"), tokenizer, data(max_prompt_tokens=3, overlong_prompts="left"))
    assert cut[0].ids.tolist() == whole[-3:]


def test_only_the_first_rows_are_read_where_that_is_asked(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"prompt": "{number}", "ground_truth": 1}}\n' for number in range(5)))
    config = DataConfig(train=[str(file), str(file)], max_rows=7, shuffle=False)
    (source,) = load_training_prompts(config, make_tokenizer(), seed=0)
    assert [prompt.text for prompt in source.prompts] == ["0", "1", "2", "3", "4", "0", "1"]


def test_batches_of_any_size_give_the_same_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows(*[" ".join(map(str, range(i % 7 + 1))) for i in range(25)])
    whole = [prompt.ids.tolist() for prompt in encode_rows(rows, make_tokenizer(), data())]
    monkeypatch.setattr(module, "BATCH_ROWS", 4)
    assert [prompt.ids.tolist() for prompt in encode_rows(rows, make_tokenizer(), data())] == whole


def test_training_and_evaluation_files_are_read_as_configured() -> None:
    sample = str(Path(__file__).parents[3] / "data" / "gsm8k_sample.jsonl")
    config = DataConfig(train=[sample, sample], eval={"first": sample}, shuffle=False)
    (source,) = load_training_prompts(config, make_tokenizer(), seed=0)
    assert len(source) == 80 and source.prompt_at(45).ground_truth == source.prompt_at(5).ground_truth
    sets = load_eval_prompts(config, make_tokenizer(), max_prompts=3)
    assert [prompt.row for prompt in sets["first"]] == [0, 1, 2]
    assert sets["first"][0].text.startswith("Natalia sold clips")


def test_a_model_folder_without_a_tokenizer_is_told_in_plain_words(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_tokenizer(str(tmp_path))
    make_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path))("1 2")["input_ids"] == make_tokenizer()("1 2")["input_ids"]


def test_streamed_prompts_are_those_that_are_held_and_come_in_the_same_order(tmp_path: Path) -> None:
    lines = [f'{{"prompt": "{"9 " * (i % 4 + 1)}{i}", "ground_truth": {i}}}\n' for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    fields = {"train": str(tmp_path / "rows.jsonl"), "max_prompt_tokens": 5, "overlong_prompts": "drop"}
    (held,) = load_training_prompts(DataConfig(**fields), make_tokenizer(), seed=3)
    (streamed,) = load_training_prompts(DataConfig(**fields, stream=True), make_tokenizer(), seed=3)
    assert len(held) == len(streamed) == 15, "one of four is too long"
    for position in range(40):
        ours, theirs = streamed.prompt_at(position), held.prompt_at(position)
        assert ours.ticket_fields() | {"prompt_ids": 0} == theirs.ticket_fields() | {"prompt_ids": 0}
        assert ours.ids.tolist() == theirs.ids.tolist()
    assert streamed.rows.tolist() == held.rows.tolist()
    (tmp_path / "rows.jsonl").write_text("".join([lines[0].replace("9", "8"), *lines[1:]]))
    (changed,) = load_training_prompts(DataConfig(**fields, stream=True), make_tokenizer(), seed=3)
    assert changed.fingerprint != streamed.fingerprint
