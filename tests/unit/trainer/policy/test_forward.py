"""Logprobs of the forward pass: every layout equals row by row, chunked equals whole, nothing leaks."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    PreTrainedModel,
)

from tests.support.allocations import peak_bytes
from tests.support.architectures import make_model
from tests.support.models import (
    PIECES,
    assert_all_close,
    attend_as_varlen,
    logprobs_of,
    make_policy,
    make_samples,
    tiny_llama,
)
from tests.support.samples import changed
from tidemill.common.errors import ConfigError
from tidemill.common.wire.choices import Rows
from tidemill.services.trainer.groups.sample import Sample
from tidemill.services.trainer.policy import head as head_module
from tidemill.services.trainer.policy import precision
from tidemill.services.trainer.policy.forward import TokenScorer, find_scaling
from tidemill.services.trainer.policy.head import PLAIN, Scaling, score_hidden, score_logits
from tidemill.services.trainer.policy.packing import Layout, choose_layout, make_rows, plan_tiles
from tidemill.services.trainer.policy.tile import lay_out


def completions_of(samples: list[Sample]) -> list[np.ndarray]:
    """Marks every completion token as scored."""
    return [np.ones(len(sample.completion_ids), dtype=np.bool_) for sample in samples]


def row_by_row(model: PreTrainedModel, samples: list[Sample], temperature: float = 1.0) -> list[torch.Tensor]:
    """The reference: one unpadded sequence at a time, whole logits."""
    results = []
    for sample in samples:
        ids = torch.tensor(np.concatenate([sample.prompt_ids, sample.completion_ids])).long()
        with torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
        logprobs = (logits.double() / temperature).log_softmax(-1)
        start = len(sample.prompt_ids)
        results.append(logprobs[torch.arange(start - 1, len(ids) - 1), ids[start:]])
    return results


def scored(
    model: PreTrainedModel,
    samples: list[Sample],
    layout: Layout,
    max_tokens: int = 64,
    temperature: float = 1.0,
) -> list[torch.Tensor]:
    """Logprobs through tiles, put back into the order of the samples."""
    scorer = TokenScorer(model, torch.float32)
    results: list[torch.Tensor] = [torch.zeros(0)] * len(samples)
    for planned in plan_tiles(make_rows(samples, completions_of(samples)), layout, max_tokens):
        tile = lay_out(planned)
        with torch.no_grad():
            logprobs_N = scorer.score(tile, temperature).logprobs_N
        pieces = logprobs_N.split([len(row.targets) for row in tile.rows])
        for i, piece in zip(tile.samples, pieces, strict=True):
            results[i] = piece
    return results


@pytest.mark.parametrize("layout", ["padded", "tree", "varlen"])
@pytest.mark.parametrize("max_tokens", [16, 64, 4096])
@pytest.mark.parametrize("family", ["Llama", "gpt2"])
def test_every_layout_equals_row_by_row(layout, max_tokens, family):
    # Rotary positions are relative, so only a model with learned ones (GPT-2) shows an offset.
    model = tiny_llama() if family == "Llama" else unusual_model(family)
    samples = make_samples(24)
    expected = row_by_row(model, samples)
    if layout == "varlen":
        attend_as_varlen(model)
    assert_all_close(scored(model, samples, layout, max_tokens), expected)


def test_score_logits_by_hand():
    # p = (1/2, 1/4, 1/4) at temperature 1: entropy = 1/2 log 2 + 1/2 log 4 = 1.5 log 2
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25]])) + 7.0
    logprobs, entropies, _ = score_logits(logits, torch.tensor([1]), 1.0)
    assert logprobs.item() == pytest.approx(np.log(0.25))
    assert entropies.item() == pytest.approx(1.5 * np.log(2))
    # at temperature 1/2 the odds are squared: (4, 1, 1) / 6
    logprobs, _, _ = score_logits(logits, torch.tensor([0]), 0.5)
    assert logprobs.item() == pytest.approx(np.log(4 / 6))


def test_tokens_that_a_model_rules_out_add_nothing_to_the_entropy():
    logits = torch.tensor([[0.0, 0.0, -torch.inf], [0.0, -torch.inf, -torch.inf]])
    _, entropies, _ = score_logits(logits, torch.tensor([0, 0]), 1.0)
    assert entropies.tolist() == pytest.approx([np.log(2), 0.0])


def test_logits_in_half_precision_are_scored_in_float32():
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    logprobs, _, _ = score_logits(logits, torch.arange(4), 1.3)
    expected = (logits.double() / 1.3).log_softmax(-1).diagonal()
    assert logprobs.dtype == torch.float32
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)


class Head(torch.nn.Linear):
    """Of a class of its own: scored by its forward."""


@pytest.mark.parametrize("kind", [torch.nn.Linear, Head])
@pytest.mark.parametrize("max_elements", [1, 7 * 32, 10 * 32 + 5, 1 << 20])
@pytest.mark.parametrize("with_entropies", [True, False])
@pytest.mark.parametrize("scaling", [PLAIN, Scaling(0.5), Scaling(2.0, 1.5)])
def test_chunks_equal_the_whole_in_value_and_gradient(
    max_elements, kind, with_entropies, scaling, monkeypatch
):
    """Also those of a CPU that keeps the probabilities of all of them."""
    monkeypatch.setattr(head_module, "CACHED_ELEMENTS", 5 * 32)
    monkeypatch.setattr(head_module, "CHUNK_TOKENS", 0)
    generator = torch.Generator().manual_seed(0)
    head = kind(8, 32, bias=with_entropies).double()
    hidden = torch.randn(23, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 32, (23,), generator=generator)
    upstream, other = torch.randn(2, 23, generator=generator, dtype=torch.float64)

    def run(score):
        hidden.grad = None
        head.zero_grad()
        logprobs, entropies, _ = score()
        (logprobs * upstream + with_entropies * other * entropies).sum().backward()
        assert entropies.requires_grad == with_entropies
        return [logprobs.detach(), entropies.detach(), hidden.grad, *(p.grad for p in head.parameters())]

    def whole():
        return score_logits(scaling.of(head(hidden)), targets, 0.7, with_entropies)

    chunked = partial(score_hidden, hidden, head, targets, 0.7, max_elements, with_entropies, scaling)
    for mine, expected in zip(run(chunked), run(whole), strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("is_wide", [False, True])
def test_in_half_precision_chunks_are_as_right_as_the_whole(is_wide, monkeypatch):
    """Also with products that are not rounded, as GPUs have them."""

    def add(total, left, right):
        total.addmm_(left.float(), right.float())

    monkeypatch.setattr(head_module, "has_wide_products", lambda *_: is_wide)
    monkeypatch.setattr(head_module, "wide_product", lambda left, right: left.float() @ right.float())
    monkeypatch.setattr(head_module, "add_wide_product", add)
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(64, 300, bias=False)
    hidden = torch.randn(40, 64, generator=generator, requires_grad=True)
    targets = torch.randint(0, 300, (40,), generator=generator)

    def gradients(limit, dtype):
        hidden.grad = None
        head.weight.grad = None
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            score_hidden(hidden, head, targets, 1.0, limit)[0].sum().backward()
        assert head.weight.grad.dtype == hidden.grad.dtype == torch.float32
        return [hidden.grad, head.weight.grad]

    exact = gradients(1 << 20, None)
    for chunked, whole, expected in zip(
        gradients(3000, torch.bfloat16), gradients(1 << 20, torch.bfloat16), exact, strict=True
    ):
        assert (chunked - expected).norm() < 1.2 * (whole - expected).norm()


def test_a_head_that_is_not_trained_gets_no_gradient():
    head = torch.nn.Linear(8, 32).requires_grad_(False)
    hidden = torch.randn(23, 8, requires_grad=True)
    score_hidden(hidden, head, torch.zeros(23, dtype=torch.long), 1.0, 64)[0].sum().backward()
    assert head.weight.grad is None and hidden.grad is not None


@pytest.mark.parametrize("kept", [None, Rows(np.zeros(0, np.int32), np.zeros(1, np.int32))])
def test_without_tokens_the_gradient_is_zero(kept):
    """As on a rank that has none of a tile's targets."""
    head = torch.nn.Linear(8, 32)
    hidden = torch.randn(0, 8, requires_grad=True)
    scored = score_hidden(hidden, head, torch.zeros(0, dtype=torch.long), 1.0, kept=kept)
    assert [len(column) for column in scored] == [0, 0, 0]
    scored[0].sum().backward()
    assert not head.weight.grad.any() and not head.bias.grad.any() and hidden.grad.shape == (0, 8)


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        sizes = [part.numel() for part in tree_leaves(output) if isinstance(part, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return output


@pytest.mark.parametrize("kind", [torch.nn.Linear, Head])
def test_logits_are_never_whole_in_memory(kind):
    head = kind(2, 32)
    hidden = torch.randn(100, 2, requires_grad=True)
    with Largest() as largest:
        logprobs, _, _ = score_hidden(hidden, head, torch.zeros(100, dtype=torch.long), 1.0, max_elements=320)
        logprobs.sum().backward()
    assert largest.elements == 320


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("scaling", "with_entropies", "each"),
    [(PLAIN, False, 12), (PLAIN, True, 12), (Scaling(cap=30.0), False, 12), (Scaling(cap=30.0), True, 16)],
)
def test_a_logit_takes_the_bytes_that_are_counted_for_it(scaling, with_entropies, each, dtype):
    num_tokens = 256
    chunk = 64
    vocabulary = 4096
    head = torch.nn.Linear(8, vocabulary)
    targets = torch.zeros(num_tokens, dtype=torch.long)
    hidden = torch.randn(num_tokens, 8, requires_grad=True)

    def train():
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            sums = score_hidden(hidden, head, targets, 0.7, chunk * vocabulary, with_entropies, scaling)[:2]
        sum(part.sum() for part in sums if part.requires_grad).backward()

    beside = 10 * 9 * vocabulary + 20 * 8 * num_tokens  # head and hidden states, and what is theirs
    assert peak_bytes(train) < each * chunk * vocabulary + beside


SMALL = {"vocab_size": len(PIECES), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
IDS = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}


def unusual_model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if name == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=32, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3, **IDS)
        ).eval()
    if name == "llama4":
        return make_model("Llama4Text", num_local_experts=2, intermediate_size_mlp=32, head_dim=8)
    if name == "cohere":
        return CohereForCausalLM(CohereConfig(**SMALL, **HEADS, **IDS, logit_scale=0.25)).eval()
    if name == "granite":
        return GraniteForCausalLM(GraniteConfig(**SMALL, **HEADS, **IDS, logits_scaling=4.0)).eval()
    config = Gemma2Config(**SMALL, **HEADS, **IDS, head_dim=8, sliding_window=4, initializer_range=0.3)
    return Gemma2ForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("name", "scaling"),
    [
        ("gpt2", PLAIN),
        ("llama4", PLAIN),
        ("cohere", Scaling(0.25)),
        ("granite", Scaling(0.25)),
        ("gemma2", Scaling(1.0, 30.0)),
    ],
)
def test_models_that_scale_or_cap_their_logits_are_found_and_scored_right(name, scaling, monkeypatch):
    model = unusual_model(name)
    samples = make_samples(8)
    assert find_scaling(model) == scaling
    assert_all_close(scored(model, samples, "padded"), row_by_row(model, samples))
    monkeypatch.setattr(head_module, "CPU_ELEMENTS", 5 * len(PIECES))
    assert_all_close(scored(model, samples, "padded"), row_by_row(model, samples))


def test_what_a_model_does_to_its_logits_beside_its_configuration_needs_them_whole():
    model = unusual_model("cohere")
    samples = make_samples(8)
    model.config.logit_scale = 0.5
    assert find_scaling(model) is None
    assert_all_close(scored(model, samples, "padded"), row_by_row(model, samples))


def test_what_no_configuration_tells_is_no_matter_of_rounding():
    model = tiny_llama().bfloat16()
    model.register_forward_hook(lambda _, __, output: SimpleNamespace(logits=output.logits * 1.01))
    assert find_scaling(model) is None


def test_models_that_scale_the_hidden_state_before_the_head_are_found():
    class Scaled(type(tiny_llama())):
        def forward(self, input_ids, **kwargs):
            hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
            return SimpleNamespace(logits=self.lm_head(hidden / 4.0))

    model = tiny_llama()
    model.__class__ = Scaled
    assert find_scaling(model) is None


def test_rows_end_where_nothing_is_left_to_predict():
    (sample,) = make_samples(1)
    sample = changed(
        sample,
        prompt_ids=np.array([3, 4], dtype=np.int32),
        completion_ids=np.array([5, 6, 7, 8], dtype=np.int32),
        rollout_logprobs=np.zeros(4, dtype=np.float32),
        mask=np.array([True, False, True, False]),
    )
    (row,) = make_rows([sample], [sample.mask])
    # 5 is predicted at position 1 (token 4), 7 at position 3 (token 6); 7 and 8 need not be read
    assert row.ids.tolist() == [3, 4, 5, 6]
    assert row.sources.tolist() == [1, 3]
    assert row.targets.tolist() == [5, 7]
    assert make_rows([sample], [np.zeros(4, dtype=np.bool_)]) == []


@pytest.mark.parametrize("layout", ["padded", "tree", "tree_or_padded", "varlen"])
def test_tiles_hold_every_row_once_within_the_budget(layout):
    samples = make_samples(50)
    tiles = [*map(lay_out, plan_tiles(make_rows(samples, completions_of(samples)), layout, 60))]
    assert sorted(i for tile in tiles for i in tile.samples) == list(range(50))
    assert max(tile.ids_BT.numel() for tile in tiles) <= 60
    assert plan_tiles([], layout, 60) == []


@pytest.mark.parametrize(
    ("expected", "packing_wanted", "attention", "fields"),
    [
        ("varlen", True, "flash_attention_2", {}),
        ("tree", True, "torch_varlen", {}),
        ("tree_or_padded", True, "sdpa", {}),
        ("padded", False, "flash_attention_2", {}),
        ("padded", True, "eager", {}),
        ("tree_or_padded", True, "sdpa", {"sliding_window": 16}),
        ("padded", True, "sdpa", {"layer_types": ["full_attention", "chunked_attention"]}),
        ("tree", True, "torch_varlen", {"layer_types": ["sliding_attention"]}),
        ("varlen", True, "flash_attention_2", {"layer_types": ["sliding_attention"]}),
        ("padded", True, "flash_attention_2", {"layer_types": ["linear_attention"]}),
    ],
)
def test_packing_is_used_only_where_it_is_exact_and_fast(expected, packing_wanted, attention, fields):
    config = SimpleNamespace(_attn_implementation=attention, **fields)
    assert choose_layout(packing_wanted, config) == expected
    assert choose_layout(packing_wanted, config, is_recurrent=True) == "padded"


DBRX: dict[str, Any] = {
    "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128,
    "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
}  # fmt: skip


def test_a_model_that_adds_its_experts_in_place_is_trained_in_half_precision():
    """DBRX adds what its experts compute to the layer's float32 in place."""
    samples = make_samples(6)
    logprobs = [
        logprobs_of(make_policy(dtype, model=make_model("Dbrx", **DBRX)), samples)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    gaps = np.abs(np.concatenate(logprobs[0]) - np.concatenate(logprobs[1]))
    assert 0.0 < float(np.median(gaps)) < 0.05


def test_a_model_whose_code_mixes_dtypes_is_refused_in_words(monkeypatch):
    monkeypatch.setattr(precision, "ADDED_IN_PLACE", ())
    with pytest.raises(ConfigError, match=r"model\.dtype: .*dbrx.*set model\.dtype to float32"):
        make_policy(torch.bfloat16, model=make_model("Dbrx", **DBRX))


@pytest.mark.parametrize("chunk", [7, 100])
@pytest.mark.parametrize("with_entropies", [False, True])
def test_ids_that_are_never_sampled_have_no_probability_and_no_gradient(
    chunk: int, with_entropies: bool
) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 32, bias=True).double()
    hidden_NH = torch.randn(23, 8, dtype=torch.float64, requires_grad=True)
    targets_N = torch.arange(23) % 29
    banned_ids = torch.tensor([29, 31])
    weights_N = torch.randn(23).double()

    def gradients(logprobs_N: torch.Tensor, entropies_N: torch.Tensor) -> list[torch.Tensor]:
        loss = logprobs_N @ weights_N + (entropies_N.sum() if with_entropies else 0.0)
        return list(torch.autograd.grad(loss, [hidden_NH, *head.parameters()]))

    options = {"entropy_gradient": with_entropies, "banned_ids": banned_ids}
    mine = score_hidden(hidden_NH, head, targets_N, 0.7, chunk * 32, **options)[:2]
    allowed = [token for token in range(32) if token not in (29, 31)]
    expected_NV = torch.log_softmax(head(hidden_NH)[:, allowed] / 0.7, -1)
    # The places of 0 to 28 are their own, 30 comes behind them.
    targets = expected_NV.gather(-1, targets_N[:, None])[:, 0]
    expected = targets, -(expected_NV.exp() * expected_NV).sum(-1)
    whole = score_logits(head(hidden_NH), targets_N, 0.7, with_entropies, None, banned_ids)[:2]
    expected_gradients = gradients(*expected)
    for scores in (mine, whole):
        of_scores = gradients(*scores)
        for got, want in zip([*scores, *of_scores], [*expected, *expected_gradients], strict=True):
            torch.testing.assert_close(got, want, rtol=0.0, atol=1e-12)
        assert of_scores[-1][banned_ids].abs().max() == 0.0, "of the head's bias"
