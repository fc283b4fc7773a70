"""An async reward in TRL's signature: all samples of a call wait at the same time.

With `per: group` a call has all completions of a prompt; with `per: sample`, the default, it has one.
"""

import asyncio


async def brevity_reward(prompts, completions, completion_ids, log_metric=None, **kwargs):
    async def score(ids):
        await asyncio.sleep(0)  # ask a server here
        return 1.0 / (1 + len(ids))

    rewards = await asyncio.gather(*(score(ids) for ids in completion_ids))
    if log_metric:
        log_metric("shortest", min(len(ids) for ids in completion_ids))
    return list(rewards)
