#!/usr/bin/env bash
# transformers 5.19.0: `return_assistant_tokens_mask=True` marks the control token in front of a
# `{% generation %}` block as the assistant's, where that token is declared with rstrip=True and the block begins
# with white space. Fine-tuning on such a mask trains the model to write its own role token.
# Expected: only tokens of the block. Exits 0 while it is so, 1 where it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.19.0 tokenizers==0.23.3 jinja2==3.1.6
cat > "$folder/show.py" <<'PYTHON'
import sys

import transformers
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

words = ["<unk>", "<|user|>", "<|assistant|>", "<|end|>", "hello", "hi", "\n"]
backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
backend.pre_tokenizer = pre_tokenizers.Split(Regex("\n"), "isolated")
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
tokenizer.add_special_tokens(
    {"additional_special_tokens": [AddedToken(w, rstrip=True, special=True) for w in words[1:4]]}
)
tokenizer.chat_template = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% else %}<|assistant|>"
    "{% generation %}{{ '\n' + m.content + '<|end|>' }}{% endgeneration %}{% endif %}{% endfor %}"
)
chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
out = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
marked = [words[i] for i, is_marked in zip(out["input_ids"], out["assistant_masks"]) if is_marked]
print("transformers", transformers.__version__)
print("tokens      ", [words[i] for i in out["input_ids"]])
print("assistant's ", marked, "(expected: ['hi', '<|end|>'])")
sys.exit(0 if marked == ["<|assistant|>", "hi", "<|end|>"] else 1)
PYTHON
"$folder/venv/bin/python" "$folder/show.py"
