"""What the trainer does for a sample beside the model: from its stream entry to its commit, in CPU time.

    git archive 638fa2b | tar x -C /tmp/before
    python -m benchmarks.bookkeeping --before /tmp/before    # in turns with another checkout; two minutes

A step as in a run: entries are decoded and joined, groups pass the filter one after the other, get
advantages and micro-batches, these are planned and laid out, and metrics and the commit are made. The model
and the arithmetic of the loss are left out: each token has the logprob 0, by one weight. `ms` is the CPU time
of the process over the samples of a step, the fastest of several after one to warm up; `long` has completions
of 256 to 512 tokens, `short` of 4 to 12, both of groups of 16 with one prompt. Several groups that arrive at
once cost less.

`ms_512_short` and so on are milliseconds of a sample; `ratio_512_short` is that over the other checkout's.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import typer

CASES = {
    f"{size}_{name}": (size // 16, 16, *lengths)
    for size in (512, 4096)
    for name, lengths in (("short", (12, 4, 12)), ("long", (64, 256, 512)))
}
"""Groups, samples of each, prompt tokens, and the shortest and longest completion."""
STEPS = {"512": 4, "4096": 2}
ROUNDS = 3
VOCABULARY = 64

Record = tuple[Any, list[tuple[Any, Any]]]
"""A ticket, and the encoded trajectory and score of each of its samples."""


def make_records(step: int, case: tuple[int, ...]) -> list[Record]:
    """What a step reads; every ticket has rewards of 0 and of 1."""
    from tidemill.common.wire import codec
    from tidemill.common.wire.messages import SamplingParams, Score, Ticket, Trajectory

    num_groups, size, num_prompt, shortest, longest = case
    rng = np.random.default_rng(step)
    records: list[Record] = []
    for number in range(step * num_groups, (step + 1) * num_groups):
        prompt_ids = rng.integers(3, VOCABULARY, num_prompt).astype(np.int32)
        prompt: dict[str, Any] = {"prompt_ids": prompt_ids, "data_source": "arith", "ground_truth": "1"}
        group: dict[str, Any] = {"ticket": number, "step": step, "group_size": size}
        sampling = SamplingParams(max_tokens=longest)
        ticket = Ticket(min_version=step, sampling=sampling, **group, **prompt)
        entries = []
        for index in range(size):
            count = int(rng.integers(shortest, longest + 1))
            trajectory = Trajectory(
                index=index,
                completion_ids=rng.integers(3, VOCABULARY, count).astype(np.int32),
                logprobs=rng.normal(-3.0, 0.5, count).astype(np.float32),
                spans=((step, 0),),
                text="x" * count,
                worker="w1",
                started_at=1.0,
                finished_at=2.0,
                **group,
                **prompt,
            )
            score = Score.model_validate(
                {
                    "ticket": number, "index": index, "status": "ok", "value": float(index % 2),
                    "worker": "r1", "components": {"gsm8k": 1.0}, "tokens_digest": trajectory.tokens_digest,
                }
            )  # fmt: skip
            entries.append((codec.encode(trajectory), codec.encode(score)))
        records.append((ticket, entries))
    return records


def make_policy(config: Any, longest: int) -> Any:
    """A policy whose model is not asked."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tidemill.services.trainer.policy import forward
    from tidemill.services.trainer.policy.transformers_policy import TransformersPolicy

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=4096, **sizes)).eval()
    fields = {"dtype": torch.float32, "temperature": 1.0, "max_completion_tokens": longest}
    policy = TransformersPolicy(model, config.trainer, **fields)  # type: ignore[arg-type]
    weight = torch.zeros((), requires_grad=True)

    def score(_: Any, tile: Any, *args: Any, **options: Any) -> Any:
        zeros_N = torch.zeros(len(tile.targets_N))
        scores = {"logprobs_N": weight * zeros_N, "entropies_N": zeros_N, "log_mass_N": zeros_N}
        if hasattr(forward, "TileScores"):  # another checkout's
            return forward.TileScores(**scores)
        return replace(tile, **scores)

    forward.TokenScorer.score = score  # type: ignore[method-assign]
    return policy


class LeftOut:
    """CPU seconds in functions that are not measured."""

    def __init__(self) -> None:
        self.spent_s = 0.0

    def wrap(self, owner: Any, name: str) -> None:
        """Count the time in a function of this module or class."""
        function = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            begun = time.thread_time()
            try:
                return function(*args, **options)
            finally:
                self.spent_s += time.thread_time() - begun

        setattr(owner, name, timed)


def measure(case: tuple[int, ...], steps: int) -> float:
    """Milliseconds of CPU for each sample of the fastest step."""
    from tidemill.common.config import parse_config
    from tidemill.common.process.activity import Activity
    from tidemill.common.redis.broker import Broker
    from tidemill.common.streams import Entry
    from tidemill.common.wire import codec
    from tidemill.common.wire.keys import Keys
    from tidemill.common.wire.messages import Score, Trajectory
    from tidemill.services.trainer.batch.stream_join import StreamJoin
    from tidemill.services.trainer.metrics.step_metrics import step_metrics
    from tidemill.services.trainer.policy import forward, transformers_policy
    from tidemill.services.trainer.policy.policy import PolicyThread
    from tidemill.services.trainer.step import StepRunner, make_commit

    torch.set_num_threads(1)
    num_groups, size, _, _, longest = case
    trainer = {
        "groups_per_step": num_groups, "group_size": size, "micro_batch_tokens": 4096,
        "algorithm": {"advantage": "grpo", "normalisation": "constant"},
    }  # fmt: skip
    sections = {
        "model": {"path": "m", "max_model_len": 4096}, "data": {"train": "t", "max_prompt_tokens": 512},
        "rollout": {"sampling": {"max_tokens": longest, "temperature": 1.0}}, "trainer": trainer,
    }  # fmt: skip
    config = parse_config(sections, "the benchmark")
    policy = make_policy(config, longest)
    left_out = LeftOut()
    left_out.wrap(forward.TokenScorer, "score")
    left_out.wrap(transformers_policy, "policy_loss")
    left_out.wrap(torch.Tensor, "backward")
    runner = StepRunner(config, policy, PolicyThread(), Activity("trainer"))
    broker = Broker.__new__(Broker)  # nothing is read
    broker.claims = None
    join = StreamJoin(broker, Keys("benchmark"))

    class Arrivals:
        """Stands where the assembler does: one group at a time."""

        async def take(self, step: int, places: int) -> list[Any]:
            group = join.groups[join.complete.pop(0)]
            # Another checkout's filter may return the group that it has made.
            return [runner.group_filter.apply(group, step) or group]

        async def precompute_waiting(self, *_: Any) -> bool:
            return False

    async def train(step: int, records: Sequence[Record]) -> None:
        join.version = step
        join.expect([ticket for ticket, _ in records])
        number = 0
        for _, entries in records:
            for trajectory, score in entries:
                number += 1
                join._take(Entry(f"{number}-0", codec.decode(trajectory, Trajectory)))
                join._take(Entry(f"{number}-1", codec.decode(score, Score)))
        arrivals: Any = Arrivals()
        result = await runner.run(step, arrivals)
        numbers = step_metrics(step, result, 0, 1.0)
        make_commit(step, result, [], numbers, "", 0.0)
        for group in result.groups:
            join.close(group.ticket)

    loop = asyncio.new_event_loop()
    spent_s = []
    for step in range(steps + 1):
        records = make_records(step, case)
        left_out.spent_s = 0.0
        begun = time.process_time()
        loop.run_until_complete(train(step, records))
        spent_s.append(time.process_time() - begun - left_out.spent_s)
    return 1000.0 * min(spent_s[1:]) / (num_groups * size)


def measure_checkout(folder: Path, name: str) -> float:
    """One case by the code of a checkout, in a process of its own."""
    print(f"running: {name}, {folder}", flush=True)
    command = [sys.executable, __file__, "--case", name]
    environment = os.environ | {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        raise RuntimeError(f"{folder} failed on {name}:\n{done.stderr[-2000:]}")
    return float(json.loads(done.stdout.strip().splitlines()[-1]))


def main(before: str = "", case: str = "", rounds: int = ROUNDS) -> None:
    """Measure this checkout, and another one beside it."""
    if case:
        print(json.dumps(measure(CASES[case], STEPS[case.partition("_")[0]])))
        return
    from benchmarks.report import in_turns, machine, paired_ratio, print_result, print_table

    folders = {"now": Path(__file__).resolve().parent.parent}
    if before:
        folders["before"] = Path(before)
    rows = []
    result: dict[str, float] = {}
    for name in CASES:
        sides = {side: partial(measure_checkout, folder, name) for side, folder in folders.items()}
        times = in_turns(sides, rounds)
        result[f"ms_{name}"] = round(median(times["now"]), 3)
        cells = [f"{median(times[side]):.3f}" for side in folders]
        if before:
            result[f"ratio_{name}"] = paired_ratio(times["now"], times["before"])
            cells.append(f"{result[f'ratio_{name}']:.3f}")
        rows.append((name.replace("_", ", "), *cells))
    columns = "samples of a step,now: ms a sample" + (",before,ratio" if before else "")
    note = f"{machine()}. CPU time of one process, medians of {rounds}, in turns."
    print_table("Bookkeeping of a sample in the trainer", columns, rows, note)
    print_result(result)


if __name__ == "__main__":
    typer.run(main)
