"""Compiled models give the same numbers; what cannot be had is said, and never half applied."""

import torch

from tests.support.models import (
    accumulate_all,
    gradients_of,
    make_policy,
    make_samples,
    one_batch,
    tiny_llama,
)
from tidemill.services.trainer.policy.model_loading import compile_model


def test_a_compiled_model_has_the_same_gradients_for_every_shape():
    compiled = tiny_llama(num_hidden_layers=1)
    assert compile_model(compiled, backend="aot_eager")
    assert all(layer._compiled_call_impl is not None for layer in compiled.base_model.layers)
    plain_policy, policy = make_policy(model=tiny_llama(num_hidden_layers=1)), make_policy(model=compiled)
    assert all(parameter.grad is None for parameter in compiled.parameters()), "the trial left a gradient"
    for each in (policy, plain_policy):
        accumulate_all(each, [one_batch(make_samples(count, seed=count)) for count in (2, 5, 12)])
    torch.testing.assert_close(gradients_of(policy), gradients_of(plain_policy), atol=1e-5, rtol=1e-4)


def test_where_the_compiler_fails_training_goes_on_without_it(capsys):
    def without_compiler(*_: object) -> None:
        raise RuntimeError("no C++ compiler found")

    model = tiny_llama(num_hidden_layers=1)
    assert not compile_model(model, backend=without_compiler)
    printed = capsys.readouterr().out
    assert "training without it" in printed
    assert "no C++ compiler found" in printed
    assert all(layer._compiled_call_impl is None for layer in model.base_model.layers)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert make_policy(model=model).logprobs(make_samples(2))
