"""Make the small Qwen2.5-VL that the demo trains: it has learned from a careless tutor.

The tutor sees right and often says wrong: it counts one too many, and takes left for right. So the model has
seen pictures and knows the words, and answers most questions wrong; the run has to teach it which of its
answers are right. Held-out pictures are not among its rows.

    python examples/shapes/make_model.py            # writes `model/` beside this file, a minute on one core
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import draw
from small_models import pad_rows
from small_vision_models import save_vision_model, vision_model, vision_tokenizer

FAMILY = "qwen2_5_vl"
CARELESS = 0.55
"""Share of the tutor's answers that are wrong."""
BATCH = 64
MIRRORED = {"top left": "top right", "top right": "top left", "bottom left": "bottom right"}
MIRRORED["bottom right"] = "bottom left"


def words() -> list[str]:
    """Pieces of the tokenizer beside single characters."""
    return [*draw.PLACES, draw.COUNT, draw.LOCATE, "user", "assistant"]


def tutor_says(question: draw.Question, randomness: random.Random, share_wrong: float) -> str:
    if randomness.random() >= share_wrong:
        return question.answer
    return str(int(question.answer) + 1) if question.counts else MIRRORED[question.answer]


class Rows:
    """Questions and answers as the model's inputs."""

    def __init__(self, tokenizer: Any, processor: Any, model: Any) -> None:
        self.tokenizer = tokenizer
        self.processor = processor
        self.model = model
        self.image_id = model.config.image_token_id
        self.num_tokens = (2 * draw.CELL // 28) ** 2
        self._patches: dict[draw.Cell, Any] = {}

    def prompt_of(self, question: draw.Question) -> list[int]:
        parts = [{"type": "text", "text": question.text}, {"type": "image"}]
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
        pad = "<|image_pad|>"
        ids = self.tokenizer(text.replace(pad, pad * self.num_tokens), add_special_tokens=False)["input_ids"]
        return list(ids)

    def inputs(self, ids_BT: Any, questions: Sequence[draw.Question]) -> dict[str, Any]:
        cells = [cell for question in questions for cell in question.cells]
        return {
            "input_ids": ids_BT,
            "mm_token_type_ids": (ids_BT == self.image_id).int(),
            "pixel_values": torch.cat([self.patches_of(cell) for cell in cells]),
            "image_grid_thw": torch.tensor([[1, 4, 4]] * len(questions)),
        }

    def patches_of(self, cell: draw.Cell) -> Any:
        """The patches [4, F] of one cell, which stand together in those of a picture."""
        if cell not in self._patches:
            pixels = self.processor(images=[draw.draw([cell] * 4)], return_tensors="pt")["pixel_values"]
            self._patches[cell] = pixels[:4]
        return self._patches[cell]

    def batch(self, questions: Sequence[draw.Question], answers: Sequence[str]) -> dict[str, Any]:
        prompts = [self.prompt_of(question) for question in questions]
        rows = []
        for prompt, answer in zip(prompts, answers, strict=True):
            completion = self.tokenizer(answer, add_special_tokens=False)["input_ids"]
            rows.append([*prompt, *completion, self.tokenizer.eos_token_id])
        ids_BT, labels_BT = pad_rows(rows, [len(prompt) for prompt in prompts], self.tokenizer.pad_token_id)
        # Padding stands behind every row: causal attention never sees it, so no mask is needed.
        return self.inputs(ids_BT, questions) | {"labels": labels_BT}

    @torch.inference_mode()
    def accuracy(self, questions: Sequence[draw.Question]) -> float:
        """Share of greedy answers that are right, judged by their first token and their end."""
        batch = self.batch(questions, [question.answer for question in questions])
        labels_BT = batch.pop("labels")
        guesses_BT = self.model(**batch).logits.argmax(-1)[:, :-1]
        labels_BT = labels_BT[:, 1:]
        is_right_BT = (guesses_BT == labels_BT) | (labels_BT == -100)
        return is_right_BT.all(1).float().mean().item()


def train(rows: Rows, num_steps: int, peak_lr: float, share_wrong: float, seed: int) -> None:
    """Supervised training on the tutor's answers."""
    randomness = random.Random(seed)
    held_out = draw.held_out()
    model = rows.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.98), weight_decay=0.01)
    # Of fewer steps than 20, a tenth would be no step to warm up in: torch would divide by zero.
    length = max(num_steps, 20)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak_lr, total_steps=length, pct_start=0.1)
    model.train()
    for step in range(num_steps):
        questions = draw.make_questions(BATCH, randomness.getrandbits(32), held_out)
        answers = [tutor_says(question, randomness, share_wrong) for question in questions]
        loss = model(**rows.batch(questions, answers)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == num_steps - 1:
            right = rows.accuracy(held_out)
            print(f"step {step:4d}/{num_steps}  loss {loss.item():.3f}  right {right:.2f}", flush=True)
    model.eval()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make the model of the demo.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model", help="folder to write")
    parser.add_argument("--steps", type=int, default=700, help="steps of supervised training")
    args = parser.parse_args(argv)

    from transformers import AutoImageProcessor

    torch.set_num_threads(1)
    tokenizer = vision_tokenizer(FAMILY, words())
    model = vision_model(FAMILY, tokenizer, initializer_range=0.06)
    # Once, for the image processor that belongs to it.
    save_vision_model(model, tokenizer, args.out)
    processor = AutoImageProcessor.from_pretrained(args.out, backend="pil")
    rows = Rows(tokenizer, processor, model)
    # To see first, and then to be careless: what is noise from the start is never learned.
    train(rows, args.steps, 1e-3, 0.0, seed=0)
    train(rows, max(1, args.steps // 10), 1e-3, CARELESS, seed=1)
    print(f"{model.num_parameters():,} parameters, {rows.accuracy(draw.held_out()):.2f} of answers right")
    save_vision_model(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
