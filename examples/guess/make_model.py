"""Make the model and the data of the guessing demo.

The model is a Llama of about a hundred thousand parameters, shown games in two passes, as in examples/arith:

1. *Skill.* A player who halves what is left, and always wins.
2. *Habit.* A careless player, who guesses whatever comes to mind, and thinks in one game of ten only.

What is left knows how the game goes, mostly loses, and has the better game within reach of sampling. The run
has to bring it out from nothing but won and lost: so the demo shows that the pipeline learns, not that a game
is learnt from nothing.

    python examples/guess/make_model.py            # writes beside this file; under a minute on one core

The data files are a function of the arguments alone. So are the weights, on one machine with one number of
threads. Shape legend: B games, T tokens.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from game import GUESSES, NUMBERS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[1]))
from small_models import EOS, PAD, UNK, llama_config, pad_rows, save

WORDS = ["guess", "higher", "lower", "number?"]
CONTEXT_TOKENS = 32
PEAK_LR = 3e-3
PROMPT = "guess"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Each word and each number is one token."""
    pieces = [PAD, EOS, UNK, *WORDS, *map(str, NUMBERS)]
    backend = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(prefix="")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=EOS, pad_token=PAD, unk_token=UNK, model_max_length=CONTEXT_TOKENS
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = llama_config(
        tokenizer,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config)


CARELESS = 0.1
"""Share of the games in which the careless player thinks."""


def play_game(rng: random.Random, plays_well: bool) -> list[str]:
    """The words of one game; the player's turns end with EOS."""
    number = rng.choice(NUMBERS)
    words = [PROMPT]
    low = NUMBERS[0]
    high = NUMBERS[-1]
    for _ in range(GUESSES):
        guess = (low + high) // 2 if plays_well else rng.choice(NUMBERS)
        words += [str(guess), EOS]
        if guess == number:
            break
        words.append("higher" if guess < number else "lower")
        if guess < number:
            low = guess + 1
        else:
            high = guess - 1
    return words


def imitate(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    num_steps: int,
    share_well: float,
) -> None:
    """Imitate a player who plays this share of the games well."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR)
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * (1 - step / num_steps)
        games = [
            tokenizer.convert_tokens_to_ids(play_game(rng, rng.random() < share_well)) for _ in range(128)
        ]
        ids_BT, labels_BT = pad_rows(games, [1] * len(games), tokenizer.pad_token_id)
        loss = model(input_ids=ids_BT, labels=labels_BT).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{num_steps} steps, {share_well:.0%} played well: loss {loss.item():.3f}", flush=True)


def write_rows(path: Path, numbers: Sequence[int]) -> None:
    """Rows in verl's columns."""
    rows = [
        {"prompt": PROMPT, "data_source": "guess", "reward_model": {"ground_truth": str(number)}}
        for number in numbers
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Write model and data."""
    parser = argparse.ArgumentParser(description="Make the small model and the data of the guessing demo.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder to write into")
    parser.add_argument("--seed", type=int, default=0, help="seed of data, weights and training")
    args = parser.parse_args(argv)
    rng = random.Random(args.seed)
    write_rows(args.out / "train.jsonl", [rng.choice(NUMBERS) for _ in range(512)])
    write_rows(args.out / "eval.jsonl", [*NUMBERS] * 16)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens", flush=True)
    imitate(model, tokenizer, rng, 150, share_well=1.0)
    imitate(model, tokenizer, rng, 100, share_well=CARELESS)
    save(model, tokenizer, args.out / "model")


if __name__ == "__main__":
    main()
