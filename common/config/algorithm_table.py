"""Algorithms by name: advantages, losses, presets and corrections, with what follows from a name.

The config's checks, the trainer and docs/algorithms.md read it; the functions behind the names are in
services/trainer/algorithm.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tidemill.common.config.section import filled_in, read_table


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


PRESETS: dict[str, dict[str, Any]] = read_table("presets")
"""Defaults of published algorithms for the fields of `trainer.algorithm`."""

_NONE = {"mode": "off"}
_TOKEN = {"mode": "truncate", "level": "token", "low": 0.0, "high": 2.0}
_ICEPOP = {"mode": "mask", "level": "token", "low": 0.5, "high": 5.0}
_SEQUENCE = {"mode": "truncate", "level": "sequence", "low": 0.0, "high": 2.0}
# verl's 0.999 to 1.001, which it bounds 1 / r with.
_GEOMETRIC = {"seq_mean_k1": (1 / 1.001, 1 / 0.999)}
_K3 = {"seq_mean_k3": 0.01}


def _decoupled(importance: dict[str, Any], **rejection: Any) -> dict[str, Any]:
    kept = {"bounds": rejection, "denominator": "kept"} if rejection else {}
    return {"old_logprobs": "recompute", "importance": importance, "rejection": kept}


def _bypass_ppo(**rejection: Any) -> dict[str, Any]:
    return {"old_logprobs": "rollout", "importance": _NONE, "rejection": {"bounds": rejection}}


def _bypass_pg(importance: dict[str, Any], **rejection: Any) -> dict[str, Any]:
    return _decoupled(importance) | {"rejection": {"bounds": rejection}, "loss": "reinforce"}


CORRECTIONS: dict[str, dict[str, Any]] = {
    "decoupled_token_is": _decoupled(_TOKEN),
    "decoupled_seq_is": _decoupled(_SEQUENCE),
    "decoupled_token_icepop": _decoupled(_ICEPOP),
    "decoupled_seq_is_rs": _decoupled(_SEQUENCE, seq_sum_k1=(0.5, 2.0)),
    "decoupled_geo_rs": _decoupled(_NONE, **_GEOMETRIC),
    "decoupled_geo_rs_seq_tis": _decoupled(_SEQUENCE, **_GEOMETRIC),
    "decoupled_geo_rs_token_tis": _decoupled(_TOKEN, **_GEOMETRIC),
    "decoupled_k3_rs": _decoupled(_NONE, **_K3),
    "decoupled_k3_rs_seq_tis": _decoupled(_SEQUENCE, **_K3),
    "decoupled_k3_rs_token_tis": _decoupled(_TOKEN, **_K3),
    "bypass_ppo_clip": _bypass_ppo(),
    "bypass_ppo_clip_geo_rs": _bypass_ppo(**_GEOMETRIC),
    "bypass_ppo_clip_k3_rs": _bypass_ppo(**_K3),
    "bypass_pg_is": _bypass_pg(_SEQUENCE),
    "bypass_pg_token_icepop": _bypass_pg(_ICEPOP),
    "bypass_pg_geo_rs": _bypass_pg(_NONE, **_GEOMETRIC),
    "bypass_pg_geo_rs_seq_tis": _bypass_pg(_SEQUENCE, **_GEOMETRIC),
    "bypass_pg_geo_rs_token_tis": _bypass_pg(_TOKEN, **_GEOMETRIC),
    "disabled": _decoupled(_NONE),
}
"""Values of `old_logprobs`, `importance` and `rejection` by the names of verl's rollout correction.
`decoupled` corrects the policy at the step's start; `bypass_ppo` takes PPO's ratio to the rollout instead;
`bypass_pg` is REINFORCE. Rejected tokens leave the denominator where they do so in verl: when decoupled."""

if TYPE_CHECKING:
    Preset = str
    Correction = str
else:
    Preset, Correction = Literal[tuple(PRESETS)], Literal[tuple(CORRECTIONS)]


def with_named(given: dict[str, Any]) -> dict[str, Any]:
    """The section's fields with what its correction and its preset fill in; what is given wins."""
    for field, table in (("correction", CORRECTIONS), ("preset", PRESETS)):
        given = filled_in(given, table.get(str(given.get(field)), {}))
    return given
