"""The estimate of what a run takes: against what real passes keep, and by hand."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from transformers import AutoConfig

from examples.small_vision_models import SMALL_FAMILIES, vision_model, vision_tokenizer
from tests.support.architectures import make_config, make_model
from tidemill.common.config import RunConfig
from tidemill.common.errors import ConfigError
from tidemill.services.trainer.policy import loading, transformers_policy
from tidemill.services.trainer.policy.layers import tower_of
from tidemill.services.trainer.policy.memory import fit
from tidemill.services.trainer.policy.memory.advice import Machine, examine_fit, find_settings, report
from tidemill.services.trainer.policy.memory.estimate import (
    GIB,
    engine_take,
    host_take,
    kv_bytes,
    trainer_take,
    usable,
)
from tidemill.services.trainer.policy.memory.fit import choose_passes, choose_ranks
from tidemill.services.trainer.policy.memory.sizes import (
    ModelSizes,
    attention_on_gpus,
    build_on_meta,
    count_sizes,
)
from tidemill.services.trainer.policy.precision import round_alike

MODELS = Path(__file__).parents[4] / "docs" / "operations" / "models"
ROWS = 3
WIDTH = 64
MANY = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 160, "max_position_embeddings": 256}


def bytes_saved(family: str, dtype: torch.dtype, **changes: Any) -> int:
    """By a forward pass of a real model on the CPU: each storage once, weights not."""
    model = make_model(family, **changes)
    if dtype != torch.float32:
        round_alike(model)
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    cast = torch.autocast("cpu", dtype=dtype) if dtype != torch.float32 else nullcontext()
    ids = torch.arange(ROWS * WIDTH).view(ROWS, WIDTH) % 30
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), cast:
        output = model.base_model(input_ids=ids, use_cache=False)
    assert output is not None
    return sum(t.untyped_storage().nbytes() for address, t in saved.items() if address not in weights)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", MANY),
        ("Qwen3", MANY | {"head_dim": 16}),
        ("Olmo2", MANY),
        ("Gemma3Text", {"num_hidden_layers": 2, "hidden_size": 64}),
        ("Gemma2", {"hidden_size": 64}),  # dense attention: bytes grow with the square of the width
        ("Mixtral", MANY | {"num_local_experts": 4}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_bytes_are_those_of_a_real_model_within_a_tenth(family, changes, dtype):
    attention = {"attn_implementation": "eager"} if family == "Gemma2" else {}
    model = build_on_meta(make_config(family, **changes), *attention.values())
    sizes = count_sizes(model, dtype, WIDTH)
    measured = bytes_saved(family, dtype, **changes, **attention)
    assert sizes.kept_bytes(ROWS * WIDTH, False) + sizes.copied_bytes == pytest.approx(measured, rel=0.1)


def test_recomputed_layers_keep_their_inputs_and_one_layer():
    assert SIZES.kept_bytes(10, recomputed=False) == 10 * (400 + 80), "layers, and the last norm"
    assert SIZES.kept_bytes(10, recomputed=True) == 10 * (4 * 4 * 10 + 100 + 80), "inputs are float32"


@pytest.mark.parametrize(
    ("name", "parameters", "layer_bytes"),
    [
        ("Qwen3-4B", 4_022_468_096, 196_904),
        ("Qwen3-8B", 8_190_735_360, 257_320),
        ("Qwen3-30B-A3B", 30_532_122_624, 212_044),
        ("Llama-3.1-70B", 70_553_706_496, 480_520),
    ],
)
def test_published_models_have_their_parameters_and_keep_what_a_counted_pass_kept(
    name, parameters, layer_bytes
):
    """What a layer keeps of a token was counted once with the real code, on tensors without data."""
    config = AutoConfig.from_pretrained(MODELS / name)
    sizes = count_sizes(build_on_meta(config, attention_on_gpus(config)), torch.bfloat16, 1024)
    assert sizes.parameters == parameters
    assert sizes.layer_bytes == pytest.approx(layer_bytes, rel=0.01)
    assert sizes.layers_bytes == config.num_hidden_layers * sizes.layer_bytes
    assert not sizes.is_read_whole, "experts too are read by rows"


def test_what_a_conversion_of_files_mixes_up_is_read_whole():
    mixed = AutoConfig.for_model("hrm_text", **MANY, num_attention_heads=4)
    assert count_sizes(build_on_meta(mixed), torch.bfloat16, WIDTH).is_read_whole


TEXT = SimpleNamespace(num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=16)
SIZES = ModelSizes(
    parameters=1000, layer=200, root=400, vocabulary=30, hidden=10, linears=600,
    adapters_per_rank=5, can_recompute=True, has_capped_logits=False,
    layers_bytes=400.0, layer_bytes=100.0, num_layers=4, copied_bytes=1800.0,
    config=SimpleNamespace(get_text_config=lambda: TEXT),
)  # fmt: skip
WHOLE = replace(SIZES, is_read_whole=True)


def model_of(per_token: float = 100.0, sizes: ModelSizes = SIZES) -> ModelSizes:
    """With so many bytes in each of its four layers."""
    return replace(sizes, layers_bytes=4 * per_token, layer_bytes=per_token)


def config_of(trainer: Any = (), dtype: str = "bfloat16", length: int = 1024, **rollout: Any) -> RunConfig:
    tree = {"path": "m", "dtype": dtype, "max_model_len": length}
    return RunConfig.model_validate(
        {
            "model": tree,
            "data": {"train": "t", "max_prompt_tokens": 64},
            "trainer": dict(trainer),
            "rollout": rollout,
        }
    )


def test_what_a_rank_takes_by_hand():
    take = trainer_take(config_of(), model_of(), 1e9, 2048, recomputed=False)
    assert take.parts == {
        "master weights": 4000, "gradients": 4000, "AdamW moments": 8000, "version before, for deltas": 2000,
        "activations": 2048 * (400 + 80), "gradients of one layer's activations": 2048 * 100,
        "logits": 12 * 2048 * 30 + 6 * 300 + 2 * 4 * 2048 * 10, "weights in the compute dtype": 1800,
    }  # fmt: skip
    assert take.running == sum(take.parts.values()) == take.peak
    wide = trainer_take(config_of(dtype="float32"), model_of(), 1e9, 16, recomputed=False)
    assert "version before, for deltas" not in wide.parts


COPIES = {
    "num_ranks": 8, "shard_ranks": 4, "mini_batches": 2,
    "algorithm": {"reference": {"model": "frozen", "dtype": "bfloat16"},
                  "value": {"model": "own"}, "advantage": "gae"},
}  # fmt: skip


def test_what_ranks_that_hold_copies_take_by_hand():
    take = trainer_take(config_of(COPIES), model_of(), 1e9, 16, recomputed=True)
    # Activations of the longest sequence, and of the critic's.
    assert take.parts == {
        "master weights": 1000, "gradients": 1000, "AdamW moments": 2000, "version before, for deltas": 500,
        "gradients until an update": 4000, "reference model": 500, "critic": 4000, "held weights": 1000,
        "activations": 2 * 1024 * (160 + 100 + 80), "gradients of one layer's activations": 1024 * 100,
        "logits": 12 * 1024 * 30 + 6 * 300 + 2 * 4 * 1024 * 10, "gathered layers": 2 * (400 + 2 * 200),
        "gradients being summed": 6 * 400,
    }  # fmt: skip
    tight = trainer_take(config_of(COPIES), model_of(), 15_000, 16, recomputed=True)
    assert "gradients until an update" not in tight.parts, "4000 are more than a quarter"


MIXTURE = replace(SIZES, experts=600, layer_experts=150, num_experts=6)


def test_what_ranks_that_divide_experts_take_by_hand():
    ranks = {"num_ranks": 8, "shard_ranks": 4}
    take = trainer_take(config_of(ranks | {"expert_ranks": 2}), model_of(sizes=MIXTURE), 1e9, 16, True)
    # Two of six experts: each two ranks have three, and of these the first has two.
    of_first = 400 / 4 + 600 * 2 / 6
    assert take.parts["master weights"] == take.parts["gradients"] == 4 * of_first
    assert take.parts["AdamW moments"] == 8 * of_first
    assert take.parts["gradients until an update"] == 4 * (400 + 300)
    assert take.parts["gathered layers"] == 2 * (400 + 2 * (50 + 75))
    alike = trainer_take(config_of(ranks), model_of(sizes=MIXTURE), 1e9, 16, True)
    assert alike.parts["master weights"] == 4 * of_first, "six experts on four ranks are two on the first"
    assert alike.parts["gradients until an update"] == 4 * 1000


def test_auto_takes_as_few_ranks_for_a_pass_as_fit_and_the_experts_of_a_host():
    def chosen(room, **trainer):
        config = config_of(trainer, length=1 << 16)
        trainer_chosen = choose_ranks(config, model_of(1e6, MIXTURE), 1e12, room, width=8).trainer
        return trainer_chosen.context_ranks, trainer_chosen.expert_ranks

    def needed(size):
        config = config_of({"num_ranks": 12, "context_ranks": size}, length=1 << 16)
        return choose_passes(config, model_of(1e6, MIXTURE), 1e12, 0.0)[2].running

    assert [chosen(needed(size), num_ranks=12)[0] for size in (1, 2, 4)] == [1, 2, 4]
    assert chosen(0.9 * needed(4), num_ranks=12)[0] == 1, "8 divides no 12 ranks: nothing fits"
    assert chosen(0.0, num_ranks=12, packing=False)[0] == chosen(0.0, num_ranks=12)[0] == 1
    assert chosen(0.0, num_ranks=12, context_ranks=3) == (3, 1)
    sizes = [chosen(0.0, num_ranks=n, expert_ranks="auto")[1] for n in (8, 12, 16)]
    assert sizes == [1, 2, 2], "one host; what divides 6 experts, 8 ranks of a host and all"


def test_a_model_that_is_read_whole_is_there_twice_before_it_is_split_and_on_hosts_for_each_rank():
    whole = host_take(config_of({"num_ranks": 8}), WHOLE, ranks=4, engines=2)
    assert whole.parts["whole model in float32, of each rank"] == 4 * 4000
    large = replace(WHOLE, parameters=10**9)
    config = config_of({"num_ranks": 8, "algorithm": {"reference": {"model": "frozen"}}})
    take = trainer_take(config, model_of(sizes=large), 1e9, 16, recomputed=True)
    assert sum(take.parts.values()) == take.peak == 8 * 10**9 > take.running


def test_what_adapters_take_by_hand():
    take = trainer_take(config_of({"lora": {"rank": 4}}), model_of(), 1e9, 16, recomputed=False)
    assert take.parts["master weights"] == 2 * 600 + 4 * 400 + 4 * 20
    assert (take.parts["gradients"], take.parts["AdamW moments"]) == (80, 160)
    assert "weights in the compute dtype" not in take.parts
    large = replace(SIZES, parameters=10**9, linears=9 * 10**8)
    shared = config_of({"lora": {}, "num_ranks": 4})
    exporting = trainer_take(shared, model_of(sizes=large), 1e9, 16, recomputed=False)
    assert exporting.parts["merged weights of an export"] == 5 * 10**8, "more than a pass takes"


@pytest.mark.parametrize(("is_capped", "each"), [(False, 12), (True, 16)])
def test_logits_come_in_chunks(is_capped, each):
    sizes = replace(SIZES, vocabulary=1 << 17, has_capped_logits=is_capped)
    take = trainer_take(config_of(), model_of(sizes=sizes), 1e12, 4096, recomputed=False)
    assert take.parts["logits"] == each * (1 << 28) + 6 * (1 << 17) * 10 + 8 * 4096 * 10


def test_the_kv_cache_by_hand():
    config = AutoConfig.from_pretrained(MODELS / "Qwen3-8B")
    assert kv_bytes(config, 1000, width=2) == 1000 * 36 * 2 * 8 * 128 * 2
    assert kv_bytes(config, 1000, width=2, ways=4) == 1000 * 36 * 2 * 2 * 128 * 2
    assert kv_bytes(config, 1000, width=2, ways=16) == 1000 * 36 * 2 * 1 * 128 * 2, "a head on each GPU"
    windowed = make_config("Gemma3Text")  # one layer of 4 positions, one of all; 2 heads of 8
    assert kv_bytes(windowed, 100, width=4) == (4 + 100) * 2 * 2 * 8 * 4
    unlike = make_config("Gemma4Text", global_head_dim=16, num_key_value_heads=2)  # heads of 8, and of 16
    assert kv_bytes(unlike, 100, width=2) == (4 * 8 + 100 * 16) * 2 * 2 * 2
    engine = engine_take(config_of(vllm={"gpu_memory_utilization": 0.5}), model_of(), 4 * GIB, ways=1)
    assert engine.sequence == 1024 * 4 * 2 * 2 * 16 * 2
    assert engine.room == 2 * GIB - 2000 - 1.5 * GIB - 8 * 256 * 30
    assert engine.num_sequences == engine.room // engine.sequence


def test_what_a_host_takes_by_hand():
    assert host_take(config_of({"num_ranks": 8}), SIZES, ranks=4, engines=2).parts == {
        "processes and their libraries": 6 * 4 * GIB,
        "full versions that engines stage": 2 * 2000,
        "checkpoint on its way to the disk": 12 * 1000 / 8 * 4,
        "changes that engines stage": 6 * 0.3 * 1000 * 2,
    }


def test_passes_are_chosen_from_fast_to_small_and_what_is_set_is_kept():
    def chosen(room, **trainer):
        return choose_passes(config_of(trainer), model_of(1e6), 1e12, room)[:2]

    def needed(num_tokens, recomputed):
        return trainer_take(config_of(), model_of(1e6), 1e12, num_tokens, recomputed).running

    for choice in ((16384, False), (8192, False), (16384, True), (8192, True), (1024, True)):
        assert chosen(needed(*choice)) == choice
    assert chosen(0.0) == (1024, True), "the smallest, where nothing fits"
    assert chosen(needed(8192, False), micro_batch_tokens=16384) == (16384, True)
    assert chosen(needed(1024, True), gradient_checkpointing=False)[1] is False
    assert chosen(0.0, gradient_checkpointing=True, micro_batch_tokens=512) == (512, True)
    long = choose_passes(config_of(length=32768), model_of(1e6), 1e12, 0.0)
    assert long[:2] == (32768, True), "a pass holds the longest sequence"


def test_what_does_not_fit_is_said_with_what_to_set():
    big = replace(SIZES, parameters=4 * 10**9)
    machine = Machine(gpus=8, gpu_bytes=40 * GIB)
    answer = examine_fit(config_of(), model_of(1e3, big), machine)
    assert "the trainer takes" in answer.problems[0] and "AdamW moments 29.8" in answer.problems[0]
    assert answer.settings["trainer.num_ranks"] == 4
    assert answer.settings["trainer.gradient_checkpointing"] is False
    assert not find_settings(config_of(), model_of(1e3, big), machine).problems
    none = examine_fit(config_of(), model_of(1e3, big), Machine(8, 2 * GIB))
    assert none.settings == {} and "the trainer takes" in none.problems[-1]
    whole = examine_fit(config_of(), model_of(1e3, replace(big, is_read_whole=True)), Machine(8, 8 * GIB))
    assert "takes 14.9 GiB of each GPU when it starts" in whole.problems[-1]
    crowded = examine_fit(config_of({"num_ranks": 8}), model_of(), machine)
    assert crowded.problems == ("the run wants 9 GPUs (8 for the trainer, 1 for engines), and there are 8",)
    at_once = config_of(trainer_gpus="shared")
    shared = examine_fit(at_once, model_of(1.0), Machine(1, 40 * GIB))
    assert shared.problems == (), "on one GPU the engine leaves a part to the trainer"
    full = examine_fit(config_of(), model_of(), Machine(8, 40 * GIB, host_bytes=1.0))
    assert "a host takes" in full.problems[0]


def test_in_turns_each_has_the_gpu_but_for_what_the_other_leaves_there():
    big = replace(SIZES, parameters=10**9)
    machine = Machine(1, 24 * GIB)
    answer = examine_fit(config_of(), model_of(1.0, big), machine)
    assert answer.problems == () and answer.takes_turns
    assert answer.trainer is not None and 0.15 * 24 * GIB < answer.trainer.peak < usable(24 * GIB) - 2 * GIB
    at_once = examine_fit(config_of(trainer_gpus="shared"), model_of(1.0, big), machine)
    assert at_once.problems and not at_once.takes_turns
    assert answer.host.parts["weights of engines that sleep"] == pytest.approx(2e9 * 4 / 3)
    assert answer.host.parts["trainer outside of its turn"] == pytest.approx((4 + 8 + 2) * 1e9 * 4 / 3)
    full = examine_fit(config_of(vllm={"gpu_memory_utilization": 0.95}), model_of(1.0), machine)
    assert "leaves less than 2.0 GiB of 24.0" in full.problems[0]
    several = examine_fit(
        config_of({"num_ranks": 2}, trainer_gpus="turns"), model_of(1.0), Machine(2, 40 * GIB)
    )
    assert several.problems == () and several.takes_turns


def test_moments_on_the_host_are_counted_there_and_advised_before_what_changes_the_training():
    big = replace(SIZES, parameters=3 * 10**9)
    take = trainer_take(config_of({"offload_optimizer": True}), model_of(sizes=big), 1e12, 16, False)
    assert take.parts["AdamW moments"] == 2 * 8 * (1 << 25), "two slices of both, in place of 24e9"
    small = trainer_take(config_of({"offload_optimizer": True}), model_of(), 1e12, 16, False)
    assert small.parts["AdamW moments"] == 8000, "never more than without"
    host = host_take(config_of({"offload_optimizer": True, "num_ranks": 4}), SIZES, ranks=2, engines=0)
    assert host.parts["AdamW moments"] == pytest.approx(8000 / 4 * 2 * 4 / 3)
    answer = examine_fit(config_of(workers=0), model_of(1e3, big), Machine(1, 40 * GIB))
    assert answer.problems and answer.settings["trainer.offload_optimizer"] is True
    assert "trainer.lora" not in answer.settings


def test_passes_that_ranks_share_hold_a_part_of_the_longest_sequence_and_are_advised_for_long_ones():
    def take(context_ranks):
        config = config_of({"num_ranks": 8, "context_ranks": context_ranks}, length=1 << 16)
        return trainer_take(config, model_of(), 1e12, 16, recomputed=True).parts["activations"]

    assert take(8) == take(1) / 8
    long = examine_fit(config_of(length=1 << 16), model_of(1e6), Machine(8, 40 * GIB))
    assert long.problems and long.settings["trainer.context_ranks"] in (4, 8)
    assert "trainer.lora" not in long.settings
    short = examine_fit(
        config_of(), model_of(1e3, replace(SIZES, parameters=4 * 10**9)), Machine(8, 40 * GIB)
    )
    assert "trainer.context_ranks" not in short.settings


def test_a_request_is_answered_from_config_json_alone():
    tree = config_of().model_dump(mode="json")
    tree["model"]["path"] = str(MODELS / "Qwen3-0.6B")
    machine = {"gpus": 2, "gpu_bytes": 80 * GIB, "host_bytes": None}
    answer = report({"config": tree, "machine": machine})
    assert not answer["problems"] and (answer["ranks"], answer["engines"]) == (1, 1)
    tree["model"]["path"] = str(MODELS)
    with pytest.raises(ConfigError, match=r"config\.json"):
        report({"config": tree, "machine": machine})


def test_auto_means_what_it_meant_on_a_cpu_and_what_fits_on_a_gpu(monkeypatch, tmp_path):
    config = config_of()
    assert config.trainer.rank_tokens == 16384
    monkeypatch.setattr(fit, "pick_device", lambda _: torch.device("cpu"))
    assert fit.with_fitting_passes(config) is config
    monkeypatch.setattr(fit, "pick_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(fit, "read_model", lambda _: model_of(1e6))
    memory = SimpleNamespace(total_memory=12 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
    trainer = fit.with_fitting_passes(config).trainer
    expected = choose_passes(config, model_of(1e6), 12 * GIB, usable(12 * GIB))
    assert (trainer.micro_batch_tokens, trainer.gradient_checkpointing) == expected[:2]
    assert expected[1], "4 GB a thousand tokens do not fit without"
    assert fit.with_fitting_passes(config, tmp_path).trainer == trainer
    memory.total_memory = 200 * GIB
    larger = fit.with_fitting_passes(config).trainer
    assert (larger.micro_batch_tokens, larger.gradient_checkpointing) == (16384, False)
    resumed = fit.with_fitting_passes(config, tmp_path).trainer
    assert resumed.micro_batch_tokens == trainer.micro_batch_tokens, "a run keeps those of its start"
    assert not resumed.gradient_checkpointing
    memory.total_memory = 12 * GIB
    shared = config_of(trainer_gpus="shared", vllm={"gpu_memory_utilization": 0.5})
    beside = fit.with_fitting_passes(shared).trainer
    assert beside.micro_batch_tokens < trainer.micro_batch_tokens, "who is on the GPU is told by the config"
    several = config_of({"num_ranks": 8}, length=1 << 16)
    monkeypatch.setattr(fit, "read_model", lambda _: model_of(1e5))
    assert fit.with_fitting_passes(several, tmp_path).trainer.context_ranks == 1, "the run began with 1"
    (tmp_path / "other").mkdir()
    began = fit.with_fitting_passes(several, tmp_path / "other").trainer
    assert began.context_ranks == 2
    memory.total_memory = 200 * GIB
    assert fit.with_fitting_passes(several, tmp_path / "other").trainer.context_ranks == 2
    explicit = config_of({"micro_batch_tokens": 99, "gradient_checkpointing": False})
    assert fit.with_fitting_passes(explicit) is explicit


@pytest.mark.parametrize(("dtype", "num_warnings"), [("float32", 1), ("bfloat16", 0)])
def test_float32_on_a_gpu_is_told(dtype, num_warnings, monkeypatch):
    monkeypatch.setattr(loading, "pick_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(fit, "with_fitting_passes", lambda config, _: config)
    monkeypatch.setattr(transformers_policy, "load_policy", lambda *_: None)
    with capture_logs() as logs:
        loading.open_policy(config_of(dtype=dtype))
    assert [entry["log_level"] for entry in logs] == ["warning"] * num_warnings


@pytest.mark.parametrize("family", SMALL_FAMILIES)
def test_what_a_tower_keeps_is_that_of_a_real_pass_within_a_fifth(family: str) -> None:
    tokenizer = vision_tokenizer(family)
    model = vision_model(family, tokenizer)
    sizes = count_sizes(model, torch.float32, WIDTH)
    tower = [weight for module in tower_of(model) for weight in module.parameters()]
    assert sizes.tower == sum(weight.numel() for weight in tower)
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept_tensors: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept_tensors.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    pixels: dict[str, torch.Tensor] = {}
    num_patches = 256
    if family == "llava":
        pixels["pixel_values"] = torch.randn(num_patches // 16, 3, 56, 56)
    else:
        patch = model.config.vision_config.patch_size
        pixels["pixel_values"] = torch.randn(num_patches, 3 * 2 * patch**2)
        pixels["image_grid_thw"] = torch.tensor([[1, 16, 16]])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        features = model.model.get_image_features(**pixels, return_dict=True)
    assert features.pooler_output
    pixels_at = pixels["pixel_values"].untyped_storage().data_ptr()
    kept = sum(
        tensor.untyped_storage().nbytes()
        for address, tensor in kept_tensors.items()
        if address not in weights and address != pixels_at
    )
    estimated = sizes.tower_kept_bytes(num_patches, recomputed=False, is_trained=True)
    assert estimated == pytest.approx(kept, rel=0.2)


def test_pictures_of_a_pass_take_no_more_than_its_tokens_allow() -> None:
    sizes = count_sizes(vision_model("qwen2_5_vl", vision_tokenizer("qwen2_5_vl")), torch.bfloat16, WIDTH)
    tree: dict[str, Any] = {"model": {"path": "x"}, "data": {"train": "x"}}
    text = trainer_take(RunConfig.model_validate(tree), sizes, 80 * GIB, 3000, recomputed=False)
    frozen = RunConfig.model_validate(tree | {"images": {}})
    trained = RunConfig.model_validate(tree | {"images": {}, "trainer": {"train_tower": True}})
    takes = [trainer_take(config, sizes, 80 * GIB, 3000, recomputed=False) for config in (frozen, trained)]
    # A token stands for 2 x 2 patches of 14 x 14 pixels, twice, of three colours, in 4 bytes.
    for take in takes:
        assert take.parts["pixels of pictures"] == 3000 * 4 * 14 * 14 * 2 * 3 * 4
    activations = [take.parts["activations of the tower"] for take in takes]
    assert activations[0] == 12_000 * sizes.tower_layer_bytes < activations[1]
    assert takes[0].parts["AdamW moments"] == 8.0 * (sizes.parameters - sizes.tower)
    assert takes[1].parts["AdamW moments"] == text.parts["AdamW moments"] == 8.0 * sizes.parameters
    # Ranks that share a pass have its tokens in parts, and each of them all its pictures.
    shared = {"num_ranks": 2, "context_ranks": 2}
    of_two = RunConfig.model_validate(tree | {"images": {}, "trainer": shared})
    take_of_two = trainer_take(of_two, sizes, 80 * GIB, 3000, recomputed=False)
    assert take_of_two.parts["pixels of pictures"] == 2 * takes[0].parts["pixels of pictures"]
    assert take_of_two.parts["activations of the tower"] == 2 * activations[0]


@pytest.mark.parametrize(
    ("family", "patch", "frames", "largest"),
    [("qwen2_5_vl", 14, 2, 1280), ("qwen3_vl", 16, 2, 980), ("llava", 14, 1, 16)],
)
def test_an_engine_takes_what_the_pictures_of_a_step_do_or_the_largest_one(
    family: str, patch: int, frames: int, largest: int
) -> None:
    sizes = count_sizes(vision_model(family, vision_tokenizer(family)), torch.bfloat16, WIDTH)
    tree: dict[str, Any] = {"model": {"path": "x", "dtype": "bfloat16"}, "data": {"train": "x"}}
    text = engine_take(RunConfig.model_validate(tree), sizes, 80 * GIB, 1)
    for scheduled, num_tokens in ((2048, 2048), (8, largest)):
        rollout = {"vllm": {"extra": {"max_num_batched_tokens": scheduled}}}
        config = RunConfig.model_validate(tree | {"images": {}, "rollout": rollout})
        take = engine_take(config, sizes, 80 * GIB, 1)
        num_patches = num_tokens * (1 if family == "llava" else 4)
        parts = {
            "pixels of pictures": num_patches * patch**2 * frames * 3 * 4.0,
            "activations of the tower": num_patches * sizes.tower_layer_bytes,
            # Qwen3-VL's tower has one level more.
            "features of pictures": num_tokens * 2.0 * sizes.hidden * (2 if family == "qwen3_vl" else 1),
        }
        assert take.parts == text.parts | parts
        assert text.room - take.room == pytest.approx(sum(parts.values()))


def test_a_host_takes_the_pixels_of_the_prompts_that_its_engines_have() -> None:
    sizes = count_sizes(vision_model("qwen2_5_vl", vision_tokenizer("qwen2_5_vl")), torch.bfloat16, WIDTH)
    tree: dict[str, Any] = {"model": {"path": "x"}, "data": {"train": "x", "max_prompt_tokens": 1000}}
    for max_per_prompt, num_tokens in ((8, 8 * 100), (16, 1000)):
        images = {"max_pixels": 100 * 28 * 28, "max_per_prompt": max_per_prompt}
        for groups, num_groups in (("auto", 64), (3, 3)):
            rollout = {"max_groups_in_flight": groups}
            config = RunConfig.model_validate(tree | {"images": images, "rollout": rollout})
            pixels = host_take(config, sizes, ranks=1, engines=2).parts["pixels of prompts in flight"]
            # In the worker, and for each of 8 samples; of each patch 14 x 14 in 2 frames, 3 colours, 4 bytes.
            assert pixels == (1 + 8) * 2 * num_groups * num_tokens * 4 * 14 * 14 * 2 * 3 * 4
