"""Runs of services on rows with pictures."""

import json
from pathlib import Path
from typing import Any

from examples.small_vision_models import make_vision_model
from tests.support.runs import simulated_config
from tests.support.vision import file_of, noise
from tidemill.common.config import RunConfig

STEPS = 3
GROUPS = 4
QUESTION = "<image>how many?"


def picture_config(folder: Path, rows: list[dict[str, Any]], **overrides: Any) -> RunConfig:
    """Services without a model's passes, on the rows of a family that sees."""
    data = folder / "pictures.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = make_vision_model(folder / "seeing", "qwen2_5_vl", words=("how many?", "user", "assistant"))
    settings = {
        "model__path": str(model),
        "model__max_model_len": 128,
        "data__train": str(data),
        "data__max_prompt_tokens": 64,
        "images": {"max_pixels": 28 * 28 * 16},
        "trainer__steps": STEPS,
        "trainer__groups_per_step": GROUPS,
        "trainer__checkpoint_every": 1,
    }
    return simulated_config(folder, **(settings | overrides))


def row_of(picture: str) -> dict[str, Any]:
    """A row with a picture by its path or URL."""
    return {"prompt": [{"role": "user", "content": QUESTION}], "images": [picture], "ground_truth": "2"}


def draw_rows(folder: Path, count: int) -> list[dict[str, Any]]:
    """Rows with a picture each, of different sizes."""
    for number in range(count):
        (folder / f"{number}.png").write_bytes(file_of(noise(56 + 28 * (number % 4), 56, seed=number)))
    return [row_of(f"{number}.png") for number in range(count)]
