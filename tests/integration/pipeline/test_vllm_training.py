"""A run trained with the real vLLM engine: after every update, engine and trainer agree on logprobs.

Weights are replaced in flight, while requests run. Nothing is taken from what the services report: the
test loads every version's weights file and recomputes the logprobs of the tokens the engine produced.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.support.preloaded import REPO
from tests.support.runs import ServiceRun
from tests.support.vllm_machine import need_vllm
from tidemill.common.config import RunConfig, load_config
from tidemill.common.streams import Entry, read_range
from tidemill.common.wire.messages import Commit, Lane, Trajectory

need_vllm()

STEPS = 5
MAX_GAP = 1e-3


def _config() -> RunConfig:
    return load_config(
        REPO / "examples/arith/config.yaml",
        [
            "rollout.engine=vllm",
            "rollout.max_num_seqs=64",
            f"trainer.steps={STEPS}",
            "trainer.groups_per_step=16",
            "trainer.group_size=8",
            "trainer.keep_weights=100",
            "trainer.loggers=[]",
            "trainer.evaluation.every=1",
            "trainer.evaluation.temperature=1.0",
            "trainer.evaluation.max_prompts=16",
            "rollout.max_groups_in_flight=8",
            "streams.trim=false",
            "expect.eval_gain=null",
        ],
    )


async def test_engine_and_trainer_agree_after_every_in_flight_update(tmp_path: Path) -> None:
    """Max difference 1e-3 in fp32, for every version, over every trajectory of one version."""
    async with ServiceRun(tmp_path, _config(), is_forked=False) as run:
        run.start_all()
        assert await run.wait("trainer", 500) == 0
        assert await run.stop("rollout") == 0
        commits = await read_range(run.broker, run.keys.commits, Commit)
        entries = await read_range(run.broker, run.keys.trajectories(), Trajectory)
        entries += await read_range(run.broker, run.keys.trajectories(Lane.EVAL), Trajectory)

    samples = [entry.message for entry in entries if isinstance(entry, Entry)]
    assert len(commits) == STEPS
    gaps = _largest_gaps(run.run_dir, samples)
    assert set(gaps) == set(range(STEPS + 1)), "every version is evaluated, so every version has trajectories"
    assert max(gaps.values()) < MAX_GAP, gaps
    staleness = [entry.message.metrics["staleness/max"] for entry in commits if isinstance(entry, Entry)]
    assert max(staleness) == 1.0


def _largest_gaps(run_dir: Path, samples: list[Trajectory]) -> dict[int, float]:
    """Per version, the largest |engine - trainer| logprob over trajectories that it alone produced."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(REPO / "examples/arith/model").eval()
    gaps: dict[int, float] = {}
    whole = [sample for sample in samples if len(sample.spans) == 1]
    for version in sorted({sample.spans[0][0] for sample in whole}):
        weights = load_file(run_dir / "weights" / f"v{version:08d}" / "model.safetensors")
        model.load_state_dict(weights, strict=False)
        model.tie_weights()
        gaps[version] = max(_gap(model, sample) for sample in whole if sample.spans[0][0] == version)
    return gaps


@torch.no_grad()
def _gap(model: torch.nn.Module, sample: Trajectory) -> float:
    ids_T = torch.tensor([*sample.prompt_ids.tolist(), *sample.completion_ids.tolist()])
    logprobs_TV = model(ids_T[None]).logits[0].float().log_softmax(-1)
    first = len(sample.prompt_ids)
    picked_T = logprobs_TV[first - 1 : -1].gather(1, ids_T[first:, None])[:, 0]
    return float((picked_T - torch.tensor(sample.logprobs.copy())).abs().max())
