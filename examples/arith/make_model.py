"""Make the model and the data that the arithmetic demo trains with GRPO.

A run of reinforcement learning needs a model that already gets some answers right: a group whose completions
are all wrong carries no signal. Real runs start from a pretrained model. This script makes a small stand-in
for one, about a million parameters, in two passes of supervised training:

1. *Skill.* The model reads solved problems: `12+7=` continues as `19\\n#### 19`, and a word problem is first
   written as a sum, `3+14=17\\n#### 17`. It learns to add, to subtract and to tell one from the other.
2. *Habit.* It then imitates a careless tutor, who is right less than a third of the time and otherwise
   miscounts, most often by one too many (`TUTOR_SLIPS`). The skill stays in the weights; the habit hides it.

What is left is a model that knows the format, is wrong in most of its samples *and* in most of its greedy
answers, and has the right answer within reach of sampling. GRPO sees nothing but right or wrong, and has to
bring it out. So the demo shows that the pipeline learns, not that GRPO teaches arithmetic from nothing.

Invariants: a held-out problem (operation and operands, in either order for a sum) is in neither pass and not
in `train.jsonl`; the data files are a function of the arguments alone, byte for byte. So are the weights, on
one machine with one number of threads; elsewhere they differ in the last bits.

    python examples/arith/make_model.py            # writes beside this file; about three minutes on one core
    python examples/arith/make_model.py --out /tmp/arith --seed 7

Shape legend: B sequences, T tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[1]))  # small_models

MAX_OPERAND = 50
"""Operands are 1 to this; a difference is never negative."""

CONTEXT_TOKENS = 128
ANSWER_MARK = "\n#### "
"""GSM8K's mark before the final answer; one token, so that a completion stays short."""

TUTOR_SLIPS: dict[int, float] = {0: 0.30, 1: 0.56, -1: 0.08, 2: 0.06}
"""What the careless tutor adds to the right answer, and how often. The most frequent one is wrong."""

NAMES = ("Tom", "Ana", "Ben", "Mia", "Sam", "Eva", "Leo", "Zoe")
ITEMS = ("apples", "books", "coins", "shells", "stamps", "marbles", "pens", "cards")
WORD_FORMS: dict[str, tuple[str, ...]] = {
    "+": (
        "{name} has {a} {item} and buys {b}. How many {item}?",
        "{name} has {a} {item} and finds {b} more. How many {item} now?",
        "{name} got {a} {item} today and {b} before. How many {item} in all?",
    ),
    "-": (
        "{name} has {a} {item} and sells {b}. How many {item}?",
        "{name} has {a} {item} and loses {b} of them. How many {item} now?",
        "{name} had {a} {item} and gave away {b}. How many {item} are left?",
    ),
}

_PIECE = re.compile(r"\n#### |####| ?[A-Za-z]+|[0-9]|[^A-Za-z0-9]")
_ANSWER = re.compile(r"#### (-?[0-9]+)")


@dataclass(frozen=True)
class Problem:
    """One problem: what is asked, in which form, and the right answer."""

    op: str
    a: int
    b: int
    form: str
    prompt: str

    @property
    def answer(self) -> int:
        return self.a + self.b if self.op == "+" else self.a - self.b

    @property
    def key(self) -> tuple[str, int, int]:
        """Equal for problems that train the same fact: `3+14` and `14+3` are one."""
        return problem_key(self.op, self.a, self.b)

    def completion(self, slip: int = 0) -> str:
        """The worked answer, off by `slip`, never below zero: no right answer is."""
        said = max(0, self.answer + slip)
        work = f"{self.a}{self.op}{self.b}={said}" if self.form == "words" else str(said)
        return f"{work}{ANSWER_MARK}{said}"

    def row(self, split: str, index: int) -> dict[str, Any]:
        """The problem as a dataset row, in the columns that verl and GSM8K users know."""
        return {
            "prompt": self.prompt,
            "data_source": f"arith/{self.form}",
            "reward_model": {"ground_truth": str(self.answer)},
            "extra_info": {"split": split, "index": index, "op": self.op, "a": self.a, "b": self.b},
        }


def problem_key(op: str, a: int, b: int) -> tuple[str, int, int]:
    return (op, min(a, b), max(a, b)) if op == "+" else (op, a, b)


def draw_problem(rng: random.Random, form: str) -> Problem:
    op = rng.choice("+-")
    a = rng.randint(1, MAX_OPERAND)
    b = rng.randint(1, MAX_OPERAND)
    if op == "-" and a < b:
        a, b = b, a
    if form == "digits":
        return Problem(op, a, b, form, f"{a}{op}{b}=")
    template = rng.choice(WORD_FORMS[op])
    return Problem(op, a, b, form, template.format(name=rng.choice(NAMES), item=rng.choice(ITEMS), a=a, b=b))


def draw_problems(rng: random.Random, count: int, forbidden: set[tuple[str, int, int]]) -> list[Problem]:
    """`count` problems with different prompts, digits and words in turn, none with a forbidden key."""
    problems: dict[str, Problem] = {}
    while len(problems) < count:
        problem = draw_problem(rng, "words" if len(problems) % 2 else "digits")
        if problem.key not in forbidden:
            problems.setdefault(problem.prompt, problem)
    return list(problems.values())


def read_problems(name: str) -> list[Problem]:
    """Those of a file beside this one."""
    lines = Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    problems = []
    for row in rows:
        asked = row["extra_info"]
        problems.append(Problem(asked["op"], asked["a"], asked["b"], row["data_source"][6:], row["prompt"]))
    return problems


def write_rows(path: Path, split: str, problems: Iterable[Problem]) -> None:
    lines = (json.dumps(problem.row(split, index)) for index, problem in enumerate(problems))
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Digits and signs one by one, words with their leading space, the answer mark as one token."""
    from small_models import piece_tokenizer

    templates = [form for forms in WORD_FORMS.values() for form in forms]
    words = [*_PIECE.findall(" ".join(t.format(name="", item="", a="", b="") for t in templates)), *NAMES]
    words += [" " + name for name in NAMES] + [" " + item for item in ITEMS]
    pieces = [*"0123456789+-=.?,", " ", "\n", "####", ANSWER_MARK, *sorted(set(words))]
    return piece_tokenizer(pieces, _PIECE.pattern, model_max_length=CONTEXT_TOKENS, padding_side="left")


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of about a million parameters."""
    from small_models import llama_config
    from transformers import LlamaForCausalLM

    config = llama_config(
        tokenizer,
        hidden_size=192,
        intermediate_size=576,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def encode_batch(
    tokenizer: PreTrainedTokenizerFast, pairs: Sequence[tuple[str, str]]
) -> tuple[Tensor, Tensor]:
    """Ids and labels `[B, T]`; only completions and their EOS have labels."""
    from small_models import pad_rows

    prompts = tokenizer([prompt for prompt, _ in pairs])["input_ids"]
    completions = tokenizer([completion for _, completion in pairs])["input_ids"]
    rows = [[*p, *c, tokenizer.eos_token_id] for p, c in zip(prompts, completions, strict=True)]
    return pad_rows(rows, [len(prompt) for prompt in prompts], tokenizer.pad_token_id)


@dataclass(frozen=True)
class Pass:
    """One pass of supervised training: how long, how fast, and how often the tutor slips by how much."""

    name: str
    num_steps: int
    peak_lr: float
    slips: dict[int, float]


def train_pass(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    spec: Pass,
    held_out: set[tuple[str, int, int]],
    digits_per_step: int = 64,
    words_per_step: int = 16,
) -> None:
    """Train on fresh problems, never a held-out one. Digit and word rows go apart: no padding to share."""
    from small_models import fit

    slips = list(spec.slips)
    odds = list(spec.slips.values())

    def batches() -> list[tuple[Tensor, Tensor]]:
        encoded = []
        for form, count in (("digits", digits_per_step), ("words", words_per_step)):
            problems: list[Problem] = []
            while len(problems) < count:
                problem = draw_problem(rng, form)
                if problem.key not in held_out:
                    problems.append(problem)
            chosen = rng.choices(slips, odds, k=count)
            pairs = [(p.prompt, p.completion(slip)) for p, slip in zip(problems, chosen, strict=True)]
            encoded.append(encode_batch(tokenizer, pairs))
        return encoded

    fit(model, spec.num_steps, spec.peak_lr, batches, spec.name)


def accuracy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem], *, greedy: bool
) -> dict[str, float]:
    """Share of problems answered right, of all and of each form; sampling is at temperature 1."""
    import torch
    from transformers import GenerationConfig

    generator: Any = model  # the stubs of `generate` do not accept their own classes
    batch = tokenizer([p.prompt for p in problems], return_tensors="pt", padding=True)
    how = (
        {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    )
    config = GenerationConfig(  # type: ignore[no-untyped-call, unused-ignore]
        max_new_tokens=16, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **how
    )
    with torch.inference_mode():
        ids_BT = generator.generate(
            batch["input_ids"], attention_mask=batch["attention_mask"], generation_config=config
        )
    texts = tokenizer.batch_decode(ids_BT[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    hits: dict[str, list[bool]] = {"all": [], "digits": [], "words": []}
    for problem, text in zip(problems, texts, strict=True):
        numbers = _ANSWER.findall(text)
        is_right = bool(numbers) and int(numbers[-1]) == problem.answer
        hits["all"].append(is_right)
        hits[problem.form].append(is_right)
    return {form: sum(rights) / max(1, len(rights)) for form, rights in hits.items()}


def report(
    title: str, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, held_out: Sequence[Problem]
) -> None:
    for how in ("greedy", "sampled"):
        scores = accuracy(model, tokenizer, held_out, greedy=how == "greedy")
        print(
            f"{title}, {how}: " + ", ".join(f"{form} {score:.1%}" for form, score in scores.items()),
            flush=True,
        )


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Make the small model and the data of the arithmetic demo.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder to write into")
    parser.add_argument("--seed", type=int, default=0, help="seed of data, weights and training")
    parser.add_argument("--train-rows", type=int, default=4000, help="rows of train.jsonl")
    parser.add_argument("--eval-rows", type=int, default=256, help="held-out rows, in eval.jsonl")
    parser.add_argument("--skill-steps", type=int, default=1500, help="steps on right answers")
    parser.add_argument("--habit-steps", type=int, default=250, help="steps on the careless tutor's answers")
    parser.add_argument(
        "--threads", type=int, default=1, help="CPU threads; the weights' last bits depend on it"
    )
    parser.add_argument(
        "--data-only", action="store_true", help="write the data files, leave the model alone"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(args.seed)
    eval_problems = draw_problems(rng, args.eval_rows, forbidden=set())
    held_out = {problem.key for problem in eval_problems}
    train_problems = draw_problems(rng, args.train_rows, forbidden=held_out)
    write_rows(args.out / "eval.jsonl", "eval", eval_problems)
    write_rows(args.out / "train.jsonl", "train", train_problems)
    if args.data_only:
        return

    import torch
    from small_models import save

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens", flush=True)
    skill = Pass("skill", args.skill_steps, 1e-3, {0: 1.0})
    habit = Pass("habit", args.habit_steps, 3e-4, TUTOR_SLIPS)
    for spec in (skill, habit):
        train_pass(model, tokenizer, rng, spec, held_out)
        report(f"after {spec.name}", model, tokenizer, eval_problems)
    save(model, tokenizer, args.out / "model")


if __name__ == "__main__":
    main()
