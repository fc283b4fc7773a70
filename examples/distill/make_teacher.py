"""Make the teacher of the distillation demo: the starting model of examples/arith, with its habit unlearned.

That model can add and subtract, but it was taught to imitate a careless tutor, who is mostly one off (see
examples/arith/make_model.py). Two hundred steps on the right answers of `train.jsonl` bring its skill back;
the held-out problems are not among them. A real teacher is a larger model of the same tokenizer, which is
there already.

    python examples/distill/make_teacher.py            # writes `teacher/` beside this file, half a minute
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

ARITH = Path(__file__).parents[1] / "arith"


def main(argv: Sequence[str] | None = None) -> None:
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
    args = parser.parse_args(argv)

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    sys.path.insert(0, str(ARITH))
    import make_model as arith
    from small_models import fit, save

    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(ARITH / "model")
    tokenizer = AutoTokenizer.from_pretrained(ARITH / "model")
    held_out = arith.read_problems("eval.jsonl")
    problems = arith.read_problems("train.jsonl")
    arith.report("before", model, tokenizer, held_out)
    # Digits and words go apart: no padding to share.
    rng = random.Random(args.seed)
    forms = cycle(("digits", "words"))

    def batches() -> list[Any]:
        form = next(forms)
        chosen = rng.sample([problem for problem in problems if problem.form == form], args.rows)
        return [arith.encode_batch(tokenizer, [(problem.prompt, problem.completion()) for problem in chosen])]

    fit(model, args.steps, args.lr, batches)
    arith.report("the teacher", model, tokenizer, held_out)
    save(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
