"""`python -m tests.support.vllm_pictures FAMILY FOLDER`: one real vLLM engine with a small model that sees.

A process of its own, because torchvision has to be on its path before transformers is imported, and must not
be on that of others. Prints what was measured as a line of JSON: the largest difference of a logprob to a
plain pass of transformers in float64, by version; version 1 changes all weights, 2 tower and projector, 3 the
text part.
"""

import asyncio
from pathlib import Path
from typing import Any

from tests.support.vllm_machine import print_measured, vllm_config


async def measure(family: str, folder: Path) -> dict[str, Any]:
    import pytest
    import torch

    from examples.small_vision_models import make_vision_model
    from tests.support.picture_samples import compute_in_float64
    from tests.support.pictures import Seeing, mixed_requests, noise_png, write_versions
    from tidemill.services.rollout.engines.vllm import VllmEngine

    # A pass in float32 is off by up to 1e-5 itself: two of them by more from each other.
    compute_in_float64(pytest.MonkeyPatch())
    seeing = Seeing.of(make_vision_model(folder / "model", family), family)
    chain, folders = write_versions(seeing, folder / "run")
    config = vllm_config(seeing.folder, 256, max_num_seqs=16)
    config = type(config).model_validate(config.model_dump(exclude_unset=True) | {"images": {}})
    engine = VllmEngine(config, "w")
    await engine.start()
    answer: dict[str, Any] = {"gaps": [], "spans": [], "cached": 0, "banned": 0}
    try:
        for version in range(4):
            if version:
                files = chain.paths(0) if version == 1 else []
                digest = chain.manifests[version].digest
                await engine.load(version, files, [chain.paths(version)], digest)
            # Always the same pictures: what an older tower made of them would be noticed.
            requests = mixed_requests(seeing)
            results = await asyncio.gather(*(engine.generate(request) for request in requests))
            # The same prompts once more, from the prefix cache.
            results += await asyncio.gather(*(engine.generate(request) for request in requests[:2]))
            requests += requests[:2]
            model = folders[version].model(torch.float64)
            gap = 0.0
            for request, result in zip(requests, results, strict=True):
                expected = seeing.expected(model, request, result)
                pairs = zip(expected, result.logprobs, strict=True)
                gap = max(gap, *(abs(first - second) for first, second in pairs))
                answer["banned"] += len(set(result.token_ids) & set(seeing.processor.banned_ids))
            answer["gaps"].append(gap)
            answer["spans"].append(sorted({result.spans for result in results}))
            answer["patchable"] = engine.can_patch
        # An update while requests with pictures wait and run.
        long = [
            seeing.request(f"long{i}", "* and *", [noise_png(i), noise_png(1)], max_tokens=64)
            for i in range(24)
        ]
        running = [asyncio.create_task(engine.generate(request)) for request in long]
        await asyncio.sleep(0.05)
        await engine.load(4, chain.paths(0), [], chain.manifests[0].digest)
        results = await asyncio.gather(*running)
        gap = 0.0
        models = {3: folders[3].model(torch.float64), 4: folders[0].model(torch.float64)}
        for request, result in zip(long, results, strict=True):
            if len(result.spans) == 1:
                expected = seeing.expected(models[result.spans[0][0]], request, result)
                pairs = zip(expected, result.logprobs, strict=True)
                gap = max(gap, *(abs(first - second) for first, second in pairs))
        answer["gaps"].append(gap)
        answer["versions"] = sorted({span[0] for result in results for span in result.spans})
        # What does not fit is refused before vLLM sees it, and the next request is served.
        from dataclasses import replace

        from tidemill.common.errors import BrokenImageError

        bad = replace(long[0], prompt_ids=[*long[0].prompt_ids, seeing.processor.placeholder_id])
        try:
            await engine.generate(bad)
        except BrokenImageError:
            answer["refused"] = len((await engine.generate(long[1])).token_ids) > 0
    finally:
        await engine.close()
    return answer


# vLLM's processes import this file again.
if __name__ == "__main__":
    print_measured(measure)
