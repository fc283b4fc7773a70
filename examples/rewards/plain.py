"""A plain function: completions near a wanted length. Runs in a process of its own, so it may compute."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, target_words=100):
    num_words = len(solution_str.split())
    return max(0.0, 1.0 - abs(num_words - target_words) / target_words)
