"""A group function (`reward.group`): sees all samples of a group, and may replace rewards that failed.

Here the shorter of two samples with the same reward ranks higher, and a failed one ranks last.
"""


def rank_by_score_then_length(scores, samples):
    def place(index):
        score = scores[index]
        return (score is not None, score or 0.0, -len(samples[index]["solution_str"]))

    order = sorted(range(len(scores)), key=place)
    ranks = {index: rank for rank, index in enumerate(order)}
    return [ranks[index] / max(len(scores) - 1, 1) for index in range(len(scores))]
