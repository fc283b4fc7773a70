"""`python -m tests.support.vllm_picture_sessions FAMILY FOLDER`: sessions that show pictures, with vLLM.

A process of its own, as vllm_pictures.py is. Prints as a line of JSON, by session, the largest difference of
a logprob to a plain pass of transformers in float64, and how many turns and later pictures there were.
"""

import asyncio
from pathlib import Path
from typing import Any

from tests.support.vllm_machine import print_measured, vllm_config


async def measure(family: str, folder: Path) -> dict[str, Any]:
    import numpy as np
    import pytest
    import torch

    from tests.support.picture_environments import THIS
    from tests.support.picture_samples import IMAGES, compute_in_float64
    from tests.support.picture_sessions import Stage, trajectory_of
    from tests.support.vision import png_of
    from tidemill.services.rollout.engines.vllm import VllmEngine
    from tidemill.services.trainer.groups.sample import make_sample

    # A pass in float32 is off by up to 1e-5 itself: two of them by more from each other.
    compute_in_float64(pytest.MonkeyPatch())
    stage = Stage(folder, family, use=f"{THIS}:Gallery")
    config = vllm_config(stage.folder, 400, max_num_seqs=16)
    images = IMAGES.model_dump(exclude_unset=True)
    config = type(config).model_validate(config.model_dump(exclude_unset=True) | {"images": images})
    tickets = [
        # Of a group: the prompt's pictures and the first that is shown are the same.
        *[stage.ticket([png_of(0), png_of(1, 40, 100)])] * 3,
        stage.ticket([], truth="2", ticket=2),
        stage.ticket([png_of(5)], truth="1", ticket=3),
    ]
    engine = VllmEngine(config, "w")
    await engine.start()
    try:
        async with stage.player() as player:
            played = await asyncio.gather(
                *(
                    player.play(ticket, f"s{i}", stage.asking(player, engine, f"s{i}"))
                    for i, ticket in enumerate(tickets)
                )
            )
    finally:
        await engine.close()
    answer: dict[str, Any] = {"gaps": [], "later_pictures": [], "turns": [], "banned": 0}
    model = stage.maker.plain_model()
    for index, (ticket, of_ticket) in enumerate(zip(tickets, played, strict=True)):
        trajectory = trajectory_of(ticket, of_ticket, index % 4)
        assert trajectory.session is not None
        sample = make_sample(trajectory)
        with torch.no_grad():
            plain = stage.maker.plain_logprobs(model, sample).numpy()
        rollout = sample.columns["rollout_logprobs"]
        sampled = sample.completion_ids[sample.mask]
        answer["gaps"].append(float(np.abs(plain - rollout)[sample.mask].max()))
        answer["later_pictures"].append(len(trajectory.images) - len(ticket.images))
        answer["turns"].append(len(trajectory.session.turns))
        answer["banned"] += len(set(sampled.tolist()) & set(stage.maker.processor.banned_ids))
    return answer


# vLLM's processes import this file again.
if __name__ == "__main__":
    print_measured(measure)
