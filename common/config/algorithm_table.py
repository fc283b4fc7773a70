"""Algorithms by name: advantages, losses, presets and corrections, with what follows from a name.

The config's checks, the trainer and docs/algorithms.md read it; the functions behind the names are in
services/trainer/algorithm.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tidemill.common.config.section import read_table


@dataclass(frozen=True, slots=True)
class AdvantageTraits:
    """What follows from the name of an advantage."""

    scope: Literal["group", "batch"] = "group"
    """Computed for one group, or for all groups of an optimizer update, which then waits for its last
    group."""
    compares_siblings: bool = True
    """Compares a completion with the others of its group: in a group of one, the advantage is 0."""
    has_discount: bool = False
    """Uses rewards of single tokens, so that `gamma` has a meaning."""
    has_greedy_baseline: bool = False
    """The first sample of a group is greedy: the others are compared with it, and it is not trained."""
    compares_rewards: bool = False
    """Compares each reward of `reward.rewards` by itself, before anything shapes their sum."""
    is_binary: bool = False
    """Only asks whether rewards reach `success_threshold`, in sets of `pass_k`."""
    needs_values: bool = False
    """Needs a value head; with `value.whiten: false` its scope is the group."""


@dataclass(frozen=True, slots=True)
class LossTraits:
    """What follows from the name of a loss. The default is also that of a user's own."""

    level: Literal["token", "sequence"] = "token"
    """One ratio for each token, or one for a sequence."""
    has_ratio: bool = True
    """Uses the ratio to the old logprobs."""
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


PRESETS: dict[str, dict[str, Any]] = read_table("presets")
"""Defaults of published algorithms for the fields of `trainer.algorithm`."""
CORRECTIONS: dict[str, dict[str, Any]] = read_table("corrections")
"""Defaults by the names of verl's rollout correction, for the fields about ratios."""

if TYPE_CHECKING:
    Preset = str
    Correction = str
else:
    Preset = Literal[tuple(PRESETS)]
    Correction = Literal[tuple(CORRECTIONS)]
