"""Demonstrations: rows as tokens with a mask, and their places in the batches."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from tests.support.models import write_tokenizer
from tests.support.trajectories import make_config
from tidemill.common.config.data import DataConfig
from tidemill.common.config.run import ModelConfig
from tidemill.common.errors import ConfigError
from tidemill.common.wire.messages import FIRST_DEMONSTRATION
from tidemill.services.trainer.batch.demonstrations import Demonstration, load_demonstrations
from tidemill.services.trainer.batch.prompt_plan import PromptPlan
from tidemill.services.trainer.batch.prompts import Prompt, PromptSource

USER = "w21"
ASSISTANT = "w20"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %} w20 {{ m.content }} <eos>"
    "{% else %} w21 {{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %} w20{% endif %}"
)
GENERATION = TEMPLATE.replace(
    "{{ m.content }} <eos>{% else", "{% generation %}{{ m.content }} <eos>{% endgeneration %}{% else"
)
FORGETFUL = TEMPLATE.replace("{{ m.content }} <eos>", "{{ m.content if loop.last else 'w9' }} <eos>")
"""What the assistant said before is rendered otherwise, as templates do that drop earlier thinking."""


STRIPPING = [
    "<pad>",
    "<eos>",
    "<unk>",
    "<|user|>",
    "<|assistant|>",
    "[THINK]",
    "[/THINK]",
    *(f"w{n}" for n in range(9)),
]
STRIPPING += ["\n"]
"""A vocabulary whose special tokens for the roles take the white space beside them."""


def write_stripping(folder: Path, template: str | None) -> None:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(STRIPPING)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("\n| +"), "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>", chat_template=template
    )
    roles = [AddedToken(role, lstrip=True, rstrip=True, special=True) for role in STRIPPING[3:5]]
    tokenizer.add_special_tokens({"additional_special_tokens": [*roles, "[THINK]", "[/THINK]"]})
    tokenizer.save_pretrained(folder)


def loaded(
    folder: Path,
    rows: list[dict[str, Any]],
    template: str | None = None,
    stripping: bool = False,
    appends_end: bool = False,
    special_tokens: Any = "auto",
    **data: Any,
) -> Any:
    """The demonstrations of these rows; words w0, w1, ... are tokens 3, 4, ..."""
    if stripping:
        write_stripping(folder, template)
    else:
        write_tokenizer(folder, template, appends_end=appends_end)
    path = folder / "shown.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"name": "shown", "kind": "demonstrations", "path": str(path)}
    config = DataConfig.model_validate({"train": [source], "shuffle": False, **data})
    model = ModelConfig(path=str(folder), max_model_len=16, special_tokens=special_tokens)
    (source_read,) = load_demonstrations(config, AutoTokenizer.from_pretrained(folder), 0, model)
    return [source_read.prompts[index] for index in range(len(source_read))]


def words(demonstration: Demonstration) -> tuple[str, str, str]:
    """Prompt, completion, and what of it is trained."""
    names = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(29))]
    trained = demonstration.completion_ids[demonstration.mask]

    def text(ids: Any) -> str:
        return " ".join(names[i] for i in ids)

    return text(demonstration.ids), text(demonstration.completion_ids), text(trained)


def said(*turns: str) -> list[dict[str, str]]:
    """A chat in which user and assistant take turns."""
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)]


ANSWERED = ("w21 w1 w20", "w2 <eos>", "w2 <eos>")
LONG = ("w21 w1 w20", "w2 <eos> w21 w3 w20 w4 w5 <eos>", "w2 <eos> w4 w5 <eos>")
LAST = ("w21 w1 w20 w2 <eos> w21 w3 w20", "w4 w5 <eos>", "w4 w5 <eos>")


@pytest.mark.parametrize("template", [TEMPLATE, GENERATION])
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": said("w1", "w2")}, ANSWERED),
        ({"prompt": "w1", "completion": "w2"}, ANSWERED),
        ({"prompt": said("w1"), "completion": said("w0", "w2")[1:]}, ANSWERED),
        ({"question": "w1", "response": "w2"}, ANSWERED),
        ({"messages": said("w1", "w2", "w3", "w4 w5")}, LONG),
        ({"prompt": said("w1", "w2", "w3"), "completion": "w4 w5"}, LAST),
    ],
)
def test_the_assistants_turns_of_a_completion_are_trained(tmp_path, template, row, expected):
    assert [words(demonstration) for demonstration in loaded(tmp_path, [row], template)] == [expected]


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"prompt": None, "completion": "w1"}, "prompt"),
        ({"prompt": "w1", "response": None}, "response"),
        ({"prompt_ids": [4], "completion_ids": None}, "completion_ids"),
    ],
)
def test_a_column_with_null_is_named_as_such(tmp_path, row, column):
    with pytest.raises(ConfigError, match=f"shown.jsonl line 1: column '{column}' is null, and "):
        loaded(tmp_path, [row])


def test_text_without_a_template_ends_with_the_tokenizers_end(tmp_path):
    rows = [{"prompt": "w1 w2", "completion": " w3"}, {"prompt": "w1", "completion": " w3 <eos>"}]
    demonstrations = loaded(tmp_path, rows, prompt_suffix=" w9")
    assert list(map(words, demonstrations)) == [
        ("w1 w2 w9", "w3 <eos>", "w3 <eos>"),
        ("w1 w9", "w3 <eos>", "w3 <eos>"),
    ]


def test_ids_are_taken_as_they_are(tmp_path):
    rows = [
        {"prompt_ids": [4, 5], "completion_ids": [6, 7, 8], "loss_mask": [1, 0, 1]},
        {"prompt_ids": [4], "completion_ids": [6, 1]},
    ]
    assert list(map(words, loaded(tmp_path, rows, TEMPLATE))) == [
        ("w1 w2", "w3 w4 w5", "w3 w5"),
        ("w1", "w3 <eos>", "w3 <eos>"),
    ]


def test_ids_that_the_model_has_and_its_tokenizer_does_not_know_are_taken_as_they_are(tmp_path):
    rows = [{"prompt_ids": [4], "completion_ids": [35, 1]}]
    LlamaConfig(vocab_size=40).save_pretrained(tmp_path)
    (demonstration,) = loaded(tmp_path, rows)
    assert demonstration.completion_ids.tolist() == [35, 1]
    with pytest.raises(ConfigError, match="another tokenizer"):
        loaded(tmp_path, [{"prompt_ids": [4], "completion_ids": [40, 1]}])


MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}ASSISTANT{% generation %}BLOCK{% endgeneration %}"
    "{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT{% endif %}"
)
"""A template whose special tokens have white space beside them."""
BETWEEN = said("w1", "w2", "w3", "w4")


@pytest.mark.parametrize(
    ("opening", "block", "expected"),
    [
        ("<|assistant|>", "{{ m.content }}<eos>", ("w2 <eos>", "w4 <eos>")),
        # What a special token takes is no token: the block's first one is that of the answer.
        ("<|assistant|>", "{{ '\\n' + m.content }}<eos>", ("w2 <eos>", "w4 <eos>")),
        ("<|assistant|>\n", "{{ m.content }}<eos>", ("w2 <eos>", "w4 <eos>")),
    ],
)
def test_a_special_token_that_takes_the_space_beside_it_is_trained_only_in_a_generation_block(
    tmp_path, opening, block, expected
):
    template = MARKED.replace("ASSISTANT", opening).replace("BLOCK", block)
    (demonstration,) = loaded(tmp_path, [{"messages": BETWEEN}], template, stripping=True)
    trained = [STRIPPING[token] for token in demonstration.completion_ids[demonstration.mask]]
    assert " ".join(trained) == " ".join(expected)


@pytest.mark.parametrize("block", ["{{ m.content }}\n", "{{ m.content }} w5\n"])
def test_a_generation_block_whose_end_a_special_token_takes_is_refused(tmp_path, block):
    template = MARKED.replace("ASSISTANT", "<|assistant|>").replace("BLOCK", block)
    with pytest.raises(ConfigError, match=r"shown.jsonl line 1: .* reaches over a border"):
        loaded(tmp_path, [{"messages": BETWEEN}], template, stripping=True)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "w1", "completion": "w2 \ud83d"},
        {"messages": said("w1", "w2 \ude00")},
        {"prompt": said("w\ud83d"), "completion": "w2"},
    ],
)
def test_half_of_a_surrogate_pair_is_refused_by_file_line_and_field(tmp_path, row):
    with pytest.raises(ConfigError, match=r"shown.jsonl line 1: .*half of a surrogate pair.*take it out"):
        loaded(tmp_path, [row], TEMPLATE)


@pytest.mark.parametrize(
    ("special_tokens", "expected"),
    [
        ("auto", ("w3", "w2")),
        ("shown", ("[THINK] w2 [/THINK] w3", None)),
        ("hidden", ("w2 w3", None)),
    ],
)
def test_its_text_is_read_as_that_of_a_completion(tmp_path, special_tokens, expected):
    ids = [STRIPPING.index(word) for word in ("[THINK]", "w2", "[/THINK]", "w3", "<eos>")]
    rows = [{"prompt_ids": [5], "completion_ids": ids}]
    (demonstration,) = loaded(tmp_path, rows, stripping=True, special_tokens=special_tokens)
    trajectory = demonstration.trajectory(FIRST_DEMONSTRATION, 0, 0)
    assert (trajectory.text, trajectory.thought) == expected
    assert trajectory.completion_ids.tolist() == ids


def test_an_end_token_that_the_tokenizer_appends_is_no_part_of_the_prompt(tmp_path):
    (demonstration,) = loaded(tmp_path, [{"prompt": "w1", "completion": " w2"}], appends_end=True)
    assert words(demonstration) == ("w1", "w2 <eos>", "w2 <eos>")


def test_streamed_rows_are_those_that_are_held(tmp_path):
    rows = [{"prompt": f"w{n}", "completion": f" w{n}"} for n in range(4)]
    rows[1]["completion"] = " w1" * 30
    held = loaded(tmp_path, rows, overlong_prompts="drop")
    streamed = loaded(tmp_path, rows, overlong_prompts="drop", stream=True)
    assert list(map(words, held)) == list(map(words, streamed))
    assert [demonstration.row for demonstration in held] == [0, 2, 3]
    assert [demonstration.row for demonstration in streamed] == [0, 2, 3]


@pytest.mark.parametrize(
    ("row", "template", "said_of_it"),
    [
        ({"prompt": "w1"}, None, "column 'completion'"),
        ({"completion": "w1"}, None, "column 'prompt'"),
        ({"messages": said("w1")}, TEMPLATE, "column 'completion'"),
        ({"messages": said("w0", "w1")[1:]}, TEMPLATE, "a question before the answer"),
        ({"prompt": said("w1"), "completion": said("w2")}, TEMPLATE, "the last is the assistant's"),
        ({"messages": said("w1", "w2")}, None, "no chat template"),
        ({"messages": said("w1", "w2", "w3", "w4")}, FORGETFUL, "renders 2 messages otherwise"),
        ({"prompt": "w1", "completion": " w2" * 20}, None, "22 tokens"),
        ({"prompt_ids": [4], "completion_ids": [99]}, None, "another tokenizer"),
        ({"prompt_ids": [4], "completion_ids": [5], "prompt": "w2"}, None, "another tokenizer"),
        ({"prompt_ids": [4], "completion_ids": ["a"]}, None, "whole numbers"),
        ({"prompt_ids": [4], "completion_ids": [5, 6], "loss_mask": [1]}, None, "loss_mask of 1"),
        ({"prompt_ids": [], "completion_ids": [5]}, None, "nothing before its first token"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_by_file_and_line(tmp_path, row, template, said_of_it):
    first = {"prompt_ids": [4], "completion_ids": [5]}
    with pytest.raises(ConfigError, match=r"shown.jsonl line 2: .*" + said_of_it):
        loaded(tmp_path, [first, row], template)


def plan_of(weights: dict[str, float], groups_per_step: int = 4, **fields: Any) -> PromptPlan:
    """Sources by weight; those that begin with `shown` have 5 demonstrations, the others 7 prompts."""
    sources: list[dict[str, Any]] = [{"name": n, "path": "x", "weight": w} for n, w in weights.items()]
    for source in sources:
        source["kind"] = "demonstrations" if source["name"].startswith("shown") else "prompts"
        if source["name"] == "shown" and "epochs" in fields:
            source["epochs"] = fields["epochs"]
    config = make_config(
        data={"train": sources}, trainer={"steps": 100, "groups_per_step": groups_per_step, "group_size": 2}
    )
    ids = np.array([3, 4], np.int32)
    mask = np.ones(2, np.bool_)
    by_kind: dict[bool, list[PromptSource]] = {True: [], False: []}
    for source in config.data.sources:
        rows: list[Prompt] = [
            Demonstration(ids, "", "", None, {}, row, source=source.name, completion_ids=ids + row, mask=mask,
                          completion="")
            if source.is_imitated
            else Prompt(ids, "", "", None, {}, row, source=source.name)
            for row in range(5 if source.is_imitated else 7)
        ]  # fmt: skip
        by_kind[source.is_imitated].append(PromptSource(rows, 0, True, source.name))
    return PromptPlan(by_kind[False], config, by_kind[True])


@pytest.mark.parametrize(
    "weights", [{"sums": 3, "shown": 1}, {"a": 0.1, "b": 0.2, "shown": 0.1, "shown2": 0.6}]
)
def test_each_step_has_its_share_of_demonstrations(weights):
    plan = plan_of(weights)
    share = sum(weight for name, weight in weights.items() if "shown" in name) / sum(weights.values())
    for step in range(1, 60):
        num_shown = 4 * step - plan.num_tickets(step)
        assert abs(num_shown - share * 4 * step) < len(weights)
        assert sum(len(plan.demonstration_places.tickets(earlier)) for earlier in range(step)) == num_shown
        first = plan.num_tickets(step - 1)
        assert all(plan.step_of(n) == step - 1 for n in range(first, plan.num_tickets(step)))


def test_a_demonstration_follows_from_its_number_alone():
    plan = plan_of({"shown": 1})
    second_plan = plan_of({"shown": 1})
    numbers = plan.demonstration_places.tickets(3)
    assert numbers == [FIRST_DEMONSTRATION + index for index in range(12, 16)]
    trajectories = [plan.demonstration_places.trajectory(number) for number in numbers]
    assert [trajectory.step for trajectory in trajectories] == [3] * 4
    assert [trajectory.min_version for trajectory in trajectories] == [2] * 4
    assert trajectories == [second_plan.demonstration_places.trajectory(number) for number in numbers]
    epoch = [
        plan.demonstration_places.trajectory(FIRST_DEMONSTRATION + index).completion_ids[0]
        for index in range(5)
    ]
    assert sorted(epoch) == [3, 4, 5, 6, 7], "each row once"


def test_after_their_epochs_all_places_are_for_prompts():
    plan = plan_of({"sums": 1, "shown": 1_000_000}, epochs=2)
    assert [plan.num_tickets(steps) for steps in (2, 3, 4)] == [0, 2, 6], "10 places of 12 are shown"


def test_a_change_of_the_demonstrations_changes_the_fingerprint():
    assert plan_of({"sums": 1, "shown": 1}).fingerprint == plan_of({"sums": 1, "shown": 1}).fingerprint
    assert plan_of({"sums": 1, "shown": 1}).fingerprint != plan_of({"sums": 1, "shown": 2}).fingerprint
