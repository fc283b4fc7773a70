#!/usr/bin/env bash
# peft 0.21.2 with transformers 5.19.0: adapters on the shared experts of a Laguna model are saved, and load
# without an error as zeros. The rule that renames mlp.shared_expert. of older files also matches the name
# mlp.shared_experts. itself. Exits non-zero if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.19.0 peft==0.21.2
"$folder/venv/bin/python" - "$folder/adapter" <<'PYTHON'
import sys
import warnings

import peft
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LagunaConfig

warnings.simplefilter("ignore")
config = LagunaConfig(
    vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
    shared_expert_intermediate_size=16, layer_types=["full_attention"] * 2, bos_token_id=1, eos_token_id=1,
    num_attention_heads_per_layer=[4, 4], mlp_layer_types=["dense", "sparse"], initializer_range=0.3,
)


def base():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


trained = get_peft_model(base(), LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["down_proj"]))
for name, weight in trained.named_parameters():
    if "lora_B" in name:
        torch.nn.init.normal_(weight)
trained.save_pretrained(sys.argv[1])
loaded = PeftModel.from_pretrained(base(), sys.argv[1])
zeros = [n for n, w in loaded.named_parameters() if "lora_B" in n and not w.any()]
ids = torch.arange(3, 20)[None]
with torch.no_grad():
    gap = float((trained(input_ids=ids).logits - loaded(input_ids=ids).logits).abs().max())
print("peft", peft.__version__, "transformers", transformers.__version__)
print(f"largest difference of logits after saving and loading: {gap:.2g}; still zero: {zeros}")
assert gap > 1e-2 and zeros and all("shared_experts" in name for name in zeros), "the behaviour has changed"
PYTHON
