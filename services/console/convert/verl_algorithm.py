"""verl's algorithm as ours: advantage, loss, ratio, KL and corrections."""

from typing import Any, get_args

from tidemill.common.config.algorithm_table import ADVANTAGES, LOSSES
from tidemill.common.config.penalties import KlConfig
from tidemill.services.console.convert.draft import Draft, origin
from tidemill.services.console.convert.table import is_field
from tidemill.services.console.convert.verl_table import OVERLONG, A, C, R, W

FIELD = "trainer.algorithm."
ESTIMATORS = {
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "gae": "gae",
    "remax": "remax",
    "opo": "opo",
    "gpg": "gpg",
    "grpo_passk": "grpo_passk",
}
"""verl's advantage -> ours; a name that our table of algorithms lacks has no counterpart."""
LOSS_MODES = {
    "vanilla": "ppo",
    "gspo": "gspo",
    "sapo": "sapo",
    "cispo": "cispo",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
    "geo_mean": "gmpo",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
}
"""The same for losses."""
HIGHEST_DUAL_CLIP = 1000.0
"""A bound above this is as good as none."""
AGGREGATIONS = {
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum-norm": "constant",
    "seq-mean-token-sum": "constant",
}
PENALTIES = {
    "low_var_kl": ("k3",),
    "k3": ("k3",),
    "k2": ("k2",),
    "mse": ("k2",),
    "k1+": ("k1",),
    "kl+": ("k1",),
    "k3+": ("k3+", "k2"),
    "low_var_kl+": ("k3+", "k2"),
    "abs": ("abs", "k2"),
}
"""verl's estimator -> ours, and the nearest one for releases that lack it."""
FORMER_CRITERIA = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
"""What older releases of verl call them."""
ESTIMATOR_NAMES = get_args(KlConfig.model_fields["estimator"].annotation)


def convert_algorithm(draft: Draft) -> None:
    """Everything in `trainer.algorithm`."""
    _convert_ratio(draft)
    _convert_advantage(draft)
    _convert_loss(draft)
    _convert_kl(draft)
    _convert_correction(draft)
    _convert_overlong(draft)


def _convert_ratio(draft: Draft) -> None:
    """What the ratio compares with, which decides what else has a meaning."""
    is_rollout = draft.take(C + "bypass_mode") or draft.take(A + "use_rollout_log_probs")
    is_filtered = draft.take(R + "top_p") < 1 or draft.take(R + "top_k") > 0
    if is_rollout and is_filtered:
        draft.lose(
            C + "bypass_mode",
            "with top_p or top_k the engine's logprobs are not the policy's: recomputed here",
        )
    elif is_rollout:
        draft.put(FIELD + "old_logprobs", "rollout", C + "bypass_mode")


def _is_rollout(draft: Draft) -> bool:
    return FIELD + "old_logprobs" in draft.fields


def _convert_advantage(draft: Draft) -> None:
    theirs = draft.take("algorithm.adv_estimator")
    ours = ESTIMATORS.get(str(theirs), "")
    if ours == "grpo" and not draft.take("algorithm.norm_adv_by_std_in_grpo"):
        ours = "dr_grpo"
    if theirs == "gdpo":
        draft.lose(
            "algorithm.adv_estimator", "it compares rewards by themselves: name them in reward.rewards"
        )
        ours = "grpo"
    elif ours not in ADVANTAGES:
        draft.lose("algorithm.adv_estimator", f"no such advantage here: grpo in place of {theirs}")
        ours = "grpo"
    if ADVANTAGES[ours].compares_siblings and draft.given.get(R + "n", 1) < 2:
        draft.lose(
            R + "n", f"{ours} compares completions of a group: reinforce_plus_plus compares with the batch"
        )
        ours = "reinforce_plus_plus"
    draft.put(FIELD + "advantage", ours, "algorithm.adv_estimator")
    discount, trace = draft.take("algorithm.gamma"), draft.take("algorithm.lam")
    if ADVANTAGES[ours].has_discount and discount != 1:
        draft.put(FIELD + "gamma", discount, "algorithm.gamma")
    if ours != "gae":
        return
    draft.put(FIELD + "gae_lambda", trace, "algorithm.lam")
    draft.put(FIELD + "value.head", True, "algorithm.adv_estimator")
    draft.put(FIELD + "value.lr", draft.take("critic.optim.lr"), "critic.optim.lr")
    draft.put(FIELD + "value.clip", draft.take("critic.cliprange_value"), "critic.cliprange_value")
    draft.approximate(
        "algorithm.adv_estimator", "the value head shares the policy's model; verl has a critic model"
    )


def _convert_loss(draft: Draft) -> None:
    theirs = draft.take(A + "policy_loss.loss_mode")
    ours = LOSS_MODES.get(str(theirs), "")
    if ours not in LOSSES:
        draft.lose(A + "policy_loss.loss_mode", f"no such loss here: ppo in place of {theirs}")
        ours = "ppo"
    updates = draft.fields["trainer.mini_batches"] * (draft.take(A + "ppo_epochs") or 1)
    moves = updates > 1 or _is_rollout(draft)
    if LOSSES[ours].is_idle_at_one and not moves:
        draft.explain(
            A + "policy_loss.loss_mode", f"with one update a step the ratio is 1, and {ours} is ppo"
        )
        ours = "ppo"
    if ours == "cispo" and not _is_rollout(draft):
        draft.lose(
            A + "policy_loss.loss_mode", "cispo weighs by the ratio to the rollout: old_logprobs is rollout"
        )
        draft.put(FIELD + "old_logprobs", "rollout", "cispo needs it")
    low, high = draft.take(A + "clip_ratio_low"), draft.take(A + "clip_ratio_high")
    if (
        draft.take(C + "loss_type") == "reinforce"
        and _is_rollout(draft)
        and draft.given.get(C + "rollout_is")
    ):
        ours, low, high = "cispo", 1.0, _bounds(draft)[1] - 1.0
    draft.put(FIELD + "loss", ours, A + "policy_loss.loss_mode")
    draft.put(FIELD + "clip_low", min(low, 1.0), A + "clip_ratio_low")
    draft.put(FIELD + "clip_high", high, A + "clip_ratio_high")
    bound = draft.take(A + "clip_ratio_c")
    if ours == "ppo" and moves and bound > 1 + high:
        is_none = bound > HIGHEST_DUAL_CLIP
        draft.put(FIELD + "dual_clip", None if is_none else float(bound), A + "clip_ratio_c")
    elif draft.has(A + "clip_ratio_c") and theirs == "vanilla":
        draft.explain(A + "clip_ratio_c", "with one update a step the ratio is always 1")
    elif draft.has(A + "clip_ratio_c"):
        draft.approximate(
            A + "clip_ratio_c", "verl uses it with vanilla only; gspo's bound is 3 here (dual_clip)"
        )
    mode = draft.take(A + "loss_agg_mode")
    if mode not in AGGREGATIONS:
        draft.lose(A + "loss_agg_mode", "normalised by token here")
    elif mode == "seq-mean-token-sum":
        draft.approximate(
            A + "loss_agg_mode",
            "constant also divides by max_tokens: Adam does not see it, max_grad_norm does",
        )
    draft.put(FIELD + "normalisation", AGGREGATIONS.get(mode, "token"), A + "loss_agg_mode")


def _convert_kl(draft: Draft) -> None:
    weight = draft.take(A + "kl_loss_coef")
    if draft.take(A + "use_kl_loss"):
        draft.put(FIELD + "reference.model", "frozen", A + "use_kl_loss")
        if weight:
            draft.put(FIELD + "kl.place", "loss", A + "use_kl_loss")
            draft.put(FIELD + "kl.coefficient", weight, A + "kl_loss_coef")
            kind = str(draft.take(A + "kl_loss_type"))
            wanted = PENALTIES.get(kind, ("", "k2"))
            ours = next(name for name in wanted if name in ESTIMATOR_NAMES)
            draft.put(FIELD + "kl.estimator", ours, A + "kl_loss_type")
            if ours != wanted[0]:
                draft.approximate(A + "kl_loss_type", f"{ours}: docs/algorithms.md compares gradients")
    in_reward, weight = draft.take("algorithm.use_kl_in_reward"), draft.take("algorithm.kl_ctrl.kl_coef")
    if not in_reward or not weight:
        return
    if FIELD + "kl.place" in draft.fields:
        draft.lose("algorithm.use_kl_in_reward", "the penalty has one place, and is in the loss")
        return
    draft.put(FIELD + "reference.model", "frozen", "algorithm.use_kl_in_reward")
    draft.put(FIELD + "kl.place", "reward", "algorithm.use_kl_in_reward")
    draft.put(FIELD + "kl.estimator", "k1", "algorithm.kl_penalty")
    draft.put(FIELD + "kl.coefficient", weight, "algorithm.kl_ctrl.kl_coef")
    if draft.take("algorithm.kl_ctrl.type") != "fixed":
        draft.lose("algorithm.kl_ctrl.type", "the coefficient does not adapt")


def _convert_correction(draft: Draft) -> None:
    """Importance weights of the recomputed logprobs against the rollout's."""
    level, rejects = draft.take(C + "rollout_is"), draft.take(C + "rollout_rs")
    if rejects and is_field(FIELD + "rejection.denominator"):
        _convert_rejection(draft, str(rejects))
        rejects = None
    if _is_rollout(draft):
        if level and draft.take(C + "loss_type") != "reinforce":
            draft.explain(C + "rollout_is", "with old_logprobs rollout the ratio is the weight")
        if rejects:
            draft.lose(C + "rollout_rs", "no rejection with old_logprobs rollout")
        return
    field = FIELD + "importance."
    if level:
        low, high, is_mask = _bounds(draft)
        draft.put(field + "mode", "mask" if is_mask else "truncate", C + "rollout_is_threshold")
        draft.put(field + "level", level, C + "rollout_is")
        draft.put(field + "high", high, C + "rollout_is_threshold")
        if low:
            draft.put(field + "low", low, C + "rollout_is_threshold")
        if rejects:
            draft.lose(C + "rollout_rs", "weights and rejection do not go together")
    elif rejects == "seq_mean_k1":
        low, high, _ = _bounds(draft, "rollout_rs_threshold")
        draft.put(field + "mode", "mask", C + "rollout_rs")
        draft.put(field + "level", "geometric", C + "rollout_rs")
        draft.put(field + "high", max(high, 1.0), C + "rollout_rs_threshold")
        draft.put(field + "low", min(low, 1.0), C + "rollout_rs_threshold")
        draft.approximate(C + "rollout_rs", "what is kept weighs its ratio here, and 1 in verl")
    else:
        draft.put(field + "mode", "off", origin(C + "rollout_is", "null"))
        if rejects:
            draft.lose(C + "rollout_rs", "no such rejection here")
    loss = draft.fields[FIELD + "loss"]
    if LOSSES[loss].level == "sequence" and draft.fields.get(field + "level") == "token":
        draft.approximate(C + "rollout_is", f"{loss} has one ratio for a sequence: so have its weights")
        draft.put(field + "level", "sequence", "as the loss")


def _convert_rejection(draft: Draft, rejects: str) -> None:
    """Several criteria have several thresholds; `low_high` is two bounds."""
    criteria, given = rejects.split(","), str(draft.take(C + "rollout_rs_threshold")).split(",")
    for index, name in enumerate(criteria):
        criterion = FORMER_CRITERIA.get(name.strip(), name.strip())
        if not is_field(f"{FIELD}rejection.{criterion}"):
            draft.lose(C + "rollout_rs", f"no rejection by {criterion} here")
            continue
        low, sign, high = given[min(index, len(given) - 1)].strip().partition("_")
        bounds = [float(low), float(high)] if sign else float(low)
        draft.put(f"{FIELD}rejection.{criterion}", bounds, C + "rollout_rs_threshold")
        draft.put(FIELD + "rejection.denominator", "kept", "as verl counts")


def _bounds(draft: Draft, name: str = "rollout_is_threshold") -> tuple[float, float, bool]:
    """Lower and upper bound, and whether what lies outside is left out."""
    given: Any = draft.take(C + name)
    low, sign, high = str(2.0 if given is None else given).partition("_")
    if sign:
        return float(low), float(high), True
    return (1.0 / float(low) if name == "rollout_rs_threshold" else 0.0), float(low), False


def _convert_overlong(draft: Draft) -> None:
    penalty, length = draft.take(OVERLONG + "penalty_factor"), draft.take(OVERLONG + "len")
    limit = draft.take(W + "reward_kwargs.max_resp_len") or draft.take("data.max_response_length")
    if not draft.take(OVERLONG + "enable") or not length or not penalty:
        return
    draft.put(FIELD + "overlong.penalty", penalty, OVERLONG + "penalty_factor")
    draft.put(
        FIELD + "overlong.buffer_share", round(min(length / limit, 1.0), 6), OVERLONG + "len / max_resp_len"
    )
