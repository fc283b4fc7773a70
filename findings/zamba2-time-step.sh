#!/usr/bin/env bash
# transformers 5.19.0: Zamba2 bounds the time step of a Mamba layer from below by time_step_min in
# a prompt, and not in a token that follows it from the cache. So a token has other logits when it is generated
# than when the same ids are one prompt. Exits non-zero if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.19.0
"$folder/venv/bin/python" - <<'PYTHON'
import torch
import transformers
from transformers import AutoModelForCausalLM, Zamba2Config


def gap(time_step_min):
    """Largest difference of the last logits, of 12 ids as one prompt and one after the other."""
    torch.manual_seed(0)
    config = Zamba2Config(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, layers_block_type=["linear_attention", "hybrid", "linear_attention"],
        mamba_d_state=8, n_mamba_heads=4, chunk_size=8, initializer_range=0.3, time_step_min=time_step_min,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits[0, -1]
        output = model(input_ids=ids[:, :3], use_cache=True)
        for place in range(3, 12):
            output = model(
                input_ids=ids[:, place : place + 1], position_ids=torch.tensor([[place]]),
                past_key_values=output.past_key_values, use_cache=True,
            )
    return float((whole - output.logits[0, -1]).abs().max())


usual, lower = gap(0.001), gap(1e-9)
print("transformers", transformers.__version__)
print(f"largest difference of logits: {usual:.2g}, and with time_step_min 1e-9: {lower:.2g}")
assert usual > 1e-4 and lower < 1e-5, "the behaviour has changed"
PYTHON
