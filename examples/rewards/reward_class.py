"""A class: made once in each process, so a client or a model is loaded once and kept.

`post_process_scores` gets the scores of a training group when all of them are there, and gives new ones.
"""


class RewardAgent:
    def __init__(self, target_words=100):
        self.target_words = target_words

    def compute_score(self, data_source, solution_str, ground_truth, extra_info=None):
        distance = abs(len(solution_str.split()) - self.target_words)
        return max(0.0, 1.0 - distance / self.target_words), solution_str, f"{distance} words off"

    def post_process_scores(self, scores):
        best = max(scores)
        return [score / best if best else 0.0 for score in scores]
