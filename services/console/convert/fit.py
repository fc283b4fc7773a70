"""What our config wants of fields together, whoever's options they are from: lengths, ratio, advantage."""

import math

from tidemill.common.config.algorithm_table import ADVANTAGES, LOSSES
from tidemill.services.console.convert.draft import Draft

F, IMPORTANCE, EVALUATION = "trainer.algorithm.", "trainer.algorithm.importance.", "trainer.evaluation."
OLD, LOSS, DUAL, WARMUP = F + "old_logprobs", F + "loss", F + "dual_clip", "trainer.optimizer.warmup_steps"
HIGHEST_DUAL_CLIP = 1000.0
"""A bound above this is as good as none."""


def updates(draft: Draft) -> int:
    """Optimizer updates of one of our steps: each pass over its mini-batches has its own."""
    return int(draft.get("trainer.mini_batches", 1) * draft.get("trainer.passes", 1))


def put_warmup(draft: Draft, steps: str, ratio: str, updates_per_step: int = 1) -> None:
    """Warm-up from a number of their steps, or from a share of all."""
    count, share = draft.take(steps) or 0, draft.take(ratio) or 0
    if 0 < count < 1:
        count, share = 0, count
    total = draft.get("trainer.steps")
    if count > 0:
        draft.put(WARMUP, math.ceil(count / updates_per_step), steps)
    elif share and total:
        draft.put(WARMUP, math.ceil(share * total), ratio)
    elif share:
        draft.say("lost", ratio, f"set {WARMUP} to ratio * steps")


def fit(draft: Draft) -> None:
    """Make the parts agree, and say what had to change."""
    if "trainer.steps" in draft.fields:
        draft.drop("trainer.epochs")
        steps = draft.get("trainer.steps")
        if 1 < steps <= draft.get(WARMUP, 0):
            draft.put(WARMUP, steps - 1, draft.origins[WARMUP], f"cut, for the run has {steps} steps")
    total = draft.get("data.max_prompt_tokens") + draft.get("rollout.sampling.max_tokens")
    if "model.max_model_len" not in draft.fields:
        draft.put("model.max_model_len", total, note="prompt and completion")
    if draft.get("trainer.group_size") == 1:
        draft.put("reward.min_group_size", 1, note="groups of one")
    _fit_ratio(draft)
    _fit_corrections(draft)
    _fit_advantage(draft)
    _fit_evaluation(draft)


def _fit_ratio(draft: Draft) -> None:
    """The loss, what its ratio compares with, and bounds of that ratio."""
    loss, option = draft.get(LOSS), draft.origins[LOSS]
    if draft.get("rollout.sampling.top_p", 1) < 1 or draft.get("rollout.sampling.top_k", 0) > 0:
        if OLD in draft.fields:
            text = "with top_p or top_k the engine's logprobs are not the policy's: recomputed here"
            draft.say("lost", draft.origins[OLD], text)
            draft.drop(OLD)
    elif LOSSES[loss].weighs_by_rollout and OLD not in draft.fields:
        draft.put(OLD, "rollout", option)
        draft.say(
            "approximated", option, f"{loss} weighs by the ratio to the rollout: old_logprobs is rollout"
        )
    if not LOSSES[loss].has_ratio and OLD in draft.fields:
        draft.say("approximated", draft.origins[OLD], f"{loss} has no ratio: importance weights correct it")
        draft.drop(OLD)
    moves = updates(draft) > 1 or OLD in draft.fields
    if LOSSES[loss].is_idle_at_one and not moves:
        draft.say("automatic", option, f"with one update a step the ratio is 1, and {loss} is ppo")
        draft.put(LOSS, loss := "ppo", option)
    draft.fields[F + "clip_low"] = min(draft.get(F + "clip_low"), 1.0)
    draft.fields[F + "clip_high"] = high = max(draft.get(F + "clip_high"), 0.0)
    if DUAL not in draft.fields:
        return
    bound, option = draft.fields.pop(DUAL), draft.origins[DUAL]
    if LOSSES[loss].has_dual_clip and moves and not (bound and bound <= 1 + high):
        is_none = bound is None or bound > HIGHEST_DUAL_CLIP
        draft.put(DUAL, None if is_none else float(bound), option)
    elif draft.has(option):
        why = "with one update a step the ratio is always 1" if not moves else f"{loss} has its own bound"
        draft.say("automatic", option, why)


def _fit_corrections(draft: Draft) -> None:
    """Importance weights belong to recomputed logprobs, and are of sequences where the ratio is."""
    mode = draft.get(IMPORTANCE + "mode", "off")
    if OLD in draft.fields or mode != "truncate":
        draft.drop(IMPORTANCE + "normalise")
    if OLD in draft.fields:
        if mode != "off":
            draft.say(
                "automatic", draft.origins[IMPORTANCE + "mode"], "the ratio to the rollout is the weight"
            )
        draft.drop(IMPORTANCE)
    elif LOSSES[draft.get(LOSS)].level == "sequence" and draft.get(IMPORTANCE + "level") == "token":
        option = draft.origins[IMPORTANCE + "level"]
        draft.put(IMPORTANCE + "level", "sequence", option)
        draft.say("approximated", option, "a sequence has one weight, as it has one ratio")


def _fit_advantage(draft: Draft) -> None:
    """Advantages that compare siblings need some; a penalty has one place and a weight."""
    advantage, field = draft.get(F + "advantage"), F + "advantage"
    if ADVANTAGES[advantage].compares_siblings and draft.get("trainer.group_size", 2) < 2:
        text = f"{advantage} compares completions of a group: reinforce_plus_plus compares with the batch"
        draft.say("lost", draft.origins.get("trainer.group_size", ""), text)
        draft.put(field, "reinforce_plus_plus", draft.origins[field])
    if not ADVANTAGES[draft.get(field)].has_discount:
        draft.drop(F + "gamma")
    if "trainer.lora.rank" in draft.fields and draft.fields.pop(F + "value.model", None):
        draft.say("approximated", draft.origins[field], "with lora the value head sits on the policy")
    if not draft.get(F + "kl.coefficient"):
        draft.drop(F + "kl.")
        draft.drop(F + "kl_control.")


def _fit_evaluation(draft: Draft) -> None:
    """Without sets there is none; greedy samples are all alike."""
    if "data.eval" not in draft.fields:
        draft.drop(EVALUATION)
    if not draft.get(EVALUATION + "temperature"):
        for name in ("top_p", "top_k", "min_p"):
            draft.drop(EVALUATION + name)
        if draft.get(EVALUATION + "samples", 1) > 1:
            draft.say(
                "lost", draft.origins[EVALUATION + "samples"], "greedy samples are all alike: one is enough"
            )
            draft.drop(EVALUATION + "samples")
