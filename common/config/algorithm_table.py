"""The table of algorithms: advantages, losses and presets by name, with what follows from a name.

The config's checks, the trainer and docs/algorithms.md read it; the functions behind the names are in
services/trainer/algorithm.
"""

from dataclasses import dataclass
from typing import Any, Literal

from tidemill.common.config.section import filled_in


@dataclass(frozen=True, slots=True)
class AdvantageTraits:
    """What follows from the name of an advantage."""

    scope: Literal["group", "batch"] = "group"
    """Computed for one group, or for all groups of an optimizer update, which then waits for its last
    group."""
    compares_siblings: bool = True
    """Compares a completion with its siblings: a group of one teaches nothing."""
    has_discount: bool = False
    """Knows rewards of single tokens, so that `gamma` has a meaning."""
    has_greedy_baseline: bool = False
    """The first sample of a group is greedy: the others are compared with it, and it is not trained."""
    compares_rewards: bool = False
    """Compares each reward of `reward.rewards` by itself, before anything shapes their sum."""
    is_binary: bool = False
    """Only asks whether rewards reach `success_threshold`, in sets of `pass_k`."""
    needs_values: bool = False
    """Reads a value head; with `value.whiten: false` it takes group by group."""


@dataclass(frozen=True, slots=True)
class LossTraits:
    """What follows from the name of a loss. The default is also that of a user's own."""

    level: Literal["token", "sequence"] = "token"
    """One ratio for each token, or one for a sequence."""
    has_ratio: bool = True
    """Compares with old logprobs."""
    has_dual_clip: bool = False
    is_idle_at_one: bool = False
    """Only bounds the ratio: useless where that is always 1."""
    weighs_by_rollout: bool = False
    """The ratio is a weight against the rollout policy."""
    has_covariance: bool = False
    """Looks at the covariance of logprobs and advantages over a mini-batch, which then waits for its last
    group."""
    options: str = ""
    """The section of `trainer.algorithm` that no other kind of loss reads."""


ADVANTAGES: dict[str, AdvantageTraits] = {
    "grpo": AdvantageTraits(),
    "dr_grpo": AdvantageTraits(),
    "rloo": AdvantageTraits(),
    "reinforce_plus_plus_baseline": AdvantageTraits("batch"),
    "pass_at_k": AdvantageTraits(is_binary=True),
    "reinforce_plus_plus": AdvantageTraits("batch", compares_siblings=False, has_discount=True),
    "gae": AdvantageTraits("batch", compares_siblings=False, has_discount=True, needs_values=True),
    "opo": AdvantageTraits(),
    "max_rl": AdvantageTraits(),
    "grpo_passk": AdvantageTraits(),
    "dr_grpo_passk": AdvantageTraits(),
    "grpo_batch": AdvantageTraits("batch"),
    "scale_rl": AdvantageTraits("batch"),
    "gpg": AdvantageTraits("batch"),
    "remax": AdvantageTraits(has_greedy_baseline=True),
    "gdpo": AdvantageTraits("batch", compares_rewards=True),
}
LOSSES: dict[str, LossTraits] = {
    "ppo": LossTraits(has_dual_clip=True),
    "gspo": LossTraits("sequence", has_dual_clip=True, is_idle_at_one=True),
    "cispo": LossTraits(weighs_by_rollout=True),
    "reinforce": LossTraits(has_ratio=False),
    "sapo": LossTraits(is_idle_at_one=True),
    "dppo_tv": LossTraits(is_idle_at_one=True, options="dppo"),
    "dppo_kl": LossTraits(is_idle_at_one=True, options="dppo"),
    "clip_cov": LossTraits(has_covariance=True, options="covariance"),
    "kl_cov": LossTraits(is_idle_at_one=True, has_covariance=True, options="covariance"),
    "gmpo": LossTraits("sequence", is_idle_at_one=True),
    "vespo": LossTraits("sequence", weighs_by_rollout=True, options="vespo"),
}

Preset = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce_plus_plus",
    "ppo",
    "luspo",
    "max_rl",
    "scalerl",
    "dppo",
]

# None adds a KL penalty: it needs a reference model, and most recipes for verifiable rewards leave it out.
PRESETS: dict[Preset, dict[str, Any]] = {
    # arXiv 2402.03300
    "grpo": {
        "advantage": "grpo",
        "loss": "ppo",
        "normalisation": "sequence",
        "clip_high": 0.2,
    },
    # arXiv 2503.20783
    "dr_grpo": {
        "advantage": "dr_grpo",
        "loss": "ppo",
        "normalisation": "constant",
        "clip_high": 0.2,
    },
    # arXiv 2503.14476
    "dapo": {
        "advantage": "grpo",
        "loss": "ppo",
        "normalisation": "token",
        "clip_high": 0.28,
        "filter_zero_variance": True,
        "overlong": {"penalty": 1.0, "buffer_share": 0.2},
    },
    # arXiv 2507.18071, section 5.1
    "gspo": {
        "advantage": "grpo",
        "loss": "gspo",
        "normalisation": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "old_logprobs": "rollout",
    },
    # arXiv 2506.13585: no lower bound; the upper one as in arXiv 2510.13786
    "cispo": {
        "advantage": "grpo",
        "loss": "cispo",
        "normalisation": "token",
        "clip_low": 1.0,
        "clip_high": 4.0,
        "old_logprobs": "rollout",
    },
    # arXiv 2402.14740
    "rloo": {
        "advantage": "rloo",
        "loss": "reinforce",
        "normalisation": "constant",
    },
    # arXiv 2501.03262
    "reinforce_plus_plus": {
        "advantage": "reinforce_plus_plus",
        "loss": "ppo",
        "normalisation": "token",
        "clip_high": 0.2,
    },
    # arXiv 1707.06347, with the token as the action
    "ppo": {
        "advantage": "gae",
        "loss": "ppo",
        "normalisation": "token",
        "clip_high": 0.2,
        "gae_lambda": 0.95,
    },
    # arXiv 2602.05261, section 5.1: GSPO with each sequence's loss times its length
    "luspo": {
        "advantage": "grpo",
        "loss": "gspo",
        "normalisation": "sequence_sum",
        "clip_low": 2e-3,
        "clip_high": 2.5e-3,
        "old_logprobs": "rollout",
    },
    # arXiv 2602.02710: its gradient is one of sums over a completion's tokens
    "max_rl": {
        "advantage": "max_rl",
        "loss": "reinforce",
        "normalisation": "constant",
    },
    # arXiv 2510.13786, section 4
    "scalerl": {
        "advantage": "scale_rl",
        "loss": "cispo",
        "normalisation": "prompt",
        "clip_low": 1.0,
        "clip_high": 4.0,
        "old_logprobs": "rollout",
        "filter_zero_variance": True,
    },
    # arXiv 2602.04879, with prime-rl's bounds and penalty
    "dppo": {
        "advantage": "dr_grpo",
        "loss": "dppo_tv",
        "normalisation": "token",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "old_logprobs": "rollout",
        "rollout_penalty": 1e-3,
    },
}


def with_preset(given: dict[str, Any]) -> dict[str, Any]:
    """The section's fields with what its preset fills in; what is given wins."""
    named = given.get("preset")
    return filled_in(given, next((values for name, values in PRESETS.items() if name == named), {}))
