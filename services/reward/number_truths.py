"""Finds reward functions that compare a ground truth which is a number with text: they give a right answer
the score of a wrong one, and never fail."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tidemill.common.config import RunConfig
from tidemill.services.reward.outcome import AttemptError
from tidemill.services.reward.rewards.reward import FunctionReward, load_checked
from tidemill.services.reward.sample import RewardSample

LIMIT_S = 20.0
"""Time for all trials of one function: one that asks a server may take longer, and is not judged then."""
FORMS = ("{}", "#### {}", "\\boxed{{{}}}", "<answer>{}</answer>", "The answer is {}.")
"""Usual forms of an answer."""


async def find_number_faults(run: RunConfig, sample: RewardSample) -> list[str]:
    """A sentence for each function that pays an answer more where the sample's truth is text."""
    truth = sample.trajectory.ground_truth
    if not isinstance(truth, bool | int | float):
        return []
    faults = []
    for name, reward in run.reward.named.items():
        is_scored = reward.scores_source(sample.trajectory.data_source, sample.trajectory.source)
        if reward.function is None or reward.router or not is_scored:
            continue
        loaded = load_checked(name, reward, run.images is not None)
        if loaded.takes_pictures:  # there are none before the run
            continue
        function = FunctionReward(loaded, reward.timeout_s, num_processes=1)
        try:
            async with asyncio.timeout(LIMIT_S):
                difference = await _find_difference(function, sample)
        except TimeoutError:
            difference = ""
        finally:
            await function.close()
        if difference:
            faults.append(f"reward {name}: {difference}")
    return faults


async def _find_difference(function: FunctionReward, sample: RewardSample) -> str:
    truth = sample.trajectory.ground_truth
    for text in _texts_of(truth):
        for form in FORMS:
            completion = form.format(text)
            as_number = await _score(function, sample, completion, truth)
            as_text = await _score(function, sample, completion, text)
            if as_text is not None and (as_number is None or as_text > as_number):
                number = "no score" if as_number is None else f"{as_number:g}"
                return (
                    f"the ground truth is a number ({truth!r}, {type(truth).__name__}), and the completion "
                    f"{completion!r} gets {number}; with the text {text!r} as ground truth it gets "
                    f"{as_text:g}. The function compares it with text: use str(ground_truth) there, or write "
                    "the ground truths of the data as text."
                )
    return ""


def _texts_of(truth: bool | int | float) -> Iterator[str]:
    """The texts that a user may mean by a number."""
    yield str(truth)
    if isinstance(truth, bool):
        yield str(truth).lower()
    elif isinstance(truth, float) and truth.is_integer():
        yield str(int(truth))


async def _score(function: FunctionReward, sample: RewardSample, completion: str, truth: Any) -> float | None:
    trajectory = sample.trajectory.model_copy(update={"text": completion, "ground_truth": truth})
    try:
        outcome = await function.score(replace(sample, trajectory=trajectory))
    except AttemptError:
        return None
    return outcome.value
