"""Make the small reward model of the demo: a classifier that tells whether an answer has the wanted form.

It reads the ids of problem and completion as the actor wrote them, so it has the actor's vocabulary, and
gives one raw score: high for `#### ` and a number and nothing else, low for everything else. Whether the
number is right is the judge's business. A real reward model stands behind the same API.

    python examples/judge/make_reward_model.py     # writes beside this file; less than a minute on one core

Shape legend: B sequences, T tokens.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import AutoTokenizer, LlamaForSequenceClassification, PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).parents[1]))
from small_models import llama_config, pad_rows, save

ARITH = Path(__file__).parents[1] / "arith"
CONTEXT_TOKENS = 64
MARK = "\n#### "


class Examples:
    """Draws problems of the training set with completions of the wanted form, and of others."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, rng: random.Random) -> None:
        self._rng = rng
        self._pad_id = tokenizer.pad_token_id
        self._eos_id = tokenizer.eos_token_id
        lines = (ARITH / "train.jsonl").read_text().splitlines()
        self._prompts = [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]
        self._mark = tokenizer(MARK)["input_ids"]
        self._digits = tokenizer.convert_tokens_to_ids(list("0123456789"))
        self._any = [index for index in range(len(tokenizer)) if index not in (self._pad_id, self._eos_id)]

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """Right-padded ids `[B, T]`, int64, and labels `[B]`, float32: 1 for the wanted form."""
        wanted = [self._rng.random() < 0.5 for _ in range(size)]
        rows = [
            self._rng.choice(self._prompts) + (self._good() if is_good else self._bad()) for is_good in wanted
        ]
        ids_BT, _ = pad_rows(rows, [0] * size, self._pad_id)
        return ids_BT, torch.tensor(wanted, dtype=torch.float32)

    def _good(self) -> list[int]:
        return [*self._mark, *self._rng.choices(self._digits, k=self._rng.randint(1, 4)), self._eos_id]

    def _bad(self) -> list[int]:
        """Mostly near misses: one token of a good completion is missing, doubled or another one."""
        kind = self._rng.random()
        ids = self._good()
        if kind < 0.3:
            return [*self._rng.choices(self._any, k=self._rng.randint(0, 15)), self._eos_id]
        if kind < 0.5:
            return [*ids[:-1], *self._rng.choices(self._any, k=self._rng.randint(1, 8)), self._eos_id]
        if kind < 0.7:
            return ids[len(self._mark) :]  # a bare number
        if kind < 0.8:
            return [*self._mark, self._eos_id]  # no number
        others = [index for index in self._any if index not in self._digits]
        ids[self._rng.randrange(len(self._mark), len(ids) - 1)] = self._rng.choice(others)
        return ids


def build_model(tokenizer: PreTrainedTokenizerBase) -> LlamaForSequenceClassification:
    config = llama_config(
        tokenizer,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        num_labels=1,
    )
    return LlamaForSequenceClassification(config)


def train(model: LlamaForSequenceClassification, examples: Examples, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for step in range(steps):
        ids_BT, labels_B = examples.batch(128)
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(model(input_ids=ids_BT).logits[:, 0], labels_B)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step:4d}/{steps}  loss {loss.item():.4f}", flush=True)


def accuracy(model: LlamaForSequenceClassification, examples: Examples) -> float:
    """Share of 2,000 fresh completions on whose form the model is right."""
    ids_BT, labels_B = examples.batch(2000)
    with torch.inference_mode():
        return ((model(input_ids=ids_BT).logits[:, 0] > 0) == (labels_B > 0)).float().mean().item()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make the small reward model of the demo.")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "reward_model", help="folder to write into"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(ARITH / "model")
    examples = Examples(tokenizer, random.Random(args.seed))
    model = build_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens", flush=True)
    train(model, examples, args.steps)
    print(f"right about the form: {accuracy(model.eval(), examples):.2%}", flush=True)
    save(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
