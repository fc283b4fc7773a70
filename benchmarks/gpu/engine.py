"""vLLM with a trainer's weights: tokens/s, pauses and bytes of updates, logprobs beside the trainer's.

    python -m benchmarks.gpu.engine 4b [--tensor-parallel 2] [--option kv_cache_dtype=fp8] [--dry]

One after the other, so that each has the device for itself: the trainer's policy loads the model, changes its
weights and writes version 1 in full and version 2 as a delta, through the run's own store. The engine starts,
generates, and takes both versions while requests run. Then the policy is loaded again, changed in the same
way (its digests say so), and scores what the engine has generated.

`over_copy_ms` is a pause without the time in which as many bytes go from host memory to the device. `gap` is
the mean |engine - trainer| of a token in nats; `gap_other_version`, with the weights of version 1 for the
tokens of version 2, is what it would be if the update had not arrived.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
import yaml

from benchmarks.device import free, is_gpu, now_s
from benchmarks.gpu.parts import DID_NOT_START
from benchmarks.gpu.shapes import make_model, shape_of
from benchmarks.report import print_figures
from tests.support.models import logprobs_of, run_config
from tests.support.samples import sample_of
from tidemill.common.config import RunConfig
from tidemill.common.config.weights import WeightsConfig
from tidemill.common.errors import ConfigError, TidemillError
from tidemill.common.process.programs import run_main
from tidemill.common.run.weight_files import verified_files
from tidemill.common.wire.messages import SamplingParams, WeightManifest
from tidemill.services.rollout.engines import build_engine
from tidemill.services.rollout.engines.engine import Engine, Generation, GenerationRequest
from tidemill.services.trainer.policy.transformers_policy import TransformersPolicy, load_policy
from tidemill.services.trainer.weights.store import WeightStore

GB = 1e9
DELTA_SHARE = 0.01
CHUNK = 1 << 24
FULL = 1
DELTA = 2
"""Numbers of the two versions."""


class Load(NamedTuple):
    """Requests to the engine: their number, the tokens of a prompt and of a completion, and of how many
    requests logprobs are compared."""

    requests: int = 256
    prompt: int = 256
    completion: int = 512
    compared: int = 32


TINY_LOAD = Load(requests=8, prompt=8, completion=48, compared=4)


def config_of(folder: Path, load: Load, vllm: dict[str, Any]) -> RunConfig:
    """A run's config around the model in `folder`."""
    return run_config(
        folder,
        model={"dtype": "bfloat16", "max_model_len": load.prompt + load.completion + 8},
        data={"max_prompt_tokens": load.prompt},
        rollout={
            "engine": "vllm",
            "sampling": {"max_tokens": load.completion},
            "max_num_seqs": load.requests,
            "vllm": {"gpu_memory_utilization": 0.8, **vllm},
        },
    )


@torch.no_grad()
def change(policy: TransformersPolicy, share: float, seed: int) -> None:
    """Scale about `share` of all weights by 0.5 to 1.5; the same ones each time."""
    generator = torch.Generator(policy._parameters[0][1].device).manual_seed(seed)
    for _, parameter in policy._parameters:
        for values in parameter.data.view(-1).split(CHUNK):
            drawn = torch.rand(2, len(values), generator=generator, device=values.device)
            values *= torch.where(drawn[0] < share, 0.5 + drawn[1], 1.0)


NAMES = {FULL: "full", DELTA: "delta"}
CHANGES = {FULL: (1.0, 1), DELTA: (DELTA_SHARE, 2)}


def write_versions(config: RunConfig, run_dir: Path) -> tuple[dict[int, WeightManifest], dict[str, Any]]:
    """Both versions on the disk, and what they cost the trainer."""
    policy = load_policy(config)
    store = WeightStore(run_dir, WeightsConfig())
    manifests = {}
    figures = {}
    for version, name in NAMES.items():
        change(policy, *CHANGES[version])
        started = now_s()
        state = policy.compare_weights()
        compared = now_s()
        manifests[version] = store.finish(store.begin(version, policy, state))
        figures[f"{name}_compare_s"] = compared - started
        figures[f"{name}_write_s"] = now_s() - compared
        figures[f"{name}_gb"] = manifests[version].num_bytes / GB
    assert manifests[DELTA].is_delta and not manifests[FULL].is_delta
    figures["delta_of_full"] = figures["delta_gb"] / figures["full_gb"]
    return manifests, figures


class Served:
    """An engine under load, and the figures measured on it."""

    def __init__(self, engine: Engine, load: Load, vocab_size: int) -> None:
        self.engine = engine
        self.load = load
        self.vocab_size = vocab_size
        self.figures: dict[str, Any] = {}

    def requests(self, name: str, count: int) -> list[GenerationRequest]:
        rng = np.random.default_rng(len(name))
        prompts = rng.integers(3, self.vocab_size, (count, self.load.prompt)).tolist()
        params = SamplingParams(max_tokens=self.load.completion)
        return [GenerationRequest(f"{name}{i}", prompt, params) for i, prompt in enumerate(prompts)]

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        return list(await asyncio.gather(*(self.engine.generate(request) for request in requests)))

    async def measure_speed(self) -> None:
        """Completion tokens a second with as many requests as fit at once."""
        await self.generate(self.requests("warm", self.load.requests // 4))
        started = now_s()
        results = await self.generate(self.requests("speed", self.load.requests))
        self.figures["tokens_per_s"] = sum(len(result.token_ids) for result in results) / (now_s() - started)

    async def update(self, name: str, version: int, files: list[Path], digest: str) -> None:
        """Load a version while requests run; its pause, and how many requests have tokens of both."""
        running = asyncio.create_task(self.generate(self.requests(name, self.load.requests)))
        first = self.requests("first", 1)[0]
        await self.engine.generate(GenerationRequest(name, first.prompt_ids, SamplingParams(max_tokens=1)))
        is_full = version == FULL
        whole = files if is_full else []
        deltas = [] if is_full else [files]
        done = await self.engine.load(version, whole, deltas, digest)
        self.figures[f"{name}_load_s"] = done.load_s
        self.figures[f"{name}_pause_ms"] = done.paused_s * 1e3
        results = await running
        self.figures[f"{name}_requests_with_both_versions"] = sum(len(result.spans) > 1 for result in results)


async def serve(
    config: RunConfig, load: Load, run_dir: Path, manifests: dict[int, WeightManifest], vocab_size: int
) -> tuple[dict[str, Any], list[tuple[GenerationRequest, Generation]]]:
    """The engine's figures, and what it generated with version 2.

    Raises:
        ConfigError: the engine refuses this model or these options.
    """
    engine = build_engine(config, "proof")
    started = now_s()
    await engine.start()
    served = Served(engine, load, vocab_size)
    try:
        served.figures["start_s"] = now_s() - started
        await served.measure_speed()
        for version, name in NAMES.items():
            files = verified_files(run_dir, manifests[version])
            await served.update(name, version, files, manifests[version].digest)
        requests = served.requests("compared", load.compared)
        results = await served.generate(requests)
    finally:
        await engine.close()
    assert {result.spans for result in results} == {((DELTA, 0),)}, "a token of another version"
    return served.figures, list(zip(requests, results, strict=True))


def compare(
    config: RunConfig,
    manifests: dict[int, WeightManifest],
    pairs: Sequence[tuple[GenerationRequest, Generation]],
) -> dict[str, Any]:
    """|engine - trainer| of the tokens, with the weights of version 2 and with those of version 1."""
    policy = load_policy(config)
    samples = [
        sample_of((0, 0), request.prompt_ids, generation.token_ids, generation.logprobs)
        for request, generation in pairs
    ]
    gaps = {}
    for version in (FULL, DELTA):
        change(policy, *CHANGES[version])
        if policy.compare_weights().digest != manifests[version].digest:
            raise RuntimeError(f"the weights of version {version} cannot be made again: other random numbers")
        scored = zip(logprobs_of(policy, samples), samples, strict=True)
        gaps[version] = np.concatenate([np.abs(mine - sample.rollout_logprobs) for mine, sample in scored])
    gap_figures = {
        "gap": gaps[DELTA].mean(),
        "gap_max": gaps[DELTA].max(),
        "gap_other_version": gaps[FULL].mean(),
    }
    return {name: float(value) for name, value in gap_figures.items()}


def copy_gb_per_s(num_bytes: int) -> float:
    """Speed of copies from host memory, page-locked where there is a GPU, to the device."""
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_gpu())
    target = torch.empty_like(source, device="cuda" if is_gpu() else "cpu")
    times = [now_s()]
    for _ in range(5):
        target.copy_(source)
        times.append(now_s())
    return num_bytes / GB / median(np.diff(times))


async def measure(name: str, dry: bool, vllm: dict[str, Any], may_refuse: bool) -> dict[str, Any]:
    """All figures of a model; with `may_refuse` the engine's refusal is one too."""
    load = TINY_LOAD if dry else Load()
    shape = shape_of(name, dry)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        run_dir = Path(folder) / "run"
        make_model(shape, model)
        config = config_of(model, load, vllm)
        manifests, figures = write_versions(config, run_dir)
        free()
        figures["copy_gb_per_s"] = copy_gb_per_s((64 if dry else 1024) << 20)
        free()
        try:
            served, pairs = await serve(config, load, run_dir, manifests, shape.vocab_size)
        except TidemillError as error:
            if not may_refuse:
                raise
            key = "refused" if isinstance(error, ConfigError) else DID_NOT_START
            return {key: " ".join(str(error).split())[:400]}
        figures |= served
        for kind in NAMES.values():
            copy_ms = 1e3 * figures[f"{kind}_gb"] / figures["copy_gb_per_s"]
            figures[f"{kind}_pause_over_copy_ms"] = figures[f"{kind}_pause_ms"] - copy_ms
        return figures | compare(config, manifests, pairs)


def main(
    name: str,
    tensor_parallel: int = 1,
    option: Annotated[list[str] | None, typer.Option(help="NAME=VALUE of vLLM's own")] = None,
    may_refuse: bool = False,
    dry: bool = False,
) -> None:
    """Measure a model: 0.6b, 4b, 8b or moe, or with --dry a tiny one of its kind."""
    extra = {}
    for text in option or []:
        setting, _, value = text.partition("=")
        extra[setting] = yaml.safe_load(value)
    vllm = {"tensor_parallel_size": tensor_parallel, "enforce_eager": dry, "extra": extra}
    print_figures(f"vLLM, {name}", run_main(measure(name, dry, vllm, may_refuse)))


if __name__ == "__main__":
    typer.run(main)
