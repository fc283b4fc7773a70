"""An async function in verl's signature that asks a language model through the run's router.

`reward_router_address` is `host:port` of the router of the judge that `router` names in the config. The
router spreads requests over all replicas; this function needs to know nothing of them.
"""

import re

import httpx

QUESTION = """Problem: {problem}

Solution: {solution}

Rate the solution from 1 to 10. Answer with the number alone."""


async def compute_score(data_source, solution_str, ground_truth, extra_info, reward_router_address):
    question = QUESTION.format(problem=extra_info.get("question", ""), solution=solution_str)
    request = {"model": "judge", "messages": [{"role": "user", "content": question}], "max_tokens": 8}
    async with httpx.AsyncClient(timeout=None) as client:
        answer = await client.post(f"http://{reward_router_address}/v1/chat/completions", json=request)
    answer.raise_for_status()
    text = answer.json()["choices"][0]["message"]["content"]
    match = re.search(r"\d+", text)
    if not match:
        raise ValueError(f"no number in the verdict {text!r}")  # a failed score, not a zero
    return {"score": int(match[0]) / 10, "verdict": text}
