"""LoRA: only adapters are trained, engines get an ordinary model that computes the same."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from tests.support.architectures import make_model
from tests.support.late_imports import late
from tests.support.models import (
    assert_all_close,
    gradients_of,
    load_state,
    logprobs_of,
    make_policy,
    make_samples,
    one_batch,
    option_of,
    run_config,
    save_state,
    save_weights,
    tiny_llama,
    tiny_model,
    train,
)
from tests.support.versions import write_version
from tidemill.common.config.trainer import LoraConfig, TrainerConfig
from tidemill.common.errors import ConfigError
from tidemill.common.files import StorageError
from tidemill.common.run.routers import modules_of_routers
from tidemill.services.trainer.groups.sample import Sample
from tidemill.services.trainer.policy import adapters
from tidemill.services.trainer.policy.adapters import Adapters, find_targets
from tidemill.services.trainer.policy.reference import ReferenceModel
from tidemill.services.trainer.policy.transformers_policy import TransformersPolicy, load_policy
from tidemill.services.trainer.weights.store import WeightStore, model_tensors

late("peft", "the lora extra is not installed")

LORA: dict[str, Any] = {"lora": {"rank": 4, "alpha": 16}}
FROZEN: dict[str, Any] = {"algorithm": {"reference": {"model": "frozen"}}}


def trained(steps: int = 2, policy: TransformersPolicy | None = None, **options: Any) -> TransformersPolicy:
    policy = policy or make_policy(**(LORA | options))
    for step in range(steps):
        assert not train(policy, [one_batch(make_samples(6, seed=step))]).skipped
    return policy


def assert_same_logprobs(
    mine: TransformersPolicy, theirs: TransformersPolicy, samples: list[Sample], atol: float = 1e-5
) -> None:
    assert_all_close(logprobs_of(mine, samples), logprobs_of(theirs, samples), atol)


def merged_model(policy: TransformersPolicy, folder: Path, start: torch.nn.Module) -> Any:
    """What an engine loads: the version's file in the folder of the starting model."""
    start.save_pretrained(folder)
    save_weights(policy, folder)
    model, info = type(start).from_pretrained(folder, dtype=policy._dtype, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model.eval()


def test_new_adapters_change_nothing_and_depend_on_the_seed_alone():
    digests = set()
    for seed in (1, 2):
        model = tiny_llama()
        torch.manual_seed(seed)
        policy = make_policy(model=model, **LORA)
        digests.add(policy.digest())
    assert len(digests) == 1
    assert_same_logprobs(policy, make_policy(), make_samples(6), atol=0.0)


def test_only_adapters_are_trained_in_float32():
    policy = make_policy(torch.bfloat16, **LORA)
    before = dict(tiny_llama().named_parameters())
    trained(2, policy)
    assert {p.dtype for _, p in policy._parameters} == {torch.float32}
    assert all(".lora_" in name for name, _ in policy._parameters)
    for name, parameter in policy._model.named_parameters():
        if ".lora_" not in name:
            start = before[name.replace(".base_layer.", ".")]
            assert torch.equal(parameter, start.to(parameter.dtype)), name


def untied_llama() -> LlamaForCausalLM:
    return tiny_llama(tie_word_embeddings=False)


def tiny_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3, bos_token_id=1, eos_token_id=1
    )
    return GPT2LMHeadModel(config).eval()


def tiny_mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, initializer_range=0.3)).eval()


ON_THE_HEAD = {"target_modules": ["lm_head", "self_attn.v_proj"]}


@pytest.mark.parametrize(
    ("make_model", "options"),
    [
        (tiny_llama, {}),
        (untied_llama, {}),
        (untied_llama, ON_THE_HEAD),
        (tiny_gpt2, {"rank_stabilized": True}),
        (tiny_mixtral, {}),
    ],
)
def test_merged_weights_compute_what_the_adapters_do(make_model, options, tmp_path):
    lora = {"rank": 4, "alpha": 16} | options
    # Kernels of experts know no float64.
    is_coarse = make_model is tiny_mixtral
    dtype = torch.float32 if is_coarse else torch.float64
    atol = 1e-4 if is_coarse else 1e-5
    policy = trained(policy=make_policy(dtype, model=make_model(), lora=lora))
    samples = make_samples(12)
    merged = merged_model(policy, tmp_path, make_model())
    assert_same_logprobs(policy, make_policy(dtype, model=merged), samples, atol)
    start = logprobs_of(make_policy(dtype, model=make_model()), samples)
    moved = [np.abs(a - b).max() for a, b in zip(logprobs_of(policy, samples), start, strict=True)]
    assert max(moved) > 0.1, "the adapters did something"
    if options is ON_THE_HEAD:
        assert not torch.equal(merged.lm_head.weight.float(), untied_llama().lm_head.weight)


def test_bfloat16_weights_are_merged_in_float32_and_rounded_once(tmp_path):
    model = untied_llama()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    policy = trained(policy=make_policy(torch.bfloat16, model=model, **LORA))
    save_weights(policy, tmp_path)
    name = "model.layers.0.mlp.down_proj"
    saved = load_file(tmp_path / "model.safetensors")[f"{name}.weight"]
    layer = policy._model.get_submodule(name)
    delta = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * 4.0
    expected = (start[f"{name}.weight"].bfloat16().float() + delta).bfloat16()
    assert saved.dtype == torch.bfloat16 and torch.equal(saved, expected.detach())


def test_frozen_matrices_take_half_the_memory_in_bfloat16_and_compute_the_same():
    samples = make_samples(8)
    policy = make_policy(torch.bfloat16, model=untied_llama(), **LORA)
    assert_same_logprobs(policy, make_policy(torch.bfloat16, model=untied_llama()), samples, atol=0.0)
    dtypes = {name: parameter.dtype for name, parameter in policy._model.named_parameters()}
    assert dtypes["model.layers.0.mlp.up_proj.base_layer.weight"] == torch.bfloat16
    assert dtypes["lm_head.weight"] == torch.bfloat16
    assert dtypes["model.embed_tokens.weight"] == dtypes["model.norm.weight"] == torch.float32


def test_the_reference_is_the_start_without_a_second_copy():
    samples = make_samples(8)
    start = logprobs_of(make_policy(), samples)
    policy = make_policy(**LORA, **FROZEN)
    num_parameters = sum(1 for _ in policy._model.parameters())
    trained(3, policy)
    reference = [tokens["reference_logprobs"] for tokens in policy.precompute(samples)]
    assert_all_close(reference, start, 0.0)
    assert not any(isinstance(option, ReferenceModel) for option in policy.options)
    assert sum(1 for _ in policy._model.parameters()) == num_parameters
    assert not train(policy, [one_batch(samples)]).skipped, "adapters are on and trainable again"


def test_held_weights_are_the_adapters_at_the_start_of_the_step():
    policy = make_policy(**LORA, mini_batches=2, groups_per_step=2)
    samples = make_samples(6)
    trained(1, policy)
    before = logprobs_of(policy, samples)
    policy.hold_weights()
    trained(1, policy)
    proximal = [tokens["proximal_logprobs"] for tokens in policy.precompute(samples)]
    assert_all_close(proximal, before, 0.0)


def test_a_checkpoint_holds_adapters_alone_and_continues_bit_by_bit(tmp_path):
    policy = trained(2, **FROZEN)
    save_state(policy, tmp_path)
    saved = load_file(tmp_path / "policy.safetensors")
    assert all(".lora_" in name for name in saved if name != "rng.cpu")
    resumed = make_policy(**LORA, **FROZEN)
    resumed.load_state(tmp_path)
    assert resumed.digest() == policy.digest()
    trained(3, policy)
    trained(3, resumed)
    assert resumed.digest() == policy.digest()


def test_a_checkpoint_of_other_adapters_or_another_base_is_refused():
    state = trained(1).state()
    for policy, reason in (
        (make_policy(seed=1, **LORA), "belong to the model"),
        (make_policy(lora={"rank": 4, "alpha": 8}), "belong to the model"),
        (make_policy(lora={"rank": 2, "alpha": 8}), "do not fit the model"),
        (make_policy(), "do not fit the model"),
    ):
        before = policy.digest()
        with pytest.raises(ConfigError, match=reason):
            load_state(policy, state)
        assert policy.digest() == before
    with pytest.raises(ConfigError, match="do not fit the model"):
        load_state(make_policy(**LORA), make_policy().state())


def test_the_digest_covers_adapters_base_and_scale():
    digests = [
        make_policy(**LORA).digest(),
        trained(1).digest(),
        make_policy(lora={"rank": 4, "alpha": 8}).digest(),
        make_policy(seed=1, **LORA).digest(),
    ]
    assert len(set(digests)) == len(digests)


def shared_experts() -> PreTrainedModel:
    """With a dense layer, and linear layers beside experts: both have names that experts had in older
    releases of transformers."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    fields = {"first_k_dense_replace": 1, "experts_implementation": "eager"}
    return make_model("Glm4Moe", **experts, **fields)


@pytest.mark.parametrize("make_model", [tiny_llama, tiny_gpt2, shared_experts])
def test_every_version_has_its_adapters_in_the_format_of_peft(make_model, tmp_path):
    from peft import PeftModel

    policy = trained(policy=make_policy(torch.float64, model=make_model(), **LORA))
    samples = make_samples(8)
    manifest = write_version(WeightStore(tmp_path), 7, policy)
    assert [file.name for file in manifest.files] == ["model.safetensors"], "engines get merged weights only"
    folder = tmp_path / "weights" / manifest.folder / "adapter"
    assert sorted(p.name for p in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    loaded = PeftModel.from_pretrained(make_model().double(), folder).merge_and_unload().requires_grad_(True)
    assert_same_logprobs(policy, make_policy(torch.float64, model=loaded), samples)


def test_a_disk_that_takes_no_adapters_is_waited_for_as_for_the_weights(tmp_path):
    policy = make_policy(**LORA)
    policy.compare_weights()
    (tmp_path / "adapter").touch()  # no folder can be made here
    written = policy.begin_writing(tmp_path, 1, -1)
    with pytest.raises(StorageError, match="files beside version 1"):
        written.result()
    (tmp_path / "adapter").unlink()
    assert policy.begin_writing(tmp_path, 1, -1).result()


def test_gradient_checkpointing_changes_no_gradient_of_adapters():
    samples = make_samples(6)
    gradients = []
    for is_on in (False, True):
        policy = make_policy(torch.float64, **LORA, gradient_checkpointing=is_on)
        policy.accumulate(one_batch(samples))
        gradients.append(gradients_of(policy))
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


def test_adapters_are_loaded_as_configured(tmp_path):
    tiny_model(tmp_path)
    policy = load_policy(run_config(tmp_path, trainer={**LORA, "device": "cpu"}))
    assert policy.digest() == load_policy(run_config(tmp_path, trainer=LORA)).digest()
    seeded = run_config(tmp_path, trainer=LORA).model_copy(update={"seed": 5})
    assert load_policy(seeded).digest() != policy.digest()


def test_unknown_target_modules_are_refused_with_those_that_exist():
    with pytest.raises(ConfigError, match=r"no linear layer 'query'; it has down_proj, gate_proj, k_proj, "):
        make_policy(lora={"target_modules": ["q_proj", "query"]})
    with pytest.raises(ConfigError, match="lm_head shares its weights with the embedding"):
        make_policy(lora={"target_modules": ["lm_head"]})


def test_linear_layers_beside_experts_have_adapters_and_the_experts_have_none():
    model = shared_experts()
    linears = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert any("shared_experts" in name for name in linears)
    policy = make_policy(model=model, lora={})
    adapters = option_of(policy, Adapters)
    assert adapters._layers.keys() == linears - {"lm_head"}
    tensors = model_tensors(policy._model)
    assert adapters.published(tensors, torch.float32).keys() == adapters.base_of(tensors).keys()


def test_a_router_that_is_a_linear_layer_has_no_adapter():
    layers = option_of(make_policy(model=make_model("Phimoe"), lora={}), Adapters)._layers
    assert {name.rpartition(".")[2] for name in layers} == {"q_proj", "k_proj", "v_proj", "o_proj"}


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
COMPRESSED = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "num_key_value_heads": 4}  # fmt: skip
WITH_ROUTERS: dict[str, tuple[dict[str, Any], set[str], str]] = {
    "Afmoe": (EXPERTS | {"head_dim": 8, "num_dense_layers": 1, "layer_types": ["full_attention"] * 2,
        "sliding_window": 8}, {"gate"}, "gate_proj"),
    "HunYuanMoEV1": ({"head_dim": 8, "num_experts": 4, "moe_topk": 2}, {"wg"}, "q_proj"),
    "JetMoe": ({"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4,
        "num_attention_heads": None}, {"layer"}, "kv_proj"),
    "Dbrx": ({"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128, "ffn_config":
        {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0}}, {"layer"}, "Wqkv"),
    "Zaya": (EXPERTS | {"num_experts_per_tok": 1, "head_dim": 8, "router_hidden_size": 8},
        {"down_proj", "fc1", "fc2"}, "q_proj"),
    "LongcatFlash": ({"num_layers": 1, "ffn_hidden_size": 32, "expert_ffn_hidden_size": 16,
        "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2, "head_dim": 4, **COMPRESSED},
        {"classifier"}, "q_a_proj"),
    "Doge": ({"is_moe": True, "num_experts": 4, "num_experts_per_tok": 2, "keep_window_size": 8},
        {"router_gate"}, "gate_proj"),
}  # fmt: skip
"""Fields of a family, the names of linear layers within its routers, and one that takes an adapter."""


@pytest.mark.parametrize("family", WITH_ROUTERS)
def test_linear_layers_in_a_router_have_no_adapter(family):
    fields, inside, beside = WITH_ROUTERS[family]
    model = make_model(family, **fields)
    routing = modules_of_routers(model)
    names = {name for name, module in model.named_modules()
             if id(module) in routing and isinstance(module, torch.nn.Linear)}  # fmt: skip
    assert inside <= {name.rpartition(".")[2] for name in names}
    targets = find_targets(model, LoraConfig())
    assert not names & set(targets)
    assert beside in {name.rpartition(".")[2] for name in targets}


@pytest.mark.parametrize(("family", "num_lost"), [("Laguna", 3), ("Llama", 0), ("Mixtral", 0), ("Zaya", 0)])
def test_adapters_that_peft_does_not_load_are_named(family, num_lost, monkeypatch):
    """It renames Laguna's shared experts as transformers does in older files, and leaves them at zero."""
    said: list[dict[str, Any]] = []
    monkeypatch.setattr(adapters.log, "warning", lambda *_, **fields: said.append(fields))
    fields = {"Laguna": EXPERTS | {"head_dim": 8, "shared_expert_intermediate_size": 16,
        "layer_types": ["full_attention"] * 2, "num_attention_heads_per_layer": [4, 4],
        "mlp_layer_types": ["dense", "sparse"]}, "Zaya": WITH_ROUTERS["Zaya"][0]}  # fmt: skip
    make_policy(model=make_model(family, **fields.get(family, {})), lora={})
    assert len(said) == (num_lost > 0)
    if num_lost:
        assert said[0]["layers"].startswith(f"{num_lost} of ") and "shared_experts" in said[0]["layers"]


def test_a_grouped_linear_layer_has_no_adapter():
    """It multiplies each group of heads with its own part of the matrix, and has fewer outputs than rows."""
    fields = {"q_lora_rank": 8, "o_groups": 2, "o_lora_rank": 4, "qk_rope_head_dim": 4, "hc_mult": 2}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    fields |= experts | {"head_dim": 8, "num_key_value_heads": 1, "num_hidden_layers": 1}
    policy = make_policy(model=make_model("DeepseekV4", **fields), lora={})
    assert not train(policy, [one_batch(make_samples(4))]).skipped
    names = {name.rpartition(".")[2] for name in option_of(policy, Adapters)._layers}
    assert "o_b_proj" in names
    assert "o_a_proj" not in names


def test_layers_that_take_no_adapter_are_named():
    with pytest.raises(ConfigError, match=r"target_modules: .*out_proj"):
        make_policy(model=make_model("Mamba"), lora={})
    make_policy(model=make_model("Mamba"), lora={"target_modules": ["in_proj", "x_proj"]})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"lora": {"target_modules": []}}, "target_modules"),
        ({"lora": {"rank": 0}}, "rank"),
        ({**LORA, "policy": "simulated"}, "take policy transformers"),
        ({**LORA, "algorithm": {"reference": {"model": "updated"}}}, "frozen or off, not updated"),
        ({**LORA, "algorithm": {"reference": {"model": "frozen", "dtype": "bfloat16"}}}, "leave .*dtype out"),
    ],
)
def test_what_does_not_go_with_adapters_is_refused_with_the_reason(fields, reason):
    with pytest.raises(ValueError, match=reason):
        TrainerConfig.model_validate(fields)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install 'tidemill\[lora\]'"):
        make_policy(**LORA)
