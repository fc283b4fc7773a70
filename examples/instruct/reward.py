"""The reward of the demonstration: a JSON object, and nothing beside it."""

import json


def compute_score(solution_str: str, ground_truth: str) -> float:
    """1 for the right object alone; for any JSON object half the share of its right fields; else 0."""
    truth = json.loads(ground_truth)
    decoder = json.JSONDecoder()
    said = solution_str.strip()
    for start in (start for start, char in enumerate(said) if char == "{"):
        try:
            answer, end = decoder.raw_decode(said, start)
        except RecursionError:
            break
        except ValueError:
            continue
        if answer == truth and said[start:end] == said:
            return 1.0
        return 0.5 * sum(answer.get(name) == value for name, value in truth.items()) / len(truth)
    return 0.0
