"""Which families of models are trained and sampled right: the last part of docs/models.md.

Each is a tiny model of random weights in float32. Rows of different lengths are sampled in one batch, several
from one prompt, some to an early end, and trained packed; every logprob is held against one pass over its row
alone. `python -m tests.families_table` writes the table, `--check` says whether it is current; minutes.
"""

import asyncio
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from infra.docs.made import keep
from tests.support.architectures import FAMILIES, RECURRENT, STATELESS_BATCHES, make_model
from tests.support.models import logprobs_of, make_policy, make_samples
from tidemill.common.errors import ConfigError
from tidemill.common.run.model_config import check_sampling
from tidemill.common.wire.messages import SamplingParams
from tidemill.services.rollout.engines.decoding import DecodingRow, RouteRecorder, decode_batch
from tidemill.services.rollout.engines.engine import GenerationRequest, StopTexts
from tidemill.services.rollout.engines.states import is_recurrent
from tidemill.services.rollout.engines.trial import takes_all_lengths

PAGE = Path(__file__).parents[1] / "docs/models.md"
HEADING = "## Families"
LARGEST_GAP = 1e-5
"""Nats between a token's logprob in a batch and alone."""
PLAIN = (
    "Apertus", "Arcee", "BioGpt", "Bloom", "CodeGen", "Cohere", "Cohere2", "Ernie4_5", "Exaone4", "Gemma",
    "Glm4", "Granite", "Olmo3", "Phi3", "SmolLM3", "Starcoder2",
)  # fmt: skip
"""Families with keys and values alone, beside those that tests of their own know."""
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
OF_DEEPSEEK = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
    "topk_group": 1, "num_key_value_heads": 4}  # fmt: skip
COMPRESSED = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8}  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    "DeepseekV2": OF_DEEPSEEK | COMPRESSED,
    "DeepseekV3": OF_DEEPSEEK | COMPRESSED,
    "Glm4Moe": OF_DEEPSEEK,
    "GraniteMoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": EXPERTS | {"shared_expert_intermediate_size": 16},
    "Qwen3Moe": EXPERTS | {"head_dim": 8},
    "GPT2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128},
    "GPTJ": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128, "rotary_dim": 8},
    "GPTNeo": {"attention_types": [[["global", "local"], 1]], "num_heads": 4, "num_layers": 2},
    "CodeGen": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128, "rotary_dim": 8},
    "Bloom": {"n_layer": 2, "n_head": 4},
    "Mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "Dbrx": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128, "ffn_config":
        {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "JetMoe": {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4,
        "num_attention_heads": None},
    "Afmoe": EXPERTS | {"head_dim": 8, "num_dense_layers": 1, "layer_types": ["full_attention"] * 2,
        "sliding_window": 8},
    "HunYuanMoEV1": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "Laguna": EXPERTS | {"head_dim": 8, "shared_expert_intermediate_size": 16, "layer_types":
        ["full_attention"] * 2, "num_attention_heads_per_layer": [4, 4], "mlp_layer_types":
        ["dense", "sparse"]},
    "LongcatFlash": {"num_layers": 1, "ffn_hidden_size": 32, "expert_ffn_hidden_size": 16,
        "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2, "head_dim": 4, "num_key_value_heads": 4,
        **COMPRESSED},
    "DeepseekV4": OF_DEEPSEEK | {"q_lora_rank": 8, "o_groups": 2, "o_lora_rank": 4, "qk_rope_head_dim": 4,
        "hc_mult": 2, "head_dim": 8, "num_key_value_heads": 1},
}  # fmt: skip
TRIED_ON_VLLM = ("Llama",)
"""Families from whose tiny models tests sample with vLLM, on a CPU."""

PREAMBLE = f"""{HEADING}

Tiny models with random weights, in float32 on a CPU, with transformers {transformers.__version__}: rows of
different lengths in one batch, several from one prompt, with ends at different times. "right": every logprob
is within {LARGEST_GAP:g} nats of that of its row alone. "padded": the trainer does not pack rows. "one
length": prompts of different lengths are decoded one after the other. "not tried": no test here has it; on
vLLM others may work too. A script makes it: [families_table.py](../tests/families_table.py).

| family | type | trainer | transformers engine | vLLM |
|---|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Row:
    family: str
    model_type: str
    trainer: str
    engine: str

    def as_markdown(self) -> str:
        vllm = "right" if self.family in TRIED_ON_VLLM else "not tried"
        cells = (self.family, f"`{self.model_type}`", self.trainer, self.engine, vllm)
        return f"| {' | '.join(cells)} |"


def names() -> list[str]:
    """All families of the table; those whose vision part is beside a text model stand as that."""
    listed = {*FAMILIES, *RECURRENT, *STATELESS_BATCHES, *FIELDS, *PLAIN}
    return sorted(listed, key=str.lower)


def build(family: str) -> Any:
    """A tiny model, whose weights are so small that float32 keeps 1e-5 of a nat."""
    return make_model(family, **({"initializer_range": 0.1} | FIELDS.get(family, {})))


def alone(model: Any, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> torch.Tensor:
    """Logprobs of a completion from one pass over its row."""
    ids_1T = torch.tensor([[*prompt_ids, *completion_ids]])
    with torch.no_grad():
        logits_TV = model(input_ids=ids_1T, use_cache=False).logits[0, len(prompt_ids) - 1 : -1].float()
    targets_T1 = torch.tensor(list(completion_ids))[:, None]
    return torch.log_softmax(logits_TV, -1).gather(-1, targets_T1)[:, 0]


def judged(gaps: list[float], how: str = "") -> str:
    worst = max(gaps)
    return f"right{how}" if worst <= LARGEST_GAP else f"other numbers: {worst:.1g} nats"


def try_trainer(family: str) -> str:
    samples = make_samples(5)
    try:
        policy = make_policy(model=build(family))
    except ConfigError as error:
        return f"refused: {_in_short(error)}"
    scored = logprobs_of(policy, samples)
    gaps = [
        float(np.abs(mine - alone(policy._model, sample.prompt_ids, sample.completion_ids).numpy()).max())
        for mine, sample in zip(scored, samples, strict=True)
    ]
    return judged(gaps, ", padded" if policy.layout == "padded" else "")


def try_engine(family: str) -> str:
    model = build(family)
    try:
        check_sampling(model.config.model_type)
        one_length = is_recurrent(model) and not takes_all_lengths(model)
    except ConfigError as error:
        return f"refused: {_in_short(error)}"
    loop = asyncio.new_event_loop()
    rows = [
        DecodingRow(
            GenerationRequest(f"r{length}-{end}", _prompt(length), SamplingParams(max_tokens=end)),
            length * 100 + end, StopTexts((), lambda ids: ""), loop.create_future(),
        )
        for length in (1, 5, 9)
        for end in (10, 2, 6)
    ]  # fmt: skip
    decode_batch(model, rows, frozenset(), RouteRecorder(()), one_length)
    loop.close()
    gaps = [
        float((alone(model, row.request.prompt_ids, row.token_ids) - torch.tensor(row.logprobs)).abs().max())
        for row in rows
    ]
    return judged(gaps, ", one length" if one_length else "")


def _prompt(length: int) -> list[int]:
    return [2 + (7 * position + length) % 29 for position in range(length)]


def _in_short(error: ConfigError) -> str:
    said = str(error).partition(": ")[2] or str(error)
    return said.split("; ")[0].split(", whose")[0].split(" (")[0].replace("|", "/")[:110]


def rows_of_table() -> Iterator[Row]:
    for family in names():
        model_type = str(build(family).config.model_type)
        yield Row(family, model_type, try_trainer(family), try_engine(family))


def as_markdown() -> str:
    return PREAMBLE + "\n".join(row.as_markdown() for row in rows_of_table()) + "\n"


def main(arguments: Sequence[str]) -> int:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    text = PAGE.read_text("utf-8").partition(f"\n{HEADING}\n")[0].rstrip("\n")
    return keep({PAGE: f"{text}\n\n{as_markdown()}"}, "tests.families_table", arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
