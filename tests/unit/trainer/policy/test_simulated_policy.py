"""The simulated policy: counts like a real one, and its digest proves what was trained."""

import pytest
import torch

from tests.support.losses import with_statistics
from tests.support.models import (
    load_state,
    make_policy,
    make_samples,
    masked,
    one_batch,
    run_config,
    save_state,
    train,
)
from tests.support.samples import changed
from tidemill.common.errors import ConfigError
from tidemill.services.trainer.policy.simulated_policy import SimulatedPolicy
from tidemill.services.trainer.policy.state import PolicyState


def simulated_policy() -> SimulatedPolicy:
    return SimulatedPolicy(run_config("x"))


def test_simulated_digests_prove_which_micro_batches_were_trained():
    simulated = simulated_policy()
    samples = make_samples(8)
    first = one_batch(samples[:4])
    second = one_batch(samples[4:])
    digests = {simulated.digest()}
    for batches in ([first, second], [second, first], [one_batch(samples)], [first], [first, first]):
        policy = simulated_policy()
        train(policy, batches)
        digests.add(policy.digest())
    assert len(digests) == 6
    same = simulated_policy()
    train(simulated, [first, second])
    train(same, [first, second])
    assert simulated.digest() == same.digest()


def test_simulated_state_continues_the_chain(tmp_path):
    simulated = simulated_policy()
    samples = make_samples(8)
    train(simulated, [one_batch(samples[:4])])
    save_state(simulated, tmp_path)
    resumed = simulated_policy()
    resumed.accumulate(one_batch(samples))
    resumed.load_state(tmp_path)
    assert resumed.digest() == simulated.digest()
    assert train(simulated, [one_batch(samples[4:])]) == train(resumed, [one_batch(samples[4:])])
    assert resumed.digest() == simulated.digest()
    with pytest.raises(ConfigError, match=r"trainer\.policy is simulated"):
        load_state(resumed, PolicyState({"model.w": torch.zeros(1)}, {"policy": "transformers"}))


def test_simulated_weights_differ_by_version(tmp_path):
    simulated = simulated_policy()
    files = []
    for version in range(2):
        simulated.begin_writing(tmp_path, version, -1).result()
        files.append((tmp_path / "model.safetensors").read_bytes())
        simulated.update(1.0)
    assert files[0] != files[1] and len(files[1]) < 5000


def test_simulated_metrics_count_as_the_real_ones():
    simulated = simulated_policy()
    samples = [*make_samples(5), masked(make_samples(1)[0])]
    real = make_policy().accumulate(one_batch(samples))
    pretended = simulated.accumulate(one_batch(samples))
    for name in ("sequences", "tokens", "denominator"):
        assert getattr(real, name) == getattr(pretended, name)


def test_a_simulated_step_has_what_statistics_of_a_mini_batch_need():
    algorithm = {"top_entropy_quantile": 0.5, "loss": "kl_cov", "old_logprobs": "rollout"}
    config = run_config("x", trainer={"policy": "simulated", "algorithm": algorithm})
    samples = make_samples(4)
    tokens = SimulatedPolicy(config).precompute(samples)
    scored = [changed(sample, **item) for sample, item in zip(samples, tokens, strict=True)]
    for sample in with_statistics(scored, config.trainer.algorithm):
        assert sample.columns.keys() >= {"factors", "penalised"}
