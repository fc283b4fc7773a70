"""Draw the pictures of the demo, with questions about them: coloured shapes to count and to find.

A picture has four cells of 28 by 28 pixels; each is empty, or has a shape in a colour. Everything follows
from the seed, and no picture with several shapes is both held out and in training.

    python examples/shapes/draw.py            # writes `data/` beside this file, some seconds
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

COLOURS = {"red": (220, 40, 40), "green": (40, 160, 60), "blue": (50, 80, 220), "yellow": (235, 200, 40)}
SHAPES = ("circle", "square", "triangle")
PLACES = ("top left", "top right", "bottom left", "bottom right")
CELL = 28
"""Side of a cell in pixels: Qwen2.5-VL makes one token of it."""
MARGIN = 3
COUNT = "How many shapes are there?"
LOCATE = "Where is the shape?"

Cell = tuple[str, str] | None
"""Colour and shape; None: empty."""


@dataclass(frozen=True)
class Question:
    """A question about a picture.

    Example: `cells` of a red circle and three empty ones, `text` "Where is the shape?", `answer` "top left".
    """

    cells: tuple[Cell, ...]
    text: str
    answer: str

    @property
    def counts(self) -> bool:
        """Whether the answer is a number."""
        return self.answer.isdigit()


def draw(cells: Sequence[Cell]) -> Image.Image:
    """The picture of four cells, row by row."""
    picture = Image.new("RGB", (2 * CELL, 2 * CELL), (255, 255, 255))
    pen = ImageDraw.Draw(picture)
    for number, cell in enumerate(cells):
        if cell is None:
            continue
        colour, shape = cell
        x = number % 2 * CELL + MARGIN
        y = number // 2 * CELL + MARGIN
        x_end = x + CELL - 2 * MARGIN - 1
        y_end = y + CELL - 2 * MARGIN - 1
        fill = COLOURS[colour]
        if shape == "circle":
            pen.ellipse((x, y, x_end, y_end), fill=fill)
        elif shape == "square":
            pen.rectangle((x, y, x_end, y_end), fill=fill)
        else:
            pen.polygon([((x + x_end) / 2, y), (x_end, y_end), (x, y_end)], fill=fill)
    return picture


def ask(randomness: random.Random) -> Question:
    """A random picture, and a question that has one answer."""
    kinds = [(colour, shape) for colour in COLOURS for shape in SHAPES]
    is_count = randomness.random() < 0.5
    count = randomness.randrange(5) if is_count else 1
    cells: list[Cell] = [None] * 4
    filled = randomness.sample(range(4), count)
    for number in filled:
        cells[number] = randomness.choice(kinds)
    if is_count:
        return Question(tuple(cells), COUNT, str(count))
    return Question(tuple(cells), LOCATE, PLACES[filled[0]])


def make_questions(number: int, seed: int, without: Sequence[Question] = ()) -> list[Question]:
    """Questions about pictures that are not among those of `without`."""
    randomness = random.Random(seed)
    left_out = {question.cells for question in without}
    questions: list[Question] = []
    while len(questions) < number:
        question = ask(randomness)
        # There are few pictures of a single shape, and one of none.
        if question.cells not in left_out or sum(cell is not None for cell in question.cells) < 2:
            questions.append(question)
    return questions


def write_rows(folder: Path, name: str, questions: Sequence[Question]) -> None:
    """`NAME.jsonl`, with paths of pictures in `NAME/`."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    lines = []
    for number, question in enumerate(questions):
        path = f"{name}/{number:04d}.png"
        draw(question.cells).save(folder / path)
        row = {
            "data_source": "count" if question.counts else "locate",
            "prompt": f"{question.text}<image>",
            "images": [path],
            "ground_truth": question.answer,
            "seed": number,  # for the game of `game.py`
        }
        lines.append(json.dumps(row) + "\n")
    (folder / f"{name}.jsonl").write_text("".join(lines))


def held_out(number: int = 128) -> list[Question]:
    return make_questions(number, seed=1)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw the pictures of the demo.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data", help="folder to write")
    parser.add_argument("--rows", type=int, default=1024, help="rows to train on")
    args = parser.parse_args(argv)
    kept = held_out()
    write_rows(args.out, "eval", kept)
    write_rows(args.out, "train", make_questions(args.rows, 2, kept))


if __name__ == "__main__":
    main()
