"""Environments that show pictures. Each process of an environment imports this file: it needs no torch."""

import io
from pathlib import Path
from typing import Any

from PIL import Image as PilImage

from tests.support.vision import png_of

THIS = str(Path(__file__).resolve())


def picture(seed: int, width: int = 56, height: int = 56) -> PilImage.Image:
    """A picture of noise, as PIL has it."""
    return PilImage.open(io.BytesIO(png_of(seed, width, height)))


class Gallery:
    """Shows a picture after each answer, in each of the forms that are taken."""

    resumable = True

    def __init__(self, rounds: int = 2, **message: Any) -> None:
        """`message`: what it says in place of a picture, such as `content` alone."""
        self.rounds = rounds
        self.message = message
        self.number = 0

    def reset(self, row: dict[str, Any]) -> None:
        self.first = int(row["ground_truth"])

    def step(self, text: str) -> tuple[Any, float, bool]:
        self.number += 1
        if self.number > self.rounds:
            return None, 1.0, True
        if self.message:
            return [{"role": "user", **self.message}], 0.5, False
        seed = 100 * self.first + self.number
        if self.number % 2:
            text_block = {"type": "text", "text": "next"}
            return [text_block, {"type": "image", "image": picture(seed)}], 0.5, False
        content = [{"type": "image", "bytes": png_of(seed, 84, 56)}, {"type": "text", "text": "and?"}]
        return [{"role": "user", "content": content}], 0.5, False

    def mark(self) -> dict[str, int]:
        return {"number": self.number, "first": self.first}

    def restore(self, mark: dict[str, int]) -> None:
        self.number = mark["number"]
        self.first = mark["first"]


class Repeated(Gallery):
    """The same for the other way to go on: it is asked again."""

    resumable = False
    repeatable = True


class OwnChat(Gallery):
    """Begins with a chat of its own: the row's picture, then one that it draws."""

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        super().reset(row)
        content = [
            {"type": "text", "text": "look: "},
            {"type": "image"},
            {"type": "text", "text": " and "},
            {"type": "image", "image": picture(77)},
        ]
        return [{"role": "user", "content": content}]


class Camera:
    """TRL's form: a tool returns a picture."""

    def reset(self, **row: Any) -> str:
        return " Look twice."

    def look(self, where: str) -> list[dict[str, Any]]:
        """
        Take a picture.

        Args:
            where: The direction.
        """
        if where == "nowhere":
            raise ValueError("there is nothing")
        text = {"type": "text", "text": f"{where}:"}
        return [text, {"type": "image", "image": picture(len(where))}]

    def get_reward(self) -> float:
        return 1.0
