"""Print what two models answer to the first held-out questions, side by side.

python examples/instruct/compare.py BEFORE AFTER     # folders of models, as `tidemill export` writes them
"""

import json
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

NUM_ROWS = 5
MAX_TOKENS = 48


def answers(folder: str, questions: list[list[dict[str, str]]]) -> list[str]:
    """What the model says where it takes the likeliest token each time."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = []
    for question in questions:
        ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")[
            "input_ids"
        ]
        with torch.inference_mode():
            said = model.generate(ids, max_new_tokens=MAX_TOKENS, do_sample=False)
        texts.append(tokenizer.decode(said[0, ids.shape[1] :], skip_special_tokens=True).strip())
    return texts


def main(before: str, after: str) -> None:
    """Print the table."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    lines = Path(__file__).with_name("eval.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line)["prompt"] for line in lines[:NUM_ROWS]]
    table = Table("asked", "answered before", "answered after", show_lines=True)
    for question, *said in zip(questions, answers(before, questions), answers(after, questions), strict=True):
        table.add_row(question[-1]["content"], *said)
    Console(markup=False).print(table)


if __name__ == "__main__":
    main(*sys.argv[1:])
