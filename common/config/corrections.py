"""Named settings of `old_logprobs`, `importance` and `rejection`, by the names of verl's rollout correction.

`decoupled` corrects the policy at the step's start; `bypass_ppo` takes PPO's ratio to the rollout instead;
`bypass_pg` is REINFORCE. Rejected tokens leave the denominator where they do so in verl: when decoupled.
"""

from typing import Any, Literal

from tidemill.common.config.section import filled_in

Correction = Literal[
    "decoupled_token_is",
    "decoupled_seq_is",
    "decoupled_token_icepop",
    "decoupled_seq_is_rs",
    "decoupled_geo_rs",
    "decoupled_geo_rs_seq_tis",
    "decoupled_geo_rs_token_tis",
    "decoupled_k3_rs",
    "decoupled_k3_rs_seq_tis",
    "decoupled_k3_rs_token_tis",
    "bypass_ppo_clip",
    "bypass_ppo_clip_geo_rs",
    "bypass_ppo_clip_k3_rs",
    "bypass_pg_is",
    "bypass_pg_token_icepop",
    "bypass_pg_geo_rs",
    "bypass_pg_geo_rs_seq_tis",
    "bypass_pg_geo_rs_token_tis",
    "disabled",
]

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
    fields = {"old_logprobs": "recompute", "importance": importance, "rejection": {"bounds": rejection}}
    return fields | {"loss": "reinforce"}


CORRECTIONS: dict[Correction, dict[str, Any]] = {
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


def with_correction(given: dict[str, Any]) -> dict[str, Any]:
    """The section's fields with what its correction fills in; what is given wins."""
    named = given.get("correction")
    return filled_in(given, next((values for name, values in CORRECTIONS.items() if name == named), {}))
