"""Refuses options that would take the effect of filtered sampling for a change of the policy."""

from typing import TYPE_CHECKING

from tidemill.common.config.section import Rules, listed
from tidemill.common.wire.sampling import FILTER_NAMES

if TYPE_CHECKING:
    from tidemill.common.config.run import RunConfig

FILTERED = f"rollout.sampling ({FILTER_NAMES}) filters, so that rollout logprobs lie above the policy's"
"""Beginning of the reason why an option is refused that compares with rollout logprobs."""


def find_problems(run: "RunConfig") -> Rules:
    algorithm = run.trainer.algorithm
    if algorithm.kl.place == "reward":
        yield (
            f"{FILTERED}, and trainer.algorithm.kl.place: reward would take their distance from the "
            "reference for KL; put the penalty into the loss"
        )
    if run.rollout.sampling_masks:
        return
    rejecting = algorithm.rejection.of_sequences
    level = algorithm.importance.level
    mode = algorithm.importance_mode
    # Whether one weight is made of all tokens of a sequence, so that their gaps add up.
    is_of_sequences = level == "sequence" or (level == "geometric" and mode == "mask")
    for is_wrong, field, effect in (
        (algorithm.old_logprobs == "rollout", "old_logprobs: rollout",
         "would clip the ratio of tokens that have not moved; take recompute"),
        (algorithm.rollout_penalty, "rollout_penalty", "would pull the policy towards it; leave it out"),
        (algorithm.off_policy_threshold is not None, "off_policy_threshold",
         "would count it as a distance; sample unfiltered, or leave it out"),
        (rejecting, f"rejection.bounds.{listed(rejecting)}",
         "would reject nearly every sequence for it; sample unfiltered, or leave the criterion out"),
        (mode != "off" and is_of_sequences, f"importance.level: {level}",
         "would multiply the gaps of all tokens of a sequence, until next to nothing is left of its "
         "weight; sample unfiltered, or take level token"),
    ):  # fmt: skip
        if is_wrong:
            yield f"{FILTERED}, and trainer.algorithm.{field} {effect}"
    if mode == "off":
        yield (
            f"{FILTERED}, and nothing corrects for it: set rollout.sampling_masks: true, with which "
            "training is exact, or, where the engine records none, trainer.algorithm.importance.mode: "
            "truncate"
        )
