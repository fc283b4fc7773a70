"""The policy: gradients that do not depend on the split, defined outcomes, exact replay; states as files; its
thread, which has the device in every call."""

import asyncio
import errno
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.architectures import make_model
from tests.support.models import (
    MAX_COMPLETION,
    accumulate_all,
    emptied,
    gradients_of,
    load_state,
    logprobs_of,
    make_policy,
    make_samples,
    masked,
    one_batch,
    read_policy_state,
    run_config,
    save_state,
    save_weights,
    tiny_llama,
    tiny_model,
    train,
)
from tests.support.samples import changed, sample_of
from tests.support.waiting import wait_until
from tidemill.common.errors import ConfigError
from tidemill.common.files import StorageError
from tidemill.common.process.activity import Activity
from tidemill.common.process.gpu_sharing import GpuLock, GpuSharingError
from tidemill.services.trainer.groups.bins import form_micro_batches
from tidemill.services.trainer.groups.sample import Sample
from tidemill.services.trainer.policy import policy as policy_module
from tidemill.services.trainer.policy import state
from tidemill.services.trainer.policy.policy import PolicyThread
from tidemill.services.trainer.policy.state import PolicyState
from tidemill.services.trainer.policy.transformers_policy import TransformersPolicy, load_policy

NORMALISATIONS = ["sequence", "token", "constant"]


def test_on_policy_nothing_is_corrected_clipped_or_capped():
    policy = make_policy(algorithm={"old_logprobs": "recompute"})
    samples = make_samples(10)
    on_policy = [
        changed(sample, rollout_logprobs=logprobs)
        for sample, logprobs in zip(samples, logprobs_of(policy, samples), strict=True)
    ]
    metrics = policy.accumulate(one_batch(on_policy))
    assert metrics.weight_sum / metrics.tokens == pytest.approx(1.0, abs=1e-5)
    assert metrics.mismatch_max < 1e-5
    assert abs(metrics.rollout_kl_sum) < 1e-5
    assert (metrics.clipped_low, metrics.clipped_high, metrics.weights_bounded) == (0, 0, 0)


@pytest.mark.parametrize("useless", [masked, emptied])
@pytest.mark.parametrize("normalisation", NORMALISATIONS)
def test_sequences_without_trained_tokens_add_no_gradient_and_count_as_sequences(useless, normalisation):
    samples = make_samples(4)
    extra = [useless(sample) for sample in make_samples(3, seed=9)]
    with_extra = make_policy(torch.float64, algorithm={"normalisation": normalisation})
    without = make_policy(torch.float64, algorithm={"normalisation": normalisation})
    metrics = accumulate_all(with_extra, [one_batch([*extra, *samples])])
    plain = accumulate_all(without, [one_batch(samples)])
    torch.testing.assert_close(gradients_of(with_extra), gradients_of(without), rtol=1e-9, atol=1e-9)
    added = {"sequence": 3, "token": 0, "constant": 3 * MAX_COMPLETION}[normalisation]
    assert metrics.denominator - plain.denominator == added
    assert (metrics.sequences, metrics.tokens) == (7, plain.tokens)


@pytest.mark.parametrize("useless", [masked, emptied])
@pytest.mark.parametrize("normalisation", NORMALISATIONS)
def test_a_step_without_any_trained_token_leaves_the_weights(useless, normalisation):
    policy = make_policy(algorithm={"normalisation": normalisation})
    before = policy.digest()
    metrics = policy.accumulate(one_batch([useless(sample) for sample in make_samples(3)]))
    added = {name: value for name, value in metrics.items() if value and name != "denominator"}
    assert added == {"sequences": 3}
    result = policy.update(metrics.denominator)
    assert result.skipped
    assert result.grad_norm == 0.0
    assert policy.digest() == before


def test_logprobs_of_an_empty_completion_are_empty():
    policy = make_policy()
    samples = make_samples(3)
    results = logprobs_of(policy, [samples[0], emptied(samples[1]), samples[2]])
    assert [len(result) for result in results] == [samples[0].mask.size, 0, samples[2].mask.size]
    assert results[1].dtype == np.float32


def test_logprobs_leave_gradients_alone():
    policy = make_policy()
    samples = make_samples(5)
    accumulate_all(policy, [one_batch(samples)])
    before = gradients_of(policy).clone()
    logprobs_of(policy, samples)
    assert torch.equal(gradients_of(policy), before)


def test_zero_undoes_what_was_accumulated():
    policy = make_policy()
    samples = make_samples(6)
    accumulate_all(policy, [one_batch(samples)])
    policy.zero()
    train(policy, [one_batch(samples[:2])])
    fresh = make_policy()
    train(fresh, [one_batch(samples[:2])])
    assert policy.digest() == fresh.digest()


def test_threads_of_the_event_loop_give_the_same_bits_as_the_main_thread():
    samples = make_samples(12)
    here = make_policy()
    there = make_policy()
    train(here, [one_batch(samples)])

    async def step():
        metrics = await asyncio.to_thread(there.accumulate, one_batch(samples))
        await asyncio.to_thread(there.update, metrics.denominator)

    asyncio.run(step())
    assert here.digest() == there.digest()


@pytest.mark.parametrize("advantage", [1e38, -1e38])
def test_gradients_that_are_not_finite_skip_the_update(advantage):
    policy = make_policy()
    samples = make_samples(4)
    before = policy.digest()
    samples[2] = changed(samples[2], advantage=advantage * 10)
    result = train(policy, [one_batch(samples)])
    assert result.skipped
    assert not math.isfinite(result.grad_norm)
    assert "gradient norm" in result.reason
    assert policy.digest() == before
    assert not train(policy, [one_batch(make_samples(4))]).skipped
    assert all(torch.isfinite(parameter).all() for _, parameter in policy._parameters)


def test_the_rate_follows_the_steps_also_over_a_skipped_one():
    policy = make_policy(steps=4, optimizer={"lr": 0.4, "schedule": "linear"})
    samples = make_samples(4)
    rates = [
        train(policy, [one_batch(samples)]).lr,
        policy.update(0.0).lr,
        train(policy, [one_batch(samples)]).lr,
    ]
    assert rates == pytest.approx([0.4, 0.3, 0.2])


def test_bfloat16_stays_near_float32():
    samples = make_samples(16)
    full = make_policy()
    half = make_policy(torch.bfloat16)
    for exact, rough in zip(logprobs_of(full, samples), logprobs_of(half, samples), strict=True):
        np.testing.assert_allclose(rough, exact, atol=0.15)
        assert rough.dtype == np.float32
    accumulate_all(full, [one_batch(samples)])
    accumulate_all(half, [one_batch(samples)])
    exact = gradients_of(full)
    rough = gradients_of(half)
    assert rough.dtype == torch.float32  # master weights and their gradients
    assert torch.nn.functional.cosine_similarity(exact, rough, dim=0).item() > 0.99
    assert half.update(10.0).skipped is False


@pytest.mark.parametrize("old_logprobs", ["recompute", "rollout"])
def test_learns_from_samples_that_are_one_step_old(old_logprobs):
    """Reward: the token 7 at each position. Samples always come from the version before the current one."""
    policy = make_policy(algorithm={"old_logprobs": old_logprobs}, optimizer={"lr": 2e-2}, steps=20)
    stale = make_policy()
    generator = torch.Generator().manual_seed(0)
    rewards = []
    for _ in range(20):
        samples = sample_from(stale, 32, generator)
        rewards.append(np.mean([sample.reward for sample in samples]))
        load_state(stale, policy.state())
        train(policy, form_micro_batches(samples, 64))
    assert rewards[0] < 0.1
    assert rewards[-1] > 0.5


def sample_from(policy: TransformersPolicy, count: int, generator: torch.Generator) -> list[Sample]:
    """Completions of 4 tokens; the advantage is the reward's distance from the mean."""
    ids = torch.full((count, 1), 3)
    columns = []
    for _ in range(4):
        with torch.no_grad():
            logprobs = policy._model(input_ids=ids, use_cache=False).logits[:, -1].log_softmax(-1)
        token = torch.multinomial(logprobs.exp(), 1, generator=generator)
        columns.append(logprobs.gather(1, token))
        ids = torch.cat([ids, token], 1)
    rewards = (ids[:, 1:] == 7).double().mean(1)
    return [
        sample_of(
            (0, i),
            ids[i, :1],
            ids[i, 1:],
            torch.cat(columns, 1)[i],
            advantage=float(rewards[i] - rewards.mean()),
            reward=float(rewards[i]),
        )
        for i in range(count)
    ]


def test_a_checkpoint_continues_bit_by_bit(tmp_path):
    optimizer = {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1}
    policy = make_policy(optimizer=optimizer)
    samples = make_samples(16)
    for start in (0, 4):
        train(policy, [one_batch(samples[start : start + 4])])
    save_state(policy, tmp_path)
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
    policy = make_policy()
    samples = make_samples(8)
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
    save_state(policy, tmp_path / "later")
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
        save_state(policy, tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == ["policy.json", "policy.safetensors"]
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path):
    policy = make_policy()
    before = policy.digest()
    narrower = make_policy(model=tiny_llama(hidden_size=16))
    with pytest.raises(ConfigError, match="do not fit the model"):
        load_state(policy, narrower.state())
    with pytest.raises(ConfigError, match="of policy 'simulated'"):
        load_state(policy, PolicyState({"simulated": torch.zeros(1)}, {"policy": "simulated"}))
    with pytest.raises(ConfigError, match="holds no state"):
        policy.load_state(tmp_path)
    assert policy.digest() == before


@pytest.mark.parametrize("tie_word_embeddings", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_weights_load_back_equal(tmp_path, tie_word_embeddings, dtype):
    model = tiny_llama(tie_word_embeddings=tie_word_embeddings)
    model.save_pretrained(tmp_path / "start")
    policy = make_policy(dtype, model=model)
    train(policy, [one_batch(make_samples(6))])
    path = save_weights(policy, tmp_path / "start")
    saved = load_file(path)
    assert {tensor.dtype for tensor in saved.values()} == {dtype}
    assert ("lm_head.weight" in saved) is not tie_word_embeddings
    assert {name: tensor.shape for name, tensor in policy.named_parameters_for_export()} == {
        name: tensor.shape for name, tensor in saved.items()
    }
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "start", dtype=dtype)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, dict(model.named_parameters())[name].to(dtype)), name


def test_a_policy_is_loaded_as_configured(tmp_path):
    tiny_model(tmp_path, attention_dropout=0.9)
    policy = load_policy(run_config(tmp_path, trainer={"device": "cpu"}))
    # version 0 has the bytes of the folder, whatever is configured beside it
    assert policy.digest() == make_policy().digest()
    samples = make_samples(4)
    on_policy = [
        changed(sample, rollout_logprobs=logprobs)
        for sample, logprobs in zip(samples, logprobs_of(policy, samples, 1.6), strict=True)
    ]
    metrics = policy.accumulate(one_batch(on_policy))
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


class Policy:
    """Knows where it is, and fails to come so often."""

    def __init__(self, failures: int = 0) -> None:
        self.is_here = True
        self.failures = failures

    def enter(self) -> None:
        if self.failures:
            self.failures -= 1
            raise torch.OutOfMemoryError("full. For now")
        self.is_here = True

    def leave(self) -> None:
        self.is_here = False


async def test_the_device_is_held_from_the_first_call_of_a_step_until_it_is_let_go(tmp_path, monkeypatch):
    monkeypatch.setattr(policy_module, "ENTER_AGAIN_S", 0.01)
    thread = PolicyThread()
    policy = Policy(failures=2)
    files = [tmp_path / "device-0"]
    assert await thread.call(lambda: 1) == 1 and not thread.takes_turns
    of_engine = GpuLock(files)
    activity = Activity("trainer")
    async with asyncio.timeout(60), thread.taking_turns(GpuLock(files), activity):
        thread.policy = await thread.call(lambda: policy)
        await of_engine.acquire()
        assert not policy.is_here, "who waits gets it as soon as nothing is computed"
        thread.hold()
        called = asyncio.create_task(thread.call(lambda: policy.is_here))
        await wait_until(lambda: activity.state == "wait:device")
        assert await thread.call_anywhere(lambda: policy.is_here) is False, "a state can be saved meanwhile"
        of_engine.release()
        assert await called and policy.failures == 0
        wanting = asyncio.create_task(of_engine.acquire())
        await asyncio.sleep(0.1)
        assert not wanting.done() and await thread.call(lambda: policy.is_here)
        thread.release()
        await wanting
        assert not policy.is_here
        of_engine.release()


async def test_who_cannot_enter_says_so_and_gives_the_device_back(tmp_path, monkeypatch):
    monkeypatch.setattr(policy_module, "ENTER_ATTEMPTS", 1)
    thread = PolicyThread()
    files = [tmp_path / "device-0"]
    thread.policy = Policy(failures=1)
    async with asyncio.timeout(60), thread.taking_turns(GpuLock(files), Activity("trainer")):
        with pytest.raises(GpuSharingError, match="full"):
            await thread.call(lambda: None)
        await GpuLock(files).acquire()
