#!/usr/bin/env bash
# transformers 5.19.0: a MiniMax-01 model gives a left-padded row of a batch other logits, from the second token
# on, than the same row alone. Its mask for layers with keys is made from the length of layer 0, a linear one,
# whose cache is empty, so that the padding is attended to. Exits non-zero if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.19.0
"$folder/venv/bin/python" - <<'PYTHON'
import torch
import transformers
from transformers import AutoModelForCausalLM, MiniMaxConfig

torch.manual_seed(0)
config = MiniMaxConfig(
    vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, num_local_experts=4, block_size=8, initializer_range=0.3,
    layer_types=["linear_attention", "full_attention"],
)
model = AutoModelForCausalLM.from_config(config).eval()
short, long = [5, 6, 7], [8, 9, 10, 11, 12, 13, 14]


def next_logits(rows, masks):
    """Logits after the prompt, and after one more token, of the first row."""
    ids = torch.tensor(rows)
    mask = torch.tensor(masks)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        first = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], -1)
        token = torch.full_like(ids[:, :1], 3)
        second = model(
            input_ids=token, attention_mask=mask, position_ids=mask.sum(-1, keepdim=True) - 1,
            past_key_values=first.past_key_values, use_cache=True,
        )
    return first.logits[0, -1], second.logits[0, -1]


alone = next_logits([short], [[1, 1, 1]])
padded = next_logits([[0] * 4 + short, long], [[0] * 4 + [1] * 3, [1] * 7])
gaps = [float((a - b).abs().max()) for a, b in zip(alone, padded)]
print("transformers", transformers.__version__)
print(f"largest difference of logits, after the prompt: {gaps[0]:.2g}, after one more token: {gaps[1]:.2g}")
assert gaps[0] < 1e-4 < 1e-2 < gaps[1], "the behaviour has changed"
PYTHON
