"""The batches and the model that the trainer benchmark gives to both sides, the same bytes for each."""

from dataclasses import dataclass

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tidemill.services.trainer.groups.samples import Sample

GROUP_SIZE = 8


@dataclass(frozen=True)
class Case:
    """Lengths of one batch: uniform between two bounds, or so that each octave is equally likely."""

    name: str
    sequences: int
    prompt_tokens: tuple[int, int]
    completion_tokens: tuple[int, int]
    is_spread: bool = False


CASES = {
    "short": Case("short", 48, (24, 32), (48, 64)),
    "long": Case("long", 8, (24, 32), (448, 512)),
    "unequal": Case("unequal", 32, (8, 32), (8, 512), is_spread=True),
}
GPU_SCALE = 8
"""Completions and prompts are this many times longer on a GPU."""


@dataclass(frozen=True)
class Shape:
    """A dense Llama."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocabulary: int


CPU_SHAPE = Shape(192, 4, 6, 512, 8192)
GPU_SHAPE = Shape(896, 24, 14, 4864, 151_936)


def make_model(shape: Shape, context: int) -> PreTrainedModel:
    """Random weights, always the same, in float32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=max(1, shape.heads // 7),
        vocab_size=shape.vocabulary,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def make_batch(case: Case, vocabulary: int, scale: int = 1, seed: int = 0) -> list[Sample]:
    """Samples of a case in random order, with advantages of mean 0."""
    rng = np.random.default_rng(seed)
    low, high = (length * scale for length in case.completion_tokens)
    if case.is_spread:
        lengths = np.exp(rng.uniform(np.log(low), np.log(high + 1), case.sequences)).astype(int)
    else:
        lengths = rng.integers(low, high + 1, case.sequences)
    lengths[rng.integers(case.sequences)] = high  # the longest is there in every case
    samples = []
    for i, length in enumerate(lengths):
        num_prompt = int(rng.integers(case.prompt_tokens[0], case.prompt_tokens[1] + 1)) * scale
        samples.append(
            Sample(
                key=(i // GROUP_SIZE, i % GROUP_SIZE),
                prompt_ids=rng.integers(3, vocabulary, num_prompt).astype(np.int32),
                completion_ids=rng.integers(3, vocabulary, length).astype(np.int32),
                rollout_logprobs=np.full(length, -np.log(vocabulary), dtype=np.float32),
                mask=np.ones(length, dtype=np.bool_),
                advantage=float(rng.normal()),
                reward=0.0,
            )
        )
    return samples
