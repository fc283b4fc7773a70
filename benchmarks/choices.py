"""What recording and replaying an engine's choices costs: bytes, and throughput of engine and trainer.

    python -m benchmarks.choices    # two minutes on one core; needs no GPU

A small mixture of experts generates samples with top-p, with and without recording of routes and sampling
masks, and is trained on them, with and without replay, in turns. `engine_ratio` and `trainer_ratio` are
tokens a second of one core with over without, medians over pairs; `ratio` is the smaller one. `replay_ms` is
what a step of these samples takes longer on the policy's thread. `route_bytes` and `mask_bytes` are what a
claim holds for a token of these samples; `route_bytes_30b` is a token of a model with 48 layers and 8 experts
each.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from operator import sub
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from benchmarks.report import in_turns, paired_ratio, print_figures
from tests.support.samples import sample_of
from tidemill.common.config.trainer import TrainerConfig
from tidemill.common.run.routers import find_routers
from tidemill.common.wire import codec
from tidemill.common.wire.choices import KEPT, ROUTES
from tidemill.common.wire.messages import ChoiceRows, SamplingParams
from tidemill.services.rollout.engines.decoding import DecodingRow, RouteRecorder, decode_batch
from tidemill.services.rollout.engines.engine import GenerationRequest, StopTexts
from tidemill.services.trainer.groups.bins import form_micro_batches
from tidemill.services.trainer.groups.choices import make_routes, without_choices
from tidemill.services.trainer.groups.sample import Sample
from tidemill.services.trainer.policy.transformers_policy import TransformersPolicy

GROUPS = 4
SIZE = 16
PROMPT = 64
COMPLETION = 48
PAIRS = 11
SAMPLING = SamplingParams(max_tokens=COMPLETION, top_p=0.95)


def make_model() -> MixtralForCausalLM:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=8,
        num_experts_per_tok=2,
        initializer_range=0.1,
        eos_token_id=None,
        tie_word_embeddings=True,
    )
    model = MixtralForCausalLM(config).eval()
    # As sure of its tokens as a trained model: top-p leaves a handful of ids, and not half of them.
    model.model.norm.weight.data.fill_(8.0)
    return model


def generate(model: Any, recorder: RouteRecorder, records: bool) -> list[DecodingRow]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 2048, PROMPT).tolist() for _ in range(GROUPS)]
    rows = list[DecodingRow]()
    never = Future[Any]()
    for number in range(GROUPS * SIZE):
        request = GenerationRequest(str(number), prompts[number // SIZE], SAMPLING)
        rows.append(DecodingRow(request, number, StopTexts((), str), never))
        rows[-1].kept = [] if records else None
    decode_batch(model, rows, frozenset(), recorder)
    return rows


def samples_of(rows: list[DecodingRow]) -> list[Sample]:
    return [
        sample_of(
            divmod(number, SIZE),
            row.request.prompt_ids,
            row.token_ids,
            row.logprobs,
            advantage=float(number % 2) - 0.5,
            routes=(make_routes(row.choices[ROUTES].values),),
            kept=row.choices[KEPT],
        )
        for number, row in enumerate(rows)
    ]


def bytes_of(rows: list[DecodingRow], name: str) -> float:
    """Bytes of a claim for each token that it has a row of."""
    payloads = [
        codec.encode_payload(
            ChoiceRows(ticket=0, index=0, tokens_digest="0" * 16, rows={name: row.choices[name]})
        )
        for row in rows
    ]
    return round(sum(map(len, payloads)) / sum(len(row.choices[name]) for row in rows), 1)


def compare(with_choices: Callable[[], Any], without: Callable[[], Any]) -> tuple[float, float]:
    """Throughput with over without, and how many seconds longer it takes: medians over pairs, in turns."""
    sides = {side: partial(seconds, side) for side in (with_choices, without)}
    in_turns(sides, 1)
    full, plain = in_turns(sides, PAIRS).values()
    return paired_ratio(plain, full), median(map(sub, full, plain))


def seconds(work: Callable[[], Any]) -> float:
    """CPU seconds of this thread, which computes alone: other load on the machine does not count."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def measure() -> dict[str, float]:
    torch.set_num_threads(1)
    model = make_model()
    plain = make_model()
    # The same memory: where weights lie changes a pass by more than all recording costs.
    plain.load_state_dict(model.state_dict(), assign=True)
    recorder = RouteRecorder([router for _, router in find_routers(model)])
    rows = generate(model, recorder, records=True)
    engine_ratio, _ = compare(
        lambda: generate(model, recorder, True), lambda: generate(plain, RouteRecorder(()), False)
    )
    samples = samples_of(rows)
    config = TrainerConfig.model_validate({"micro_batch_tokens": 4096})
    policy = TransformersPolicy(
        make_model(), config, dtype=torch.float32, temperature=1.0, max_completion_tokens=COMPLETION,
        replays_routes=True, max_model_len=128,
    )  # fmt: skip

    def step(samples: list[Sample]) -> None:
        for batch in form_micro_batches(samples, 4096):
            policy.accumulate(batch)
        policy.zero()

    bare = [without_choices(sample) for sample in samples]
    trainer_ratio, longer_s = compare(lambda: step(samples), lambda: step(bare))
    return {
        "engine_ratio": engine_ratio,
        "trainer_ratio": trainer_ratio,
        "replay_ms": round(1000 * longer_s, 1),
        "route_bytes": bytes_of(rows, ROUTES),
        "mask_bytes": bytes_of(rows, KEPT),
        "route_bytes_30b": 48 * 8,
        "ratio": min(engine_ratio, trainer_ratio),
    }


def main() -> None:
    sizes = f"{GROUPS} groups of {SIZE}: prompts of {PROMPT} tokens, completions of {COMPLETION}"
    print_figures(sizes, measure())


if __name__ == "__main__":
    main()
