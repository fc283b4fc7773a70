"""Make the small judge of the demo: a language model that compares an answer with a reference.

It reads what `judge.jinja` writes, `Reference: 44`, `Answer: 45`, `Score:`, and writes ` 1` or ` 0`. Telling
two short numbers apart is all that it learns, in a minute or two on one core. A real judge has billions of
parameters and stands behind the same API; everything around it stays as it is here.

    python examples/judge/make_judge.py            # writes beside this file

Shape legend: B sequences, T tokens.
"""

import argparse
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[1]))
from small_models import fit, llama_config, pad_rows, piece_tokenizer, save

CONTEXT_TOKENS = 64
WIDTH = 6
"""Characters of a number; longer ones are cut."""
PIECES = ["Reference:", "Answer:", "Score:", " ", "\n", "-", *"0123456789"]
PIECE = re.compile(r"Reference:|Answer:|Score:|[0-9]|.|\n")
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The model was trained on the bare text, so that is what a chat comes to."""


def question(reference: str, answer: str) -> str:
    """The same text as `judge.jinja`: both right-aligned, so that digits to compare are equally far apart."""
    return f"Reference: {reference[:WIDTH]:>{WIDTH}}\nAnswer: {answer[:WIDTH]:>{WIDTH}}\nScore:"


def draw(rng: random.Random) -> tuple[str, str]:
    """A question and its verdict; half of the answers are right, the others mostly just miss."""
    number = rng.randint(0, 120)
    right = str(number)
    kind = rng.random()
    if kind < 0.5:
        answer = right
    elif kind < 0.7:
        answer = str(max(-9, number + rng.choice((-3, -2, -1, 1, 2, 3, 10, -10, 20))))
    elif kind < 0.8:
        answer = str(rng.randint(0, 1200))
    elif kind < 0.9:
        position = rng.randrange(len(right))
        answer = right[:position] + rng.choice("0123456789") + right[position + 1 :]
    else:
        answer = "".join(rng.choice("0123456789- \n@") for _ in range(rng.randint(0, WIDTH)))
    return question(right, answer), f" {int(answer == right)}"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The pieces above, each a token; anything else is unknown."""
    return piece_tokenizer(
        PIECES, PIECE.pattern, model_max_length=CONTEXT_TOKENS, chat_template=CHAT_TEMPLATE
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = llama_config(
        tokenizer,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def encode(tokenizer: PreTrainedTokenizerFast, pairs: Sequence[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """Ids and labels `[B, T]`; the answer, the verdict and EOS have labels.

    Half of the answers repeat the reference. To foretell them, the model learns to look back at the digit to
    compare with, which the verdict alone teaches only slowly.
    """
    rows = []
    starts = []
    answer_id = tokenizer.convert_tokens_to_ids("Answer:")
    for prompt, verdict in pairs:
        prompt_ids = tokenizer(prompt)["input_ids"]
        verdict_ids = tokenizer(verdict)["input_ids"]
        rows.append([*prompt_ids, *verdict_ids, tokenizer.eos_token_id])
        starts.append(prompt_ids.index(answer_id) + 1)
    return pad_rows(rows, starts, tokenizer.pad_token_id)


def accuracy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> float:
    """Share of 4,000 fresh questions whose likeliest verdict is right."""
    ids_BT, _ = encode(tokenizer, [draw(rng) for _ in range(4000)])
    score_B = (ids_BT == tokenizer.convert_tokens_to_ids("Score:")).int().argmax(1)
    rows_B = torch.arange(len(ids_BT))
    with torch.inference_mode():
        guesses_BT = model(input_ids=ids_BT).logits.argmax(-1)
    # "Score:" is followed by a space, and that by the verdict, which the space's position foretells.
    return (guesses_BT[rows_B, score_B + 1] == ids_BT[rows_B, score_B + 2]).float().mean().item()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make the small judge of the demo.")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "model", help="folder to write into"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens", flush=True)
    one_batch = lambda: [encode(tokenizer, [draw(rng) for _ in range(256)])]  # noqa: E731
    fit(model, args.steps, 3e-3, one_batch, warmup_steps=50, least_lr=0.02)
    print(f"right verdicts: {accuracy(model, tokenizer, rng):.2%}", flush=True)
    save(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
