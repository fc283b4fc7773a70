"""Compiled models give the same numbers; what cannot be had is said, and never half applied."""

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.small_vision_models import SMALL_FAMILIES, make_vision_model
from tests.support.models import (
    accumulate_all,
    gradients_of,
    logprobs_of,
    make_policy,
    make_relatives,
    make_samples,
    one_batch,
    run_config,
    tiny_llama,
    tiny_model,
    with_masks,
)
from tests.support.picture_samples import PictureMaker, compute_in_float64
from tests.support.routes import wide_mixtral, with_foreign
from tests.support.sessions import session_samples
from tidemill.services.trainer.groups.bins import form_micro_batches
from tidemill.services.trainer.policy import compiling
from tidemill.services.trainer.policy.compiling import compile_model
from tidemill.services.trainer.policy.layers import layers_of, tower_of
from tidemill.services.trainer.policy.model_loading import open_model

CPU = torch.device("cpu")


def test_a_compiled_model_has_the_same_gradients_for_every_shape():
    compiled = tiny_llama(num_hidden_layers=1)
    assert compile_model(compiled, backend="aot_eager")
    assert all(layer._compiled_call_impl is not None for layer in compiled.base_model.layers)
    plain_policy = make_policy(model=tiny_llama(num_hidden_layers=1))
    policy = make_policy(model=compiled)
    assert all(parameter.grad is None for parameter in compiled.parameters()), "the trial left a gradient"
    for each in (policy, plain_policy):
        accumulate_all(each, [one_batch(make_samples(count, seed=count)) for count in (2, 5, 12)])
    torch.testing.assert_close(gradients_of(policy), gradients_of(plain_policy), atol=1e-5, rtol=1e-4)


@pytest.mark.long
@pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="no C++ compiler")
def test_the_engines_choices_are_replayed_alike_by_compiled_layers(monkeypatch):
    samples = with_masks(with_foreign([*make_relatives(9), *session_samples(3)]))
    compiled = wide_mixtral(monkeypatch)
    results = []
    assert compile_model(compiled, torch.float64)
    for model in (compiled, wide_mixtral(monkeypatch)):
        policy = make_policy(torch.float64, model=model, replays_routes=True)
        sums = accumulate_all(policy, form_micro_batches(samples, 80))
        results.append((torch.tensor(sums.loss_sum), gradients_of(policy), sums.changed_layers))
    assert results[0][2] == results[1][2] > 0
    for mine, theirs in zip(results[0][:2], results[1][:2], strict=True):
        assert (mine - theirs).abs().max() < 1e-12 * theirs.abs().max()


@pytest.mark.long
@pytest.mark.parametrize("family", SMALL_FAMILIES)
def test_a_compiled_model_reads_pictures_alike_beside_a_tower_that_is_not_compiled(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_in_float64(monkeypatch)
    maker = PictureMaker(make_vision_model(tmp_path / "model", family), tmp_path)
    monkeypatch.setattr(compiling, "compile_model", partial(compile_model, backend="aot_eager"))
    plain = maker.policy(train_tower=True)
    compiled = maker.policy(train_tower=True, compile=True)
    layers = {layer: layer._compiled_call_impl is not None for layer in layers_of(compiled._model)}
    of_tower = [layer for section in tower_of(compiled._model) for layer in section.modules()]
    assert any(layers.values()) and not any(layers.get(layer) for layer in of_tower)
    samples = maker.samples()
    for batch in (one_batch(samples), one_batch(samples[6:]), one_batch(samples[3:5])):
        for policy in (compiled, plain):
            policy.accumulate(batch)
    difference = gradients_of(compiled) - gradients_of(plain)
    assert difference.norm() < 1e-12 * gradients_of(plain).norm()


def without_compiler(*_: object) -> None:
    raise RuntimeError("no C++ compiler found")


def with_defect(*_: object) -> Any:
    def run(*_: object) -> None:
        # As torch 2.11 answers Liger's norms: not an error of the kind that compilers' errors derive from.
        raise AssertionError("a tensor was expected")

    return run


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [(without_compiler, "no C++ compiler found"), (with_defect, "a tensor was expected")],
)
def test_where_the_compiler_fails_training_goes_on_without_it(capsys, compiler, reason):
    model = tiny_llama(num_hidden_layers=1)
    assert not compile_model(model, backend=compiler)
    printed = capsys.readouterr().out
    assert "training without it" in printed
    assert reason in printed
    assert all(layer._compiled_call_impl is None for layer in model.base_model.layers)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert logprobs_of(make_policy(model=model), make_samples(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_without_weights_is_tried_by_one_of_its_layers(tmp_path, dtype):
    """As ranks do, which read their weights once the model is split."""
    model, _ = open_model(run_config(tiny_model(tmp_path)).model, CPU)
    assert model.device.type == "meta"
    sizes: list[int] = []

    def compiler(graph, _):
        sizes.append(len(graph.graph.nodes))
        return graph.forward

    assert compile_model(model, dtype, backend=compiler, device=CPU)
    assert max(sizes) > 20 and model.device.type == "meta"
    assert all(layer._compiled_call_impl is not None for layer in model.base_model.layers)

    def takes_simple_code(graph, _):
        if len(graph.graph.nodes) > 20:
            raise RuntimeError("out of registers")
        return graph.forward

    torch._dynamo.reset()
    assert not compile_model(model, dtype, backend=takes_simple_code, device=CPU)
    assert all(layer._compiled_call_impl is None for layer in model.base_model.layers)


def test_the_trial_computes_in_the_dtype_of_training():
    """Kernels of attention on GPUs take half precision alone."""
    model = tiny_llama(num_hidden_layers=1)
    seen = []
    attention = model.base_model.layers[0].self_attn
    attention.q_proj.register_forward_hook(lambda _, args, output: seen.append(output.dtype))
    assert compile_model(model, torch.bfloat16, backend="eager")
    assert set(seen) == {torch.bfloat16}
