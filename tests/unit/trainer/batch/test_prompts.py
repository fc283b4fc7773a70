"""Prompts: rows as token ids, in an order that one integer describes; exact shares of sources."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.support.training import trainer_config
from tidemill.common.config.data import DataConfig
from tidemill.common.data.dataset import Row
from tidemill.common.errors import ConfigError
from tidemill.services.trainer.batch import prompts as module
from tidemill.services.trainer.batch.mixture import Mixture
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


def test_each_epoch_visits_every_row_once_in_an_order_of_its_own():
    source = make_source()
    epochs = [order(source, range(10 * epoch, 10 * epoch + 10)) for epoch in range(4)]
    assert all(sorted(rows) == list(range(10)) for rows in epochs)
    assert len({tuple(rows) for rows in epochs}) == 4
    assert order(make_source(3, shuffle=False), range(7)) == [0, 1, 2, 0, 1, 2, 0]
    with pytest.raises(ValueError, match="-1"):
        source.prompt_at(-1)


def test_the_order_is_a_function_of_seed_and_position_alone_and_the_same_in_every_release():
    resumed = make_source()
    assert order(resumed, range(23, 40)) == order(make_source(), range(40))[23:]
    assert order(resumed, range(3)) == order(make_source(), range(3)), "also of an earlier position"
    assert order(make_source(seed=1), range(10)) != order(make_source(), range(10))
    assert order(make_source(8, seed=3), range(16)) == [0, 4, 7, 1, 5, 6, 3, 2, 0, 6, 2, 1, 3, 7, 4, 5]


def test_a_resume_on_other_prompts_is_refused():
    config = trainer_config()
    saved = PromptPlan([make_source()], config).state(3)
    assert saved == {"fingerprint": make_source().fingerprint}
    PromptPlan([make_source()], config).restore(saved)
    prompt = make_source().prompts[0]
    changed = Prompt(prompt.ids, "", "", "another truth", {}, 0)
    others = [make_source(9), make_source(seed=1), make_source(shuffle=False)]
    for unlike in [*others, PromptSource([changed, *make_source().prompts[1:]], 0, True)]:
        with pytest.raises(ConfigError, match="fingerprint"):
            PromptPlan([unlike], config).restore(saved)


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
        (TEMPLATE, DIALOGUE, BRIEF,
         "<s> system So <s> user 1 ? <s> assistant 2 <s> user 3 ? Think . <s> assistant"),
    ],
)  # fmt: skip
def test_a_row_becomes_the_text_of_its_template_without_doubled_special_tokens(
    template, prompt, fields, expected
):
    tokenizer = make_tokenizer(template)
    rows = make_rows(prompt)
    with capture_logs() as logs:
        (encoded,) = encode_rows(rows, tokenizer, data(**fields))
    assert words(tokenizer, encoded) == expected
    assert rows == make_rows(prompt), "the row itself is not changed"
    assert encoded.ids.dtype == np.int32 and not encoded.ids.flags.writeable
    assert (encoded.data_source, encoded.row) == ("test", 0)
    assert (encoded.ground_truth, encoded.extra) == ("0", {"i": 0})
    # Judges and reward models have templates of their own, into which the policy's must not go.
    is_wrapped = isinstance(prompt, str) and encoded.text != prompt
    assert encoded.own_text == (prompt if is_wrapped else "")
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
def test_what_cannot_be_a_prompt_is_named(template, prompt, fields, named):
    with pytest.raises(ConfigError, match=named):
        encode_rows(make_rows("1", prompt), make_tokenizer(template), data(**fields))


@pytest.mark.parametrize(("num_tokens", "fits"), [(2, True), (1, False)])
def test_an_end_that_the_tokenizer_appends_does_not_end_a_prompt(num_tokens, fits):
    tokenizer = make_tokenizer()
    backend = tokenizer.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(single="$A <s>", special_tokens=[("<s>", 1)])
    rows = make_rows("Be brief")
    limits = data(max_prompt_tokens=num_tokens)
    if fits:
        (prompt,) = encode_rows(rows, tokenizer, limits)
        assert words(tokenizer, prompt) == "Be brief"
        (prompt,) = encode_rows(make_rows("Be brief <s>"), tokenizer, data(max_prompt_tokens=3))
        assert words(tokenizer, prompt) == "Be brief <s>", "what the row itself has stays"
    else:
        with pytest.raises(ConfigError, match="has 2 tokens"):
            encode_rows(rows, tokenizer, limits)


def test_prompts_that_are_too_long_can_be_dropped_with_a_count():
    config = data(max_prompt_tokens=4, overlong_prompts="drop")
    with capture_logs() as logs:
        kept = encode_rows(make_rows("1", "1 2 3 4", "2"), make_tokenizer(), config)
    assert [prompt.row for prompt in kept] == [0, 2]
    assert (logs[0]["num_overlong"], logs[0]["num_rows"], logs[0]["longest"]) == (1, 3, 5)


@pytest.mark.parametrize(
    ("side", "limit", "kept"),
    [("left", 3, "2 3 4"), ("right", 3, "<s> 1 2"), ("middle", 3, "<s> 3 4"), ("middle", 4, "<s> 1 3 4")],
)
def test_prompts_that_are_too_long_can_be_cut(side, limit, kept):
    tokenizer = make_tokenizer()
    config = data(max_prompt_tokens=limit, overlong_prompts=side)
    with capture_logs() as logs:
        short, long = encode_rows(make_rows("1", "1 2 3 4"), tokenizer, config)
    assert words(tokenizer, long) == long.text == kept
    assert (long.own_text, short.text) == ("1 2 3 4", "1")
    assert (logs[0]["num_overlong"], logs[0]["num_rows"]) == (1, 2) and side in logs[0]["event"]


def test_a_chat_is_cut_after_its_template():
    tokenizer = make_tokenizer(TEMPLATE)
    whole = encode_rows(make_rows("1 2 3 4"), tokenizer, data())[0].ids.tolist()
    cut = encode_rows(make_rows("1 2 3 4"), tokenizer, data(max_prompt_tokens=3, overlong_prompts="left"))
    assert cut[0].ids.tolist() == whole[-3:]


def test_only_the_first_rows_are_read_where_that_is_asked(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"prompt": "{number}", "ground_truth": 1}}\n' for number in range(5)))
    config = DataConfig(train=[str(file), str(file)], max_rows=7, shuffle=False)
    (source,) = load_training_prompts(config, make_tokenizer(), seed=0)
    assert [prompt.text for prompt in source.prompts] == ["0", "1", "2", "3", "4", "0", "1"]


def test_batches_of_any_size_give_the_same_prompts(monkeypatch):
    rows = make_rows(*[" ".join(map(str, range(i % 7 + 1))) for i in range(25)])
    whole = [prompt.ids.tolist() for prompt in encode_rows(rows, make_tokenizer(), data())]
    monkeypatch.setattr(module, "BATCH_ROWS", 4)
    assert [prompt.ids.tolist() for prompt in encode_rows(rows, make_tokenizer(), data())] == whole


def test_training_and_evaluation_files_are_read_as_configured():
    sample = str(Path(__file__).parents[3] / "data" / "gsm8k_sample.jsonl")
    config = DataConfig(train=[sample, sample], eval={"first": sample}, shuffle=False)
    (source,) = load_training_prompts(config, make_tokenizer(), seed=0)
    assert len(source) == 80 and source.prompt_at(45).ground_truth == source.prompt_at(5).ground_truth
    sets = load_eval_prompts(config, make_tokenizer(), max_prompts=3)
    assert [prompt.row for prompt in sets["first"]] == [0, 1, 2]
    assert sets["first"][0].text.startswith("Natalia sold clips")


def test_a_model_folder_without_a_tokenizer_is_told_in_plain_words(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_tokenizer(str(tmp_path))
    make_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path))("1 2")["input_ids"] == make_tokenizer()("1 2")["input_ids"]


def test_streamed_prompts_are_those_that_are_held_and_come_in_the_same_order(tmp_path):
    lines = [f'{{"prompt": "{"9 " * (i % 4 + 1)}{i}", "ground_truth": {i}}}\n' for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    fields = {"train": str(tmp_path / "rows.jsonl"), "max_prompt_tokens": 5, "overlong_prompts": "drop"}
    (held,) = load_training_prompts(DataConfig(**fields), make_tokenizer(), seed=3)
    (streamed,) = load_training_prompts(DataConfig(**fields, stream=True), make_tokenizer(), seed=3)
    assert len(held) == len(streamed) == 15, "one of four is too long"
    for position in range(40):
        ours = streamed.prompt_at(position)
        theirs = held.prompt_at(position)
        assert ours.ticket_fields() | {"prompt_ids": 0} == theirs.ticket_fields() | {"prompt_ids": 0}
        assert ours.ids.tolist() == theirs.ids.tolist()
    assert streamed.rows.tolist() == held.rows.tolist()
    (tmp_path / "rows.jsonl").write_text("".join([lines[0].replace("9", "8"), *lines[1:]]))
    (changed,) = load_training_prompts(DataConfig(**fields, stream=True), make_tokenizer(), seed=3)
    assert changed.fingerprint != streamed.fingerprint


def sources(mixture: Mixture, count: int) -> list[int]:
    return [mixture.place_at(number)[0] for number in range(count)]


def test_by_hand():
    """Weights 1/2, 1/3, 1/6. After 6: three, two and one. At n = 1 all may come, due at 2, 3 and 6. At n = 2
    sources 1 and 2 may (source 0 has 1 of 2 * 1/2), due at 3 and 6; at n = 3 only 0 (due 4) and 2; at n = 4
    1 (due 6) and 2 (due 6), a tie; at n = 5 0 (due 6) and who lost the tie (due 6); at n = 6 who is left."""
    for seed in range(8):
        chosen = sources(Mixture([3, 2, 1], seed), 6)
        assert chosen[:3] == [0, 1, 0]
        assert sorted(chosen[3:]) == [0, 1, 2]
        assert chosen[3] in (1, 2)


@pytest.mark.parametrize("seed", range(5))
def test_after_any_number_of_tickets_each_source_is_within_one_of_its_share(seed):
    rng = np.random.default_rng(seed)
    weights = [round(float(weight), 3) + 0.001 for weight in rng.exponential(size=int(rng.integers(2, 9)))]
    chosen = np.array(sources(Mixture(weights, seed), 3000))
    counts = np.cumsum(np.eye(len(weights))[chosen], axis=0)
    shares = np.outer(np.arange(1, 3001), np.array(weights) / np.sum(weights))
    assert np.abs(counts - shares).max() < 1.0 + 1e-6


def test_positions_of_a_source_count_up_without_a_gap():
    mixture = Mixture([0.7, 0.2, 0.1], 3)
    places = [mixture.place_at(number) for number in range(500)]
    for source in range(3):
        positions = [position for its_source, position in places if its_source == source]
        assert positions == list(range(len(positions)))
    assert mixture.counts_at(500) == [350, 100, 50]
    assert mixture.counts_at(0) == [0, 0, 0]


def test_a_place_does_not_depend_on_which_were_asked_before():
    forward = sources(Mixture([1, 1, 2], 7), 100)
    backward = Mixture([1, 1, 2], 7)
    assert [backward.place_at(number)[0] for number in reversed(range(100))] == forward[::-1]
    assert sources(Mixture([1, 1, 2], 8), 100) != forward


def test_the_order_never_changes_between_releases():
    order = [0, 1, 0, 2, 0, 1, 0, 1, 2, 0, 0, 1, 0, 2, 0, 1, 0, 2, 1, 0]
    assert sources(Mixture([0.5, 0.3, 0.2], 11), 20) == order


def test_a_source_at_its_limit_leaves_its_place_to_the_others():
    """One of two rows, twice: four turns of half of the tickets; then the two others share by 3 to 1."""
    mixture = Mixture([4, 3, 1], 0, [4, None, None])
    chosen = sources(mixture, 40)
    assert Counter(chosen)[0] == 4
    last = max(number for number, source in enumerate(chosen) if source == 0)
    assert last < 8
    later = chosen[last + 1 :]
    assert all(abs(later[:n].count(1) - 0.75 * n) < 1 for n in range(1, len(later)))


def test_when_all_sources_are_at_their_limits_the_message_says_so():
    mixture = Mixture([1, 1], 0, [2, 3])
    assert Counter(sources(mixture, 5)) == {0: 2, 1: 3}
    with pytest.raises(ConfigError, match="every source has been used for all its epochs, after 5 groups"):
        mixture.place_at(5)
