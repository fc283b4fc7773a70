"""Make the model and the data of the guessing demo.

The model is a Llama of about a hundred thousand parameters. It is shown games of a careless player, who
knows that an answer is a number, and does not listen to what he is told. So it knows how the game goes and
not how to win it: that is what the run has to bring out.

    python examples/guess/make_model.py            # writes beside this file; under a minute on one core

The data files are a function of the arguments alone. So are the weights, on one machine with one number of
threads. Shape legend: B games, T tokens.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from game import GUESSES, NUMBERS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
WORDS = ["guess", "higher", "lower", "number?"]
CONTEXT_TOKENS = 32
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
    """A small Llama, with nothing that an inference engine might not support."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=CONTEXT_TOKENS,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            dtype=torch.float32,
        )
    )


def careless_game(rng: random.Random) -> list[str]:
    """The words of one game; the player's turns end with EOS."""
    number = rng.choice(NUMBERS)
    words = [PROMPT]
    for _ in range(GUESSES):
        guess = rng.choice(NUMBERS)
        words += [str(guess), EOS]
        if guess == number:
            break
        words.append("higher" if guess < number else "lower")
    return words


def train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random, steps: int
) -> None:
    """Imitate the careless player."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        games = [tokenizer.convert_tokens_to_ids(careless_game(rng)) for _ in range(128)]
        width = max(map(len, games))
        ids_BT = torch.full((len(games), width), tokenizer.pad_token_id)
        labels_BT = torch.full_like(ids_BT, -100)
        for row, game in enumerate(games):
            ids_BT[row, : len(game)] = torch.tensor(game)
            labels_BT[row, 1 : len(game)] = ids_BT[row, 1 : len(game)]
        loss = model(input_ids=ids_BT, labels=labels_BT).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:4d}/{steps}  loss {loss.item():.3f}", flush=True)


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
    parser.add_argument("--steps", type=int, default=150, help="steps of imitation")
    args = parser.parse_args(argv)
    rng = random.Random(args.seed)
    write_rows(args.out / "train.jsonl", [rng.choice(NUMBERS) for _ in range(512)])
    write_rows(args.out / "eval.jsonl", [*NUMBERS] * 16)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens", flush=True)
    train(model, tokenizer, rng, args.steps)
    model.save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")
    (args.out / "model" / "model.safetensors").chmod(0o644)  # written as 0600; workers may be another user


if __name__ == "__main__":
    main()
