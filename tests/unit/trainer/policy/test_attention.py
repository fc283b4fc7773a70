"""The attention that models are loaded with computes what their authors wrote, in every service."""

import importlib
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, BertConfig, BertLMHeadModel, PreTrainedModel

from tests.support.architectures import FAMILIES, SIZES, make_config, make_model
from tests.support.models import (
    assert_all_close,
    logprobs_of,
    make_policy,
    make_relatives,
    make_samples,
    run_config,
    write_tokenizer,
)
from tests.support.parity import score_plain
from tests.support.samples import changed
from tidemill.common.errors import ConfigError
from tidemill.common.run.model_config import exact_attention
from tidemill.services.reward.model_server.options import ServerOptions
from tidemill.services.reward.model_server.scoring_model import ScoringModel
from tidemill.services.rollout.engines.model import load_model as load_for_engine
from tidemill.services.trainer.groups.micro_batch import MicroBatch
from tidemill.services.trainer.groups.sample import Sample
from tidemill.services.trainer.policy import attention
from tidemill.services.trainer.policy.attention import FLASH, VARLEN, choose_attention, why_no_varlen
from tidemill.services.trainer.policy.forward import TokenScorer, pick_layout
from tidemill.services.trainer.policy.model_loading import load_model
from tidemill.services.trainer.policy.transformers_policy import load_policy

CUDA = torch.device("cuda")


@pytest.fixture
def flash_is_installed(monkeypatch):
    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: True)


def with_capped_attention(path: Path) -> PreTrainedModel:
    """A Gemma 2 whose cap is low enough to matter; returned with plain attention."""
    make_model("Gemma2").save_pretrained(path)
    write_tokenizer(path)
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()


def test_trainer_and_engine_cap_attention_scores(tmp_path):
    plain = with_capped_attention(tmp_path)
    config = run_config(tmp_path, trainer={"device": "cpu"})
    samples = make_samples(6)
    engine = load_for_engine(config.model.model_copy(update={"dtype": "float32"}))
    for sample, mine in zip(samples, logprobs_of(load_policy(config), samples), strict=True):
        ids = sample.prompt_ids.tolist(), sample.completion_ids.tolist()
        expected = score_plain(plain, *ids)
        np.testing.assert_allclose(mine, expected, atol=1e-5)
        np.testing.assert_allclose(score_plain(engine, *ids), expected, atol=1e-5)


def test_reward_models_cap_attention_scores(tmp_path):
    torch.manual_seed(0)
    config = make_config("Gemma2")
    config.num_labels = 1
    config.architectures = ["Gemma2ForSequenceClassification"]
    transformers.Gemma2ForSequenceClassification(config).save_pretrained(tmp_path)
    plain = transformers.Gemma2ForSequenceClassification.from_pretrained(
        tmp_path, attn_implementation="eager"
    ).eval()
    rows = [[3, 4, 5, 6, 7, 8, 9], [5, 9, 11]]
    with torch.no_grad():
        expected = [plain(input_ids=torch.tensor([row])).logits[0].item() for row in rows]
    scores = ScoringModel(ServerOptions(model=str(tmp_path), device="cpu")).score(rows)
    np.testing.assert_allclose([score.item() for score in scores], expected, atol=1e-5)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 4.0, 6.0],
    "original_max_position_embeddings": 16,
}


def long_and_short() -> tuple[Sample, Sample]:
    """A sample of 40 tokens, and one of 12: above and below the original context of `LONGROPE`."""
    long, short = make_samples(2, max_prompt=1)
    ids = np.arange(3, 15, dtype=np.int32)
    return (
        changed(long, prompt_ids=np.resize(ids, 41 - len(long.completion_ids))),
        changed(short, prompt_ids=np.resize(ids, 13 - len(short.completion_ids))),
    )


@pytest.mark.parametrize(("max_model_len", "chosen"), [(64, "long_factor"), (16, "short_factor")])
def test_positions_depend_on_the_longest_sequence_of_the_run_alone(max_model_len, chosen, tmp_path):
    make_model("Llama", rope_parameters=LONGROPE).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    factors = {name: LONGROPE[chosen] for name in ("short_factor", "long_factor")}
    plain = make_model("Llama", rope_parameters=LONGROPE | factors)
    lengths = {"max_model_len": max_model_len, "dtype": "float32"}
    config = run_config(
        tmp_path,
        model=lengths,
        trainer={"device": "cpu"},
        data={"max_prompt_tokens": 4},
        rollout={"sampling": {"max_tokens": 8}},
    )
    policy = load_policy(config)
    engine = load_for_engine(config.model)
    long, short = long_and_short()
    ids = short.prompt_ids.tolist(), short.completion_ids.tolist()
    expected = score_plain(plain, *ids)
    for samples in ([short], [short, long]):
        np.testing.assert_allclose(logprobs_of(policy, samples)[0], expected, atol=1e-5)
    np.testing.assert_allclose(score_plain(engine, *ids), expected, atol=1e-5)


def test_a_reward_model_scores_a_row_alike_beside_any_other(tmp_path):
    torch.manual_seed(0)
    config = make_config("Llama", rope_parameters=LONGROPE)
    config.num_labels = 1
    config.architectures = ["LlamaForSequenceClassification"]
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    model = ScoringModel(ServerOptions(model=str(tmp_path), device="cpu"))
    short = [3, 4, 5, 6, 7, 8, 9]
    long = list(range(3, 27))
    np.testing.assert_allclose(model.score([short])[0], model.score([short, long])[0], atol=1e-5)


def test_a_model_that_computes_otherwise_beside_a_long_sequence_is_refused():
    model = make_model("Llama", rope_parameters=LONGROPE)
    scorer = TokenScorer(model, torch.float32)
    assert pick_layout(model, scorer, True, 16) == "tree_or_padded"
    with pytest.raises(ConfigError):
        pick_layout(model, scorer, True, 17)


def test_a_model_that_reads_later_tokens_is_refused():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    for is_decoder in (True, False):
        config = BertConfig(vocab_size=64, is_decoder=is_decoder, **sizes)
        model = BertLMHeadModel(config).eval()
        scorer = TokenScorer(model, torch.float32)
        with nullcontext() if is_decoder else pytest.raises(ConfigError):
            pick_layout(model, scorer, False, 16)


CPU = torch.device("cpu")
WIDE = torch.float32
HALF = torch.bfloat16


@pytest.mark.parametrize(
    ("family", "has_flash", "gpu", "device", "dtype", "expected"),
    [
        ("Llama", True, (9, 0), CUDA, HALF, VARLEN),
        ("Gemma2", True, (9, 0), CUDA, HALF, "flash_attention_2"),  # torch's kernel does not cap scores
        ("Gemma2", True, (9, 0), CUDA, WIDE, "eager"),
        ("Gemma2", True, (9, 0), CPU, HALF, "eager"),
        ("Gemma3", True, (9, 0), CUDA, HALF, {"text_config": VARLEN}),
        ("GptOss", True, (9, 0), CUDA, HALF, None),
        ("Llama", False, (9, 0), CUDA, HALF, VARLEN),
        ("Gemma3", False, (9, 0), CUDA, HALF, {"text_config": VARLEN}),
        ("Gemma2", False, (9, 0), CUDA, HALF, "eager"),
        ("Llama", False, (9, 0), CUDA, WIDE, None),
        ("Llama", False, (7, 0), CUDA, HALF, None),
    ],
)
def test_the_fastest_kernel_is_used_that_leaves_nothing_out(
    family, has_flash, gpu, device, dtype, expected, monkeypatch
):
    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: has_flash)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpu)
    assert choose_attention(make_config(family), device, dtype) == expected


def test_scores_without_a_cap_need_no_plain_kernel(flash_is_installed):
    config = make_config("Gemma2")
    config.attn_logit_softcapping = None
    assert choose_attention(config, CUDA, WIDE) is None


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (make_config("GptOss"), "GptOssForCausalLM has attention sinks"),
        (make_config("Falcon"), "FalconForCausalLM with ALiBi"),
        (transformers.MptConfig(d_model=32, n_heads=4, n_layers=1, vocab_size=32), "for MptForCausalLM"),
        (
            transformers.Llama4TextConfig(**SIZES, head_dim=8, intermediate_size_mlp=48, num_local_experts=2),
            "for Llama4ForCausalLM",
        ),
    ],
    ids=["GptOss", "Falcon", "MPT", "Llama4"],
)
def test_a_model_without_flash_attention_is_trained_without_and_the_log_says_why(
    config, reason, flash_is_installed, monkeypatch
):
    said = []
    monkeypatch.setattr(attention.log, "warning", lambda *args, **fields: said.append(fields))
    assert choose_attention(config, CUDA, torch.bfloat16) is None
    (fields,) = said
    assert reason in fields["reason"]


@pytest.mark.parametrize("family", ["Gemma3", "Gemma4"])
def test_a_model_of_text_and_images_is_loaded_with_what_is_chosen_for_its_text(family, tmp_path, monkeypatch):
    make_model(family).save_pretrained(tmp_path)
    chosen = {"text_config": "eager"}
    monkeypatch.setattr("tidemill.services.trainer.policy.model_loading.choose_attention", lambda *_: chosen)
    model = load_model(run_config(tmp_path).model, torch.device("cpu"))
    assert model.config.get_text_config()._attn_implementation == "eager"
    assert model.config._attn_implementation == "sdpa"


# Mamba has no attention; transformers' plain kernel counts Falcon's distances (ALiBi) twice, the fused once.
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("Mamba", "Falcon")])
def test_what_is_chosen_computes_what_plain_attention_does(family):
    """Found by comparing, not by knowing: a family whose fused kernel leaves something out fails here."""
    chosen = exact_attention(make_config(family))
    ids_BT = torch.arange(3, 23)[None]
    with torch.no_grad():
        mine = make_model(family, attention=chosen)(input_ids=ids_BT, use_cache=False).logits
        plain = make_model(family, attention="eager")(input_ids=ids_BT, use_cache=False).logits
    torch.testing.assert_close(mine, plain, atol=1e-4, rtol=1e-4)


def test_heads_that_the_kernel_does_not_take_are_told():
    assert why_no_varlen(transformers.LlamaConfig(hidden_size=128, num_attention_heads=2), (8, 0)) == ""
    wide = transformers.LlamaConfig(hidden_size=1024, num_attention_heads=2)
    assert "these have 512" in why_no_varlen(wide, (8, 0))
    unlike = make_config("Gemma4Text")  # of its layers, some have heads of 8 and some of 512
    assert "these have 512" in why_no_varlen(unlike, (8, 0))


def per_sequence(
    query, key, value, queries_at, keys_at, longest, most_keys, *, scale, window_size, enable_gqa
) -> torch.Tensor:  # fmt: skip
    """What torch's kernel computes, one sequence after the other with a mask, queries and keys aligned at
    their ends. Shapes [T, heads, size]."""
    assert (queries_at.diff() <= longest).all() and (keys_at.diff() <= most_keys).all()
    assert window_size[1] == 0 and queries_at.dtype == keys_at.dtype == torch.int32
    assert enable_gqa == (query.shape[1] != key.shape[1]) and query.dtype == key.dtype == value.dtype
    parts = []
    for (first, end), (above, below) in zip(
        pairwise(queries_at.tolist()), pairwise(keys_at.tolist()), strict=True
    ):
        positions = torch.arange(below - above)
        distance = positions[below - above - (end - first) :, None] - positions
        mask = (distance >= 0) & ((window_size[0] < 0) | (distance <= window_size[0]))
        inputs = [
            x[a:b].transpose(0, 1)[None]
            for x, a, b in ((query, first, end), (key, above, below), (value, above, below))
        ]
        attended = torch.nn.functional.scaled_dot_product_attention(
            *inputs, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
        parts.append(attended[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("layout", ["varlen", "tree"])
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma3", "Qwen3"])
def test_sequences_end_to_end_are_those_of_plain_attention(family, layout, monkeypatch):
    """Grouped keys, windows, scales of a model's own."""
    monkeypatch.setattr(attention, "varlen_attn", per_sequence)
    samples = make_relatives(12)
    plain = make_policy(model=make_model(family, attention="eager"))
    packed = make_policy(model=make_model(family, attention=VARLEN))
    assert packed.layout == "tree"
    packed.layout = layout
    packed._tile_tokens = 64
    batch = MicroBatch(tuple(samples))
    for policy in (plain, packed):
        policy.accumulate(batch)
    assert_all_close(logprobs_of(packed, samples), logprobs_of(plain, samples), 2e-05)
    for (name, weight), (_, expected) in zip(packed._parameters, plain._parameters, strict=True):
        if expected.grad is not None:
            torch.testing.assert_close(weight.grad, expected.grad, atol=2e-4, rtol=2e-3, msg=name)


def test_values_may_be_narrower_than_keys_and_rows_without_boundaries_are_sequences(monkeypatch):
    """As in multi-head latent attention; and as where a layout is probed."""
    monkeypatch.setattr(attention, "varlen_attn", per_sequence)
    query = torch.randn(2, 4, 5, 8)
    key = torch.randn(2, 4, 5, 8)
    value = torch.randn(2, 4, 5, 6)
    attended, _ = attention.attend_varlen(torch.nn.Identity(), query, key, value, None, scaling=0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3)
    torch.testing.assert_close(attended, expected.transpose(1, 2))
    with pytest.raises(ValueError, match="takes no mask"):
        attention.attend_varlen(torch.nn.Identity(), query, key, value, None, softcap=30.0)


@pytest.mark.parametrize("family", ["Falcon", "GPTJ", "GPTNeo"])
def test_a_model_that_looks_kernels_up_in_a_table_of_its_own_gets_one_of_them(family, monkeypatch, request):
    """It does not know torch's, and ended with a KeyError of that name."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    fields = {
        "Falcon": {"alibi": False},
        "GPTJ": {"rotary_dim": 8},
        "GPTNeo": {"attention_types": [[["global"], 2]]},
    }
    config = make_config(family, **fields[family])
    module = importlib.import_module(f"transformers.models.{config.model_type}.modeling_{config.model_type}")
    if not any(name.endswith("_ATTENTION_CLASSES") for name in vars(module)):
        # GPT-J has none since transformers 5.24 at the latest.
        assert choose_attention(config, CUDA, torch.bfloat16) == VARLEN
        return
    assert "own kernels alone" in why_no_varlen(config, (8, 0))
    assert choose_attention(config, CUDA, torch.bfloat16) is None, "flash attention is not installed"
    request.getfixturevalue("flash_is_installed")
    assert choose_attention(config, CUDA, torch.bfloat16) == FLASH
