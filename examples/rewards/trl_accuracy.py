"""An accuracy reward in TRL's signature; `solution` is a column of the dataset.

None means that the reward does not apply to a sample: it is left out of the sum.
"""

from math_verify import parse, verify


def accuracy_reward(completions, solution, **kwargs):
    rewards = []
    for completion, wanted in zip(completions, solution, strict=True):
        text = completion if isinstance(completion, str) else completion[0]["content"]
        gold = parse(wanted)
        rewards.append(float(verify(gold, parse(text))) if gold else None)
    return rewards
