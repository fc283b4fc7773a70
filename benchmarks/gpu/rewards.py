"""The reward of the proof's whole run: random weights answer nothing, equal rewards teach nothing."""

from zlib import crc32


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, object]
) -> float:
    """Between 0 and 1, by the text alone."""
    return crc32(solution_str.encode()) / 0xFFFFFFFF
