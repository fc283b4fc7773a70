"""Makes the fields of a converted config agree with each other: lengths, ratio, advantage."""

import math

from tidemill.common.config.algorithms.advantage import AdvantageTraits
from tidemill.common.config.algorithms.table import ADVANTAGES, LOSSES
from tidemill.common.wire.sampling import FILTER_NAMES, FILTERS
from tidemill.services.console.convert.draft import Draft

F = "trainer.algorithm."
IMPORTANCE = "trainer.algorithm.importance."
EVALUATION = "trainer.evaluation."
ADVANTAGE = F + "advantage"
OLD = F + "old_logprobs"
LOSS = F + "loss"
DUAL = F + "dual_clip"
WARMUP = "trainer.optimizer.warmup_steps"
HIGHEST_DUAL_CLIP = 1000.0
"""A bound above this has no effect."""


def put_warmup(draft: Draft, steps: str, ratio: str, per_step: int = 1) -> None:
    """Set the warm-up from their number of steps (`per_step` of them in one of ours), or a share of all."""
    count = draft.take(steps) or 0
    share = draft.take(ratio) or 0
    total = draft.get("trainer.steps")
    if 0 < count < 1:
        share = count
        count = 0
    if count > 0:
        draft.put(WARMUP, math.ceil(count / per_step), steps)
    elif share and total:
        draft.put(WARMUP, math.ceil(share * total), ratio)
    elif share:
        draft.say("lost", ratio, f"set {WARMUP} to ratio * steps")


def fit(draft: Draft) -> None:
    """Make the parts agree, and say what had to change."""
    steps = draft.get("trainer.steps")
    if steps:
        draft.drop("trainer.epochs")
        if 1 < steps <= draft.get(WARMUP, 0):
            draft.put(WARMUP, steps - 1, draft.origins[WARMUP][0], f"cut, for the run has {steps} steps")
    if "model.max_model_len" not in draft.fields:
        total = draft.get("data.max_prompt_tokens") + draft.get("rollout.sampling.max_tokens")
        draft.put("model.max_model_len", total, note="prompt and completion")
    train = draft.get("data.train")
    group_sizes = [draft.get("trainer.group_size")]
    if isinstance(train, list):  # sources, of which each may have its own
        group_sizes += [row["group_size"] for row in train if isinstance(row, dict)]
    if 1 in group_sizes:
        draft.put("reward.min_group_size", 1, note="groups of one")
    _fit_ratio(draft)
    _fit_weights(draft)
    _fit_advantage(draft)
    _fit_dual_clip(draft)  # after the others: of the rules that a config breaks, only the first is known
    if "data.eval" not in draft.fields:
        draft.drop(EVALUATION)
    if not draft.get(EVALUATION + "temperature"):
        for name in FILTERS:
            draft.drop(EVALUATION + name)
        if draft.get(EVALUATION + "samples", 1) > 1:
            draft.drop(EVALUATION + "samples", "lost", "greedy samples are all alike: one is enough")


def _fit_ratio(draft: Draft) -> None:
    """Make the loss agree with the logprobs that its ratio compares with."""
    traits = LOSSES[draft.get(LOSS)]
    option, _ = draft.origins[LOSS]
    is_filtered = any(draft.get(f"rollout.sampling.{name}", off) != off for name, off in FILTERS.items())
    if is_filtered and OLD in draft.fields:
        text = f"with one of {FILTER_NAMES} the engine's logprobs are not the policy's: recomputed here"
        draft.drop(OLD, "lost", text)
    elif traits.weighs_by_rollout and OLD not in draft.fields:
        draft.put(OLD, "rollout", option)
        draft.say("approximated", option, "it weighs by the ratio to the rollout: old_logprobs is rollout")
    if not traits.has_ratio and OLD in draft.fields:
        draft.drop(OLD, "approximated", "the loss has no ratio: importance weights correct it")
    if traits.is_idle_at_one and not _moves(draft):
        draft.say("automatic", option, "with one update a step the ratio is 1, and the loss is ppo")
        draft.put(LOSS, "ppo", option)
    settings = LOSSES[draft.get(LOSS)].settings
    for loss in LOSSES.values():
        if loss.settings is None or loss.settings is settings:
            continue
        for section in loss.settings.model_fields:
            draft.drop(f"{F}{section}.")


def _moves(draft: Draft) -> bool:
    """Whether the ratio may be another number than 1: the weights move within a step, or it is the ratio to
    the rollout."""
    return draft.updates_per_step > 1 or OLD in draft.fields


def _fit_weights(draft: Draft) -> None:
    """Drop importance weights where `old_logprobs` is rollout. They are per sequence where the ratio is."""
    if OLD in draft.fields:  # which is set for `rollout` only
        draft.drop(IMPORTANCE, "automatic", "the ratio to the rollout is the weight")
    elif draft.get(IMPORTANCE + "mode") != "truncate":
        draft.drop(IMPORTANCE + "normalise")
    if LOSSES[draft.get(LOSS)].level == "sequence" and draft.get(IMPORTANCE + "level") == "token":
        option, _ = draft.origins[IMPORTANCE + "level"]
        draft.put(IMPORTANCE + "level", "sequence", option)
        draft.say("approximated", option, "a sequence has one weight, as it has one ratio")


def _fit_dual_clip(draft: Draft) -> None:
    """Drop a dual clip without a ratio to bound, or that the config refuses beside its ordinary clip."""
    is_without_effect = (draft.get(DUAL) or 0.0) > HIGHEST_DUAL_CLIP
    if is_without_effect:
        # For `problem` below, which must not report the number itself.
        draft.fields[DUAL] = HIGHEST_DUAL_CLIP
    if not LOSSES[draft.get(LOSS)].has_dual_clip or not _moves(draft) or "dual_clip" in draft.problem():
        why = "the loss has its own" if _moves(draft) else "with one update a step the ratio is always 1"
        draft.drop(DUAL, "automatic", why)
    elif is_without_effect:
        draft.fields[DUAL] = None


def _advantage_traits(draft: Draft) -> AdvantageTraits:
    """Those of the advantage; one that is a function in a file of examples/algorithms compares siblings."""
    return ADVANTAGES.get(draft.get(ADVANTAGE), AdvantageTraits())


def _fit_advantage(draft: Draft) -> None:
    """Replace an advantage that compares siblings or rewards if there is only one; drop a KL of weight 0."""
    name = draft.get(ADVANTAGE)
    option, _ = draft.origins[ADVANTAGE]
    if _advantage_traits(draft).compares_rewards and len(draft.get("reward.rewards", ())) < 2:
        draft.say("approximated", option, f"{name} compares rewards: name several in reward.rewards")
        draft.put(ADVANTAGE, "grpo", option)
    if _advantage_traits(draft).compares_siblings and draft.get("trainer.group_size", 2) < 2:
        text = f"{name} compares completions of a group: reinforce_plus_plus compares with the batch"
        draft.say("lost", draft.origins["trainer.group_size"][0], text)
        draft.put(ADVANTAGE, "reinforce_plus_plus", option)
    if not _advantage_traits(draft).has_discount:
        draft.drop(F + "gamma")
    if "trainer.lora.rank" in draft.fields:
        draft.drop(F + "value.model", "approximated", "with lora the value head sits on the policy")
    if not draft.get(F + "kl.coefficient"):
        draft.drop(F + "kl.")
        draft.drop(F + "kl_control.")
