"""Folders of small models that see. A process makes each once, and every test gets a copy."""

import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from examples.small_vision_models import make_vision_model


def copy_vision_model(folder: Path, family: str) -> Path:
    """The same files that `make_vision_model` writes, in a folder of the test's own; returns it."""
    shutil.copytree(_original(family).name, folder, dirs_exist_ok=True)
    # Making it would seed torch, too.
    torch.manual_seed(0)
    return folder


@cache
def _original(family: str) -> "TemporaryDirectory[str]":
    folder = TemporaryDirectory(prefix="vision-model-")
    make_vision_model(Path(folder.name), family)
    return folder
