#!/usr/bin/env bash
# transformers 5.24.0: a Mamba model takes a cache under the name `past_key_values` without an error, and does
# not use it. From 5.24 on the name is `cache` (it was `cache_params`); the models with attention still take the
# old name. So code that hands a cache on by the old name gets other logits. Exits non-zero if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
"$folder/venv/bin/python" - <<'PYTHON'
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, MambaConfig

SIZES = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.3}


def gap(config, name):
    """Largest difference of the last logits, of 9 ids as one prompt and the last of them from a cache."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits[0, -1]
        cache = model(input_ids=ids[:, :-1], use_cache=True)["cache"]
        last = model(input_ids=ids[:, -1:], use_cache=True, **{name: cache}).logits[0, -1]
    return float((whole - last).abs().max())


llama = LlamaConfig(intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, **SIZES)
gaps = {
    (kind, name): gap(config, name)
    for kind, config in (("mamba", MambaConfig(**SIZES)), ("llama", llama))
    for name in ("cache", "past_key_values")
}
print("transformers", transformers.__version__)
for (kind, name), value in gaps.items():
    print(f"{kind}: largest difference of logits with {name}: {value:.2g}")
assert gaps.pop(("mamba", "past_key_values")) > 1e-2, "the behaviour has changed"
assert max(gaps.values()) < 1e-4, "the behaviour has changed"
PYTHON
