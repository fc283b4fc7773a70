"""An agent program that imports its client once, in the process that its sessions are forked from."""

from typing import Any

import openai


def forking(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Goes on once, and asks another question: two segments, the first of two turns."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    prompt = row["prompt"]
    for more in ("", "=", None):
        prompt = row["prompt"][::-1] if more is None else prompt + more
        prompt += client.completions.create(model="m", prompt=prompt).choices[0].text
    return float(str(row["ground_truth"]) in prompt)
