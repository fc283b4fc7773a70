"""Make the mixture of experts that the demo trains: the model of examples/arith, upcycled.

Each MLP becomes four experts, of which a router chooses two for a token (sparse upcycling, arXiv 2212.05055).
Copies would compute the same, whichever are chosen. So the experts get noise, and a short supervised pass on
the careless tutor's answers (see examples/arith/make_model.py) lets them settle apart. Held-out problems are
not among its rows.

    python examples/moe/make_model.py            # writes `model/` beside this file, half a minute
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ARITH = Path(__file__).parents[1] / "arith"
NUM_EXPERTS = 4
NOISE = 0.3
"""Of an expert's weights, in their own standard deviations."""


def upcycle(dense: Any) -> Any:
    """A Mixtral with the weights of a Llama."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    shared = dense.config.to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "head_dim", "rope_parameters", "max_position_embeddings", "rms_norm_eps")
    names += ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    config = MixtralConfig(
        **{name: shared[name] for name in names},
        num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        initializer_range=0.1,  # of the routers: their choice is no toss-up
        sliding_window=None,
        dtype=torch.float32,
    )
    model: Any = MixtralForCausalLM(config)
    state = dense.state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in state:
                parameter.copy_(state[name])
        for layer, before in zip(model.model.layers, dense.model.layers, strict=True):
            joined = torch.cat([before.mlp.gate_proj.weight, before.mlp.up_proj.weight])
            for target, weight in (
                (layer.mlp.experts.gate_up_proj, joined),
                (layer.mlp.experts.down_proj, before.mlp.down_proj.weight),
            ):
                target.copy_(weight.expand_as(target))
                target.add_(torch.randn_like(target) * NOISE * weight.std())
    return model


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make the mixture of experts of the demo.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model", help="folder to write")
    parser.add_argument("--steps", type=int, default=80, help="steps of supervised training")
    args = parser.parse_args(argv)

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    sys.path.insert(0, str(ARITH))
    import make_model as arith
    from small_models import save

    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer: Any = AutoTokenizer.from_pretrained(ARITH / "model")
    model = upcycle(AutoModelForCausalLM.from_pretrained(ARITH / "model"))
    held_out = arith.read_problems("eval.jsonl")
    settle = arith.Pass("settle", args.steps, 5e-4, arith.TUTOR_SLIPS)
    keys = {problem.key for problem in held_out}
    arith.train_pass(model, tokenizer, random.Random(0), settle, keys)
    arith.report(f"{model.num_parameters():,} parameters", model, tokenizer, held_out)
    save(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
