"""The section `images` against the model's folder and the rows, before anything starts."""

import importlib.util
from collections.abc import Mapping, Sequence

from tidemill.common.config.run import RunConfig
from tidemill.common.config.trainer import DEFAULT_RANK_TOKENS
from tidemill.common.data.dataset import Row
from tidemill.common.data.prompt_text import chat_messages
from tidemill.common.errors import BrokenImageError, ConfigError
from tidemill.common.images.door import ImageDoor
from tidemill.common.images.families import family_of
from tidemill.common.images.no_pictures import IMAGES
from tidemill.common.process.checks import most_picture_tokens
from tidemill.services.console.check.model_folder import ModelFacts

NUM_TRIED = 64
"""Rows of each set whose pictures are decoded; the trainer looks at all as it starts."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def check_pictures(
    config: RunConfig, model: ModelFacts | None, rows: Mapping[str, Sequence[Row]]
) -> list[str]:
    """Notes about pictures of the rows.

    Raises:
        ConfigError: pillow is missing, the model's family is not one that sees or has no image processor, or
            the pictures that were tried cannot be used.
    """
    if config.images is None:
        return []
    if importlib.util.find_spec("PIL") is None:
        raise ConfigError("images needs the package pillow, which is not installed: pip install pillow")
    if model is not None and not model.is_remote:
        family_of(model.model_type)
        if not any((model.path / name).is_file() for name in PROCESSOR_FILES):
            raise ConfigError(
                f"model folder {model.path} has no image processor (none of {', '.join(PROCESSOR_FILES)}); "
                "save it there with processor.save_pretrained."
            )
    notes = []
    for name, of_set in rows.items():
        notes += _try_rows(config, name, of_set[:NUM_TRIED])
    if rows and not any(_has_pictures(of_set[:NUM_TRIED]) for of_set in rows.values()):
        notes.append(
            f"images: none of the first rows has pictures; they are looked for in {' and '.join(IMAGES)} "
            "(data.columns renames them), and in the parts of messages"
        )
    return notes


def bound_tokens(config: RunConfig, model: ModelFacts | None) -> tuple[str, list[str]]:
    """A line that says how many tokens of pictures a prompt, a pass and a step have at most; and notes.

    Raises:
        ConfigError: the image processor cannot be loaded.
    """
    if config.images is None or model is None or model.is_remote:
        return "", []
    trainer = config.trainer
    of_picture = most_picture_tokens(config)
    room = config.data.max_prompt_tokens
    of_prompt = min(config.images.max_per_prompt * of_picture, room)
    micro_batch_tokens = trainer.micro_batch_tokens
    of_pass = max(DEFAULT_RANK_TOKENS if micro_batch_tokens == "auto" else micro_batch_tokens, of_prompt)
    of_step = trainer.groups_per_step * config.largest_group_size * of_prompt
    num_fitting = min(config.images.max_per_prompt, room // of_picture)
    line = (
        f"at most {of_picture:,} tokens each (images.max_pixels), {of_prompt:,} in a prompt, where "
        f"{num_fitting:,} of the largest fit (data.max_prompt_tokens, images.max_per_prompt), {of_pass:,} "
        f"in a pass of the trainer (trainer.micro_batch_tokens), {of_step:,} in a step"
    )
    if num_fitting:
        return line, []
    pixels = config.images.max_pixels * room // of_picture
    return line, [
        f"images: a picture of images.max_pixels ({config.images.max_pixels:,}) may have {of_picture:,} "
        f"tokens, and data.max_prompt_tokens is {room:,}: rows with such pictures are left out. Raise it, or "
        f"set images.max_pixels below {pixels:,}, to which larger pictures are reduced"
    ]


def _has_pictures(rows: Sequence[Row]) -> bool:
    return any(row.images for row in rows)


def _try_rows(config: RunConfig, name: str, rows: Sequence[Row]) -> list[str]:
    assert config.images is not None, "its caller has looked"
    door = ImageDoor(config.images, None)
    broken = []
    num_urls = 0
    for row in rows:
        if row.images and (reason := _reason(config, door, row)):
            broken.append(f"{row.origin}: {reason}")
        num_urls += sum(bool(source.url) for source in row.images)
    notes = []
    if num_urls:
        notes.append(
            f"{name}: pictures of URLs are fetched as the trainer starts ({num_urls} in {len(rows)} rows)"
        )
    if broken and (config.images.broken == "error" or len(broken) == len(rows)):
        raise ConfigError(
            f"{broken[0]}. {len(broken)} of the first {len(rows)} rows of {name} are like this."
        )
    if broken:
        notes.append(
            f"{name}: {len(broken)} of the first {len(rows)} rows are left out for their pictures "
            f"(images.broken), first {broken[0]}"
        )
    return notes


def _reason(config: RunConfig, door: ImageDoor, row: Row) -> str:
    """Why a row cannot be used; empty where it can, as far as can be seen without its URLs."""
    assert config.images is not None, "its caller has looked"
    limit = config.images.max_per_prompt
    if len(row.images) > limit:
        return f"it has {len(row.images)} pictures, more than images.max_per_prompt ({limit})"
    try:
        chat_messages(row, config.data)
    except BrokenImageError as error:
        return str(error)
    pictures = door.take([source for source in row.images if not source.url])
    return next((picture.fault for picture in pictures if picture.fault), "")
