"""A dict: the reward is `score`; other numbers become metrics, other values are kept with the sample."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, format_weight=0.2):
    match = re.search(r"<answer>(.*?)</answer>", solution_str, re.DOTALL)
    answer = match[1].strip() if match else ""
    is_correct = answer == str(ground_truth).strip()
    return {
        "score": (1 - format_weight) * is_correct + format_weight * bool(match),
        "correct": is_correct,
        "format": bool(match),
        "answer": answer,
    }
