"""Policies come and go as files: checkpoints that continue bit by bit, weights that load back, models."""

import errno
from dataclasses import replace

import pytest
import torch

from tests.support.architectures import make_model
from tests.support.models import (
    accumulate_all,
    load_state,
    make_policy,
    make_samples,
    one_batch,
    read_policy_state,
    run_config,
    tiny_llama,
    tiny_model,
    train,
)
from tidemill.common.errors import ConfigError
from tidemill.common.files import StorageError
from tidemill.services.trainer.policy import state
from tidemill.services.trainer.policy.state import PolicyState
from tidemill.services.trainer.policy.transformers_policy import load_policy


def test_a_checkpoint_continues_bit_by_bit(tmp_path):
    optimizer = {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1}
    policy, samples = make_policy(optimizer=optimizer), make_samples(16)
    for start in (0, 4):
        train(policy, [one_batch(samples[start : start + 4])])
    policy.save_state(tmp_path)
    resumed = make_policy(seed=5, optimizer=optimizer)
    accumulate_all(resumed, [one_batch(samples)])  # discarded by load_state
    resumed.load_state(tmp_path)
    assert resumed.digest() == policy.digest()
    for start in (8, 12):
        mine = train(policy, [one_batch(samples[start : start + 4])])
        theirs = train(resumed, [one_batch(samples[start : start + 4])])
        assert mine == theirs
    assert resumed.digest() == policy.digest()


def test_what_was_copied_is_written_whatever_the_policy_has_become(tmp_path, monkeypatch):
    """Also where the disk takes it only the second time; the next copy has the new state."""
    policy, samples = make_policy(), make_samples(8)
    train(policy, [one_batch(samples[:4])])
    expected = {name: tensor.clone() for name, tensor in policy.state().tensors.items()}
    policy.stage_state()
    policy.leave()  # and where it is on the host meanwhile
    policy.stage_state()
    policy.enter()
    train(policy, [one_batch(samples[4:])])
    with monkeypatch.context() as patch:
        patch.setattr(state.os, "fsync", fail_for_space)
        with pytest.raises(StorageError, match=r"policy's state .*No space left on device; free some space"):
            policy.begin_saving(tmp_path / "full").result()
    policy.begin_saving(tmp_path / "copied").result()
    written = read_policy_state(tmp_path / "copied").tensors
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
    policy.save_state(tmp_path / "later")
    later = read_policy_state(tmp_path / "later").tensors
    assert all(torch.equal(later[name], tensor) for name, tensor in policy.state().tensors.items())
    assert not torch.equal(later["model.model.norm.weight"], expected["model.model.norm.weight"])


def fail_for_space(*_args: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_state_brings_the_random_generator_with_it():
    policy = make_policy()
    policy_state = policy.state()
    expected = torch.rand(3)
    load_state(policy, policy_state)
    assert torch.equal(torch.rand(3), expected)


def test_a_state_is_written_without_pickle_and_the_same_bytes_each_time(tmp_path):
    policy = make_policy()
    train(policy, [one_batch(make_samples(4))])
    for name in ("a", "b"):
        policy.save_state(tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == ["policy.json", "policy.safetensors"]
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path):
    policy = make_policy()
    before = policy.digest()
    other = make_policy(model=tiny_llama(hidden_size=16))
    with pytest.raises(ConfigError, match="do not fit the model"):
        load_state(policy, other.state())
    with pytest.raises(ConfigError, match="of policy 'simulated'"):
        load_state(policy, PolicyState({"simulated": torch.zeros(1)}, {"policy": "simulated"}))
    with pytest.raises(ConfigError, match="holds no state"):
        policy.load_state(tmp_path)
    assert policy.digest() == before


def test_a_policy_is_loaded_as_configured(tmp_path):
    tiny_model(tmp_path, attention_dropout=0.9)
    policy = load_policy(run_config(tmp_path, trainer={"device": "cpu"}))
    # version 0 has the bytes of the folder, whatever is configured beside it
    assert policy.digest() == make_policy().digest()
    samples = make_samples(4)
    own = [
        replace(sample, rollout_logprobs=logprobs)
        for sample, logprobs in zip(samples, policy.logprobs(samples, 1.6), strict=True)
    ]
    metrics = policy.accumulate(one_batch(own))
    assert metrics.mismatch_max < 1e-5  # rollout.sampling.temperature reached the loss
    assert metrics.denominator == metrics.tokens


def test_what_cannot_be_loaded_is_explained(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path: cannot load a causal language model from .*nowhere"):
        load_policy(run_config(tmp_path / "nowhere"))
    tiny_model(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.max_model_len: 4096 exceeds the model's context of 128"):
        load_policy(run_config(tmp_path, model={"max_model_len": 4096}))
    text_within = run_config(tmp_path / "images", model={"max_model_len": 256}, trainer={"device": "cpu"})
    make_model("Gemma3").save_pretrained(tmp_path / "images")
    with pytest.raises(ConfigError, match=r"256 exceeds the model's context of 128"):
        load_policy(text_within)
    with pytest.raises(ConfigError, match=r"trainer\.device: 'gpu' is no device"):
        load_policy(run_config(tmp_path, trainer={"device": "gpu"}))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="torch sees 0 GPUs"):
            load_policy(run_config(tmp_path, trainer={"device": "cuda"}))


def test_a_folder_that_lacks_weights_is_an_error_and_not_random_numbers(tmp_path):
    tiny_model(tmp_path)
    tiny_llama(num_hidden_layers=3).config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="lacks 9 of the model's weights"):
        load_policy(run_config(tmp_path))


def test_deterministic_mode_trains(tmp_path):
    tiny_model(tmp_path)
    try:
        policy = load_policy(run_config(tmp_path, trainer={"deterministic": True}))
        assert torch.are_deterministic_algorithms_enabled()
        assert not train(policy, [one_batch(make_samples(6))]).skipped
    finally:
        torch.use_deterministic_algorithms(False)
