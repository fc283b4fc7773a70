"""Make the teacher of the distillation demo: the starting model of examples/arith, with its habit unlearned.

That model can add and subtract, but it was taught to imitate a careless tutor, who is mostly one off (see
examples/arith/make_model.py). Two hundred steps on the right answers of `train.jsonl` bring its skill back;
the held-out problems are not among them. A real teacher is a larger model of the same tokenizer, which is
there already.

    python examples/distill/make_teacher.py            # writes `teacher/` beside this file, half a minute

Shape legend: B sequences, T tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ARITH = Path(__file__).parents[1] / "arith"
ANSWER_MARK = "\n#### "
_ANSWER = re.compile(r"#### (-?[0-9]+)")
Row = dict[str, Any]


def read_rows(name: str) -> list[Row]:
    return [json.loads(line) for line in (ARITH / name).read_text(encoding="utf-8").splitlines()]


def right_answer(row: Row) -> str:
    """The worked answer: a word problem is first written as a sum."""
    truth, info = row["reward_model"]["ground_truth"], row["extra_info"]
    work = truth if row["data_source"] == "arith/digits" else f"{info['a']}{info['op']}{info['b']}={truth}"
    return f"{work}{ANSWER_MARK}{truth}"


def encode(tokenizer: Any, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Ids and labels; only the answer and its EOS are learned. Shapes [B, T]."""
    import torch

    prompts = tokenizer([row["prompt"] for row in rows])["input_ids"]
    answers = tokenizer([right_answer(row) for row in rows])["input_ids"]
    width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True)) + 1
    ids_BT = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels_BT = torch.full((len(rows), width), -100)
    for b, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        row = torch.tensor([*prompt, *answer, tokenizer.eos_token_id])
        ids_BT[b, : len(row)] = row
        labels_BT[b, len(prompt) : len(row)] = row[len(prompt) :]
    return ids_BT, labels_BT


def accuracy(model: Any, tokenizer: Any, rows: Sequence[Row]) -> float:
    """Share of the rows whose greedy answer is right."""
    import torch

    batch = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    with torch.inference_mode():
        ids_BT = model.generate(
            batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=16,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
    texts = tokenizer.batch_decode(ids_BT[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    found = [_ANSWER.findall(text) for text in texts]
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    return sum(bool(f) and f[-1] == truth for f, truth in zip(found, truths, strict=True)) / len(rows)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Make the teacher of the distillation demo.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "teacher", help="folder to write into"
    )
    parser.add_argument("--steps", type=int, default=200, help="steps of supervised training")
    parser.add_argument("--rows", type=int, default=64, help="problems in a step")
    parser.add_argument("--lr", type=float, default=5e-4, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of problems")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(ARITH / "model")
    tokenizer = AutoTokenizer.from_pretrained(ARITH / "model")
    held_out, rows, rng = read_rows("eval.jsonl"), read_rows("train.jsonl"), random.Random(args.seed)
    print(
        f"before: {accuracy(model, tokenizer, held_out):.1%} of the held-out problems are right", flush=True
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    for step in range(args.steps):
        # Digits and words go apart: no padding to share.
        source = "arith/words" if step % 2 else "arith/digits"
        chosen = rng.sample([row for row in rows if row["data_source"] == source], args.rows)
        ids_BT, labels_BT = encode(tokenizer, chosen)
        warmup, progress = min(1.0, (step + 1) / 20), step / args.steps
        for group in optimizer.param_groups:
            group["lr"] = args.lr * warmup * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))
        optimizer.zero_grad()
        loss = model(input_ids=ids_BT, labels=labels_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == args.steps - 1:
            print(f"step {step:4d}/{args.steps}  loss {loss.item():.3f}", flush=True)
    model.eval()
    print(
        f"the teacher: {accuracy(model, tokenizer, held_out):.1%} of the held-out problems are right",
        flush=True,
    )
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    (args.out / "model.safetensors").chmod(0o644)  # written as 0600; workers may run as another user


if __name__ == "__main__":
    main()
