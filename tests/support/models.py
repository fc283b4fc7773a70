"""Models of a few thousand parameters, samples for them, and policies that train them, made on the spot."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.nn import functional as F
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tests.support.samples import changed, sample_of
from tidemill.common.config.run import RunConfig
from tidemill.common.config.trainer import TrainerConfig
from tidemill.common.wire.arrays import Float32
from tidemill.common.wire.choices import Rows
from tidemill.services.trainer.algorithm.losses.sums import Sums
from tidemill.services.trainer.groups.micro_batch import MicroBatch
from tidemill.services.trainer.groups.sample import Sample
from tidemill.services.trainer.policy.options import PolicyOption
from tidemill.services.trainer.policy.policy import Policy, UpdateResult
from tidemill.services.trainer.policy.state import PolicyState, ShardReader
from tidemill.services.trainer.policy.transformers_policy import TransformersPolicy

AnOption = TypeVar("AnOption", bound=PolicyOption)

MAX_COMPLETION = 14
"""Completion tokens of a policy's run, at most."""

PIECES = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(29))]
"""A vocabulary of 32 words, split at spaces."""


def tiny_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A Llama of 2 layers whose weights are large enough for logprobs to differ between tokens."""
    config = {
        "vocab_size": len(PIECES),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    } | changes
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.eval()
    return model


def tiny_model(path: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a tiny Llama and its tokenizer into a folder."""
    tiny_llama(seed, **changes).save_pretrained(path)
    write_tokenizer(path)
    return path


def write_tokenizer(
    path: Path,
    chat_template: str | None = None,
    num_pieces: int = len(PIECES),
    appends_end: bool = False,
) -> None:
    """The tokenizer of `PIECES`, or of more words of the same kind; it writes its end behind every text if it
    `appends_end`."""
    pieces = [*PIECES, *(f"w{number - 3}" for number in range(len(PIECES), num_pieces))]
    backend = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if appends_end:
        backend.post_processor = processors.TemplateProcessing(
            single="$A <eos>", pair="$A $B <eos>", special_tokens=[("<eos>", 1)]
        )
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        chat_template=chat_template,
    ).save_pretrained(path)


def make_samples(count: int, seed: int = 0, max_prompt: int = 9, max_completion: int = 14) -> list[Sample]:
    """Samples of random lengths, with holes in their masks and rollout logprobs around -3."""
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(count):
        num_tokens = int(rng.integers(1, max_completion + 1))
        mask = rng.random(num_tokens) < 0.8
        mask[0] = True
        samples.append(
            sample_of(
                key=(i // 4, i % 4),
                prompt_ids=rng.integers(3, len(PIECES), rng.integers(1, max_prompt + 1)),
                completion_ids=rng.integers(1, len(PIECES), num_tokens),
                logprobs=rng.normal(-3.0, 0.7, num_tokens),
                mask=mask,
                advantage=float(rng.normal()),
                reward=float(rng.random()),
            )
        )
    return samples


def make_relatives(count: int, seed: int = 0, max_tokens: int = 24) -> list[Sample]:
    """Samples with few prompts, one of which continues another, and completions that begin like others'."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, len(PIECES), rng.integers(1, max_tokens)).astype(np.int32) for _ in range(3)]
    prompts.append(np.concatenate([prompts[0], prompts[1][:9]]))
    samples: list[Sample] = []
    for sample in make_samples(count, seed, max_completion=max_tokens):
        ids = sample.completion_ids.copy()
        prompt_ids = prompts[rng.integers(len(prompts))]
        if samples and rng.random() < 0.5:
            second = samples[rng.integers(len(samples))]
            length = min(len(ids), len(second.completion_ids), int(rng.integers(1, max_tokens)))
            ids[:length] = second.completion_ids[:length]
            prompt_ids = second.prompt_ids
        samples.append(changed(sample, prompt_ids=prompt_ids, completion_ids=ids))
    return samples


def make_policy(
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    model: PreTrainedModel | None = None,
    temperature: float = 1.0,
    replays_routes: bool = False,
    **trainer: Any,
) -> TransformersPolicy:
    """A tiny Llama under training; float64 is for comparisons of gradients."""
    trainer.setdefault("optimizer", {"lr": 1e-2})
    config = TrainerConfig.model_validate(trainer)
    model = model or tiny_llama(seed)
    if dtype == torch.float64:
        model = model.double()
    return TransformersPolicy(
        model,
        config,
        dtype=dtype,
        temperature=temperature,
        max_completion_tokens=MAX_COMPLETION,
        replays_routes=replays_routes,
    )


def option_of(policy: TransformersPolicy, kind: type[AnOption]) -> AnOption:
    """The policy's option of this kind."""
    (option,) = (option for option in policy.options if isinstance(option, kind))
    return option


def gradients_of(policy: TransformersPolicy) -> torch.Tensor:
    """All accumulated gradients as one vector."""
    gradients = [parameter.grad for _, parameter in policy._parameters]
    return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])


def accumulate_all(policy: Policy, batches: list[MicroBatch]) -> Sums:
    return sum((policy.accumulate(batch) for batch in batches), Sums())


def train(policy: Policy, batches: list[MicroBatch]) -> UpdateResult:
    return policy.update(accumulate_all(policy, batches).denominator)


def assert_all_close(mine: Iterable[Any], expected: Iterable[Any], atol: float = 1e-5) -> None:
    """Compare array by array; with an `atol` of 0 they are equal."""
    for ours, wanted in zip(mine, expected, strict=True):
        np.testing.assert_allclose(ours, wanted, atol=atol, rtol=0.0)


def with_masks(samples: list[Sample], seed: int = 0) -> list[Sample]:
    """Three of four samples with sampling masks: of each token its id and up to six others, or none."""
    rng = np.random.default_rng(seed)

    def mask_of(token: int) -> list[int]:
        others = rng.integers(0, len(PIECES), rng.integers(0, 7)).tolist()
        return sorted({token, *others}) if rng.random() < 0.8 else []

    rows = []
    for sample in samples:
        masks = [mask_of(token) for token in sample.completion_ids.tolist()]
        rows.append(Rows.of_lists(masks))
    return [
        changed(sample, kept=sample_rows) if i % 4 else sample
        for i, (sample, sample_rows) in enumerate(zip(samples, rows, strict=True))
    ]


def one_batch(samples: list[Sample]) -> MicroBatch:
    return MicroBatch(tuple(samples))


def masked(sample: Sample) -> Sample:
    return changed(sample, mask=np.zeros_like(sample.mask))


def emptied(sample: Sample) -> Sample:
    none = slice(0, 0)
    kept = sample.kept and sample.kept[none]
    return sample_of(sample.key, sample.prompt_ids, [], advantage=sample.advantage, kept=kept)


def run_config(path: Path | str, **sections: Any) -> RunConfig:
    """A whole configuration around one model folder."""
    tree: dict[str, Any] = {
        "model": {"path": str(path), "max_model_len": 128},
        "data": {"train": "x", "max_prompt_tokens": 16},
    }
    tree["rollout"] = {"sampling": {"max_tokens": MAX_COMPLETION, "temperature": 1.6}}
    for name, fields in sections.items():
        tree[name] = tree.get(name, {}) | fields
    return RunConfig.model_validate(tree)


def attend_as_varlen(model: PreTrainedModel) -> None:
    """Have the model take the `varlen` layout where there is no flash attention."""
    AttentionInterface.register("reference_varlen", _varlen_attention)
    model.set_attn_implementation("reference_varlen")


def _varlen_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> tuple[Any, None]:
    """What flash attention's varlen kernel does, in plain torch: sequences apart at `cu_seq_lens`."""
    assert attention_mask is None
    repeats = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(repeats, 1)
    value = value.repeat_interleave(repeats, 1)
    boundaries = [0, query.shape[2]]
    if "cu_seq_lens_q" in kwargs:  # absent where one sequence is probed
        boundaries = kwargs["cu_seq_lens_q"].tolist()
        assert boundaries == kwargs["cu_seq_lens_k"].tolist() and boundaries[-1] == query.shape[2]
        assert max(b - a for a, b in pairwise(boundaries)) == kwargs["max_length_q"] == kwargs["max_length_k"]
    parts = []
    for a, b in pairwise(boundaries):
        pieces = [x[:, :, a:b] for x in (query, key, value)]
        parts.append(F.scaled_dot_product_attention(*pieces, is_causal=True))
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


def read_policy_state(folder: Path) -> PolicyState:
    """All of a saved state, whatever the number of ranks that wrote it."""
    reader = ShardReader(folder)
    return PolicyState({name: reader.read(name) for name in reader.shapes}, reader.values)


def logprobs_of(
    policy: TransformersPolicy, samples: Sequence[Sample], temperature: float = 1.0
) -> list[Float32]:
    """Logprobs of all completion tokens under the current weights, [T] for each sample; of several ranks,
    each has to make the call."""
    parts, order = policy._deal_groups(samples)
    scored = policy._score_all(parts, policy.scorer, temperature)
    return policy._join([scores["logprobs"].astype(np.float32) for scores in scored], order)


def save_state(policy: Policy, folder: Path) -> None:
    """Write a policy's state into a folder, here and now."""
    policy.stage_state()
    policy.begin_saving(folder).result()


def load_state(policy: Policy, state: PolicyState) -> None:
    """Have a policy continue from a state, by way of a folder."""
    with TemporaryDirectory() as folder:
        state.write(Path(folder))
        policy.load_state(Path(folder))


def save_weights(policy: Policy, folder: Path) -> Path:
    """Write what a policy publishes as one file, with safetensors' own function."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in policy.named_parameters_for_export()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder / "model.safetensors"
