"""Which models fit on which GPUs, and with what settings: the last part of docs/operations/sizing.md.

It is what `tidemill check --memory` computes, of the configurations beside the page.
"""

from collections.abc import Iterator
from pathlib import Path

from tidemill.common.config import RunConfig
from tidemill.services.console.check.memory import GIB, as_overrides
from tidemill.services.trainer.policy.memory.advice import Fit, Machine, find_settings
from tidemill.services.trainer.policy.memory.sizes import read_model

HEADING = "## Which models fit"
MODELS = Path(__file__).parents[2] / "docs/operations/models"
MAX_MODEL_LEN = 8192
NUMBERS = (1, 8)
"""Numbers of GPUs."""
GIB_EACH = 80
"""Memory of a GPU."""
SHORT = {
    "trainer.num_ranks": "num_ranks",
    "trainer.context_ranks": "context_ranks",
    "trainer.expert_ranks": "expert_ranks",
    "trainer.offload_optimizer": "offload_optimizer",
    "trainer.lora": "lora",
    "trainer.gradient_checkpointing": "gradient_checkpointing",
    "rollout.workers": "workers",
    "rollout.vllm.tensor_parallel_size": "tensor_parallel_size",
    "rollout.vllm.gpu_memory_utilization": "gpu_memory_utilization",
}

PREAMBLE = f"""{HEADING}

GPUs with {GIB_EACH} GiB, half or more for the trainer; bfloat16, {MAX_MODEL_LEN:,} tokens, no reference
model, hosts of 8 GPUs. GiB of a trainer's GPU and of the fullest host at the peak; "sequences" fit into the
KV cache of one engine. Where it does not fit, the largest part is named. Generated from `models/`.

| model | GPUs | fits | settings | trainer needs | sequences | host |
|---|---|---|---|---|---|---|
"""


def as_markdown() -> str:
    """Heading and table."""
    lines = []
    for path in sorted(MODELS.glob("*/config.json"), key=lambda path: path.parent.name):
        tree = {"path": str(path.parent), "dtype": "bfloat16", "max_model_len": MAX_MODEL_LEN}
        config = RunConfig.model_validate({"model": tree, "data": {"train": "rows.jsonl"}})
        sizes = read_model(config)
        for gpus in NUMBERS:
            fit = find_settings(config, sizes, Machine(gpus, GIB_EACH * GIB))
            lines.append("| " + " | ".join(_cells(path.parent.name, gpus, fit)) + " |")
    return PREAMBLE + "\n".join(lines) + "\n"


def _cells(name: str, gpus: int, fit: Fit) -> Iterator[str]:
    assert fit.trainer is not None and fit.engine is not None
    yield from (name, str(gpus))
    if fit.problems:
        largest, value = max(fit.trainer.parts.items(), key=lambda item: item[1])
        yield from ("no", f"{largest}: {value / GIB:.0f}", f"{fit.trainer.peak / GIB:.0f}", "", "")
        return
    settings = {SHORT[field]: value for field, value in fit.settings.items() if field in SHORT}
    yield "with LoRA" if "lora" in settings else "yes"
    yield f"`{as_overrides(settings)}`" if settings else "defaults"
    yield f"{fit.trainer.peak / GIB:.0f}"
    yield f"{fit.engine.num_sequences:,}"
    yield f"{fit.host.peak / GIB:.0f}"
