"""An async function: asks a server that answers `{"score": <number>}`.

The service bounds how many calls run at once (`reward.max_in_flight`), how long one may take
(`reward.timeout_s`), and repeats what fails (`reward.max_attempts`): none of that belongs here. What it
raises becomes a failed score with the reason, never a zero.
"""

import functools
import os

import httpx

SERVER_VARIABLE = "REWARD_SERVER_URL"


@functools.cache
def client() -> httpx.AsyncClient:
    # Made once, at the first call: its connections are used again. No limits of its own on time and
    # connections, because the service has them already.
    return httpx.AsyncClient(base_url=os.environ[SERVER_VARIABLE], timeout=None, limits=httpx.Limits())


async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    request = {"solution": solution_str, "ground_truth": ground_truth}
    answer = await client().post("/score", json=request)
    answer.raise_for_status()
    return answer.json()["score"]
