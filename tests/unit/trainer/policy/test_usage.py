"""What a policy says of its FLOPs and memory, and its profile, which changes no bit."""

import gzip
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from examples.small_vision_models import vision_model, vision_tokenizer
from tests.support.architectures import make_model
from tests.support.models import make_policy, make_samples, one_batch, tiny_llama, train
from tidemill.common.config.trainer import TrainerConfig
from tidemill.services.trainer.algorithm.losses.sums import Sums
from tidemill.services.trainer.metrics.step_metrics import usage_metrics
from tidemill.services.trainer.policy.attention import head_size, value_size
from tidemill.services.trainer.policy.layers import tower_of
from tidemill.services.trainer.policy.usage import (
    ModelFlops,
    Usage,
    count_flops,
    num_attending,
    peak_flops_of,
)
from tidemill.services.trainer.step import MiniBatch, StepResult


def test_flops_are_those_counted_by_hand():
    """Per layer: q and o 32 x 32, k and v 32 x 16, gate, up and down 32 x 64; 32 words; 2 layers."""
    body = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
    assert count_flops(tiny_llama()) == ModelFlops(6.0 * body, 6.0 * 32 * 32, 12.0 * 4 * 8 * 2)


def test_of_experts_those_count_that_a_token_uses():
    def of(chosen):
        config = Qwen3MoeConfig(
            vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
            head_dim=8, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=chosen,
        )  # fmt: skip
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
            return count_flops(model).per_token

    assert of(2) - of(1) == 6 * 3 * 16 * 8


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_tower_counts_by_its_patches_and_their_pairs(is_trained: bool) -> None:
    """A token of Qwen2.5-VL stands for 4 patches of 14 x 14 in 2 frames and 3 colours. Layers: queries, keys,
    values and output 64 x 64, gate, up and down 64 x 96; a patch attends to a window of 16, in the second
    layer to all of its picture. The merger multiplies by 256 x 256 and 256 x 64."""
    model = vision_model("qwen2_5_vl", vision_tokenizer("qwen2_5_vl"))
    for section in tower_of(model):
        section.requires_grad_(is_trained)
    flops = count_flops(model)
    each = 6 if is_trained else 2
    of_patch = 3 * 2 * 14 * 14 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 96)
    window = 2 * each * 64 * 16
    assert flops.per_picture_token == 4 * (each * of_patch + window) + each * (256 * 256 + 256 * 64)
    assert flops.per_picture_pair == 2 * each * 64 * 16
    assert flops.of(Sums(picture_tokens=10, picture_pairs=52)) == (
        10 * flops.per_picture_token + 52 * flops.per_picture_pair
    )
    assert count_flops(tiny_llama()).per_picture_token == 0.0


def test_what_rows_share_and_padding_are_no_work():
    flops = ModelFlops(per_token=10.0, per_scored_token=3.0, per_pair=1.0)
    padded = Sums(tokens=4, positions=120, row_tokens=100, row_pairs=500)
    shared = Sums(tokens=4, positions=50, row_tokens=100, row_pairs=500)
    assert (flops.of(padded), flops.of(shared)) == (1000 + 12 + 500, 500 + 12 + 250)


def test_a_steps_use_is_over_all_ranks():
    sums = Sums(positions=512, row_tokens=512)
    result = StepResult(mini_batches=[MiniBatch(sums=sums)])
    numbers = {
        "time/train_s": 3.0, "time/update_s": 1.0, "step_time_s": 8.0, "step_tokens": 1600.0,
        "micro_batches": 2.0,
    }  # fmt: skip
    config = TrainerConfig(micro_batch_tokens=256, num_ranks=2)
    usage = Usage(ModelFlops(per_token=1e12), 128e12, (2 << 30, 3 << 30))
    metrics = usage_metrics(numbers, result, usage, config)
    assert metrics == {
        "forward/fill": 512 / (2 * 2 * 256), "perf/tokens_per_s_per_rank": 100.0,
        "perf/tflops_per_rank": 64.0, "perf/peak_gib": 3.0, "perf/peak_gib_rank": 1.0, "perf/mfu": 0.5,
    }  # fmt: skip
    assert usage_metrics(numbers, result, Usage(), config) == {}, "delays use no device"


def test_a_profiled_step_has_the_same_bits(tmp_path):
    batches = [one_batch(make_samples(8))]
    plain = make_policy()
    watched = make_policy()
    watched.profile(tmp_path)
    results = train(plain, batches), train(watched, batches)
    watched.profile(None)
    assert results[0] == results[1] and plain.digest() == watched.digest()
    (file,) = tmp_path.iterdir()
    assert file.name == "rank-0.json.gz"
    events: list[dict[str, Any]] = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert {"aten::mm", "Optimizer.step#AdamW.step"} <= {str(event.get("name")) for event in events}
    watched.profile(None)  # nothing was begun
    assert len(list(tmp_path.iterdir())) == 1


def test_a_profile_that_cannot_be_written_stops_nothing(tmp_path):
    policy = make_policy()
    policy.profile(tmp_path / "gone")
    train(policy, [one_batch(make_samples(4))])
    policy.profile(None)
    assert policy.usage().peak_bytes[0] > 0


def text_config(**fields: Any) -> Any:
    sizes = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 3}
    return SimpleNamespace(**(sizes | fields))


@pytest.mark.parametrize(
    ("fields", "query", "value"),
    [
        ({}, 16, 16),  # 64 / 4
        ({"head_dim": 24}, 24, 24),
        # DeepSeek-V3: 128 without and 64 with positions, values of 128; its `head_dim` is 64
        ({"head_dim": 64, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}, 192, 128),
        # Glm 5
        ({"head_dim": 64, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256}, 256, 256),
    ],
)
def test_heads_are_as_large_as_their_queries_and_values(fields, query, value):
    assert (head_size(text_config(**fields)), value_size(text_config(**fields))) == (query, value)


def test_pairs_of_compressed_attention_by_hand():
    """2 layers of 4 heads with queries of 8 + 4 and values of 6: forward and backward take 3 * 2 FLOPs for
    each number of a query and of a value."""
    fields = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "kv_lora_rank": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_group": 1}
    fields |= experts | {
        "q_lora_rank": 8,
        "topk_group": 1,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
    }
    flops = count_flops(make_model("DeepseekV3", **fields))
    assert flops.per_pair == 2 * 4 * 6 * (12 + 6)


def test_layers_that_attend_to_no_token_have_no_pairs():
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    assert num_attending(text_config(layer_types=kinds)) == 1
    assert num_attending(text_config(layer_types=None)) == 3
    assert num_attending(text_config(layer_types=["hybrid", "sliding_attention", "moe"])) == 2


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4}])
def test_weights_that_are_not_trained_count_less(lora):
    flops = make_policy(lora=lora).usage().flops
    body = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
    adapters = 0
    if lora:
        linears = [(32, 32)] * 2 + [(32, 16)] * 2 + [(32, 64)] * 3
        adapters = 2 * 2 * sum(map(sum, linears))
    each = 4 if lora else 6
    assert flops.per_token == each * body + 6 * adapters
    assert flops.per_scored_token == each * 32 * 32, "adapters train no head"


@pytest.mark.parametrize(
    ("device_name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H200", 989), ("NVIDIA H20", 148),
        ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA GH200 480GB", 989), ("NVIDIA L40S", 362), ("NVIDIA L4", 121),
        ("NVIDIA L40", 181), ("NVIDIA H100 NVL", 835), ("NVIDIA H200 NVL", 835), ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500), ("NVIDIA B300 SXM6 AC", 2250), ("NVIDIA GB300", 2500),
        ("NVIDIA RTX A1000", 0), ("Tesla T4", 0),
    ],
)  # fmt: skip
def test_a_peak_is_that_of_a_device_whose_whole_name_it_is(device_name: str, tera: int) -> None:
    assert peak_flops_of(device_name) == tera * 1e12
