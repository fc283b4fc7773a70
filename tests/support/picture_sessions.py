"""Players of sessions that show pictures, with a real engine or a script."""

import asyncio
import contextlib
import io
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as PilImage
from transformers import AutoTokenizer

from tests.support.models import run_config
from tests.support.picture_samples import IMAGES, PictureMaker
from tests.support.vision_models import copy_vision_model
from tidemill.common.config.run import RunConfig
from tidemill.common.errors import StoreError
from tidemill.common.images.store import ImageStore
from tidemill.common.wire.images import Image
from tidemill.common.wire.messages import SamplingParams, Ticket, Trajectory
from tidemill.services.rollout.engines.engine import Engine, Generation, GenerationRequest, Picture
from tidemill.services.rollout.engines.transformers import TransformersEngine
from tidemill.services.rollout.environments import build_player
from tidemill.services.rollout.sessions.pictures import SessionPictures
from tidemill.services.rollout.sessions.player import Played, Player

TURN_TOKENS = 5
CALLS = (
    "{%- for call in message.tool_calls or [] -%}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{%- endfor -%}"
)
"""What a template writes of a message's calls."""
SAMPLING = SamplingParams(max_tokens=TURN_TOKENS)


def take_store_away(monkeypatch: pytest.MonkeyPatch, method: str, seconds: float) -> None:
    """From the first call of `put` or `read` on, that fails for so long, as where the store is away."""
    away_until: list[float] = []
    use = getattr(ImageStore, method)

    def use_later(store: ImageStore, picture: Any) -> Any:
        if not away_until:
            away_until.append(time.monotonic() + seconds)
        if time.monotonic() < away_until[0]:
            raise StoreError("the store is away")
        return use(store, picture)

    monkeypatch.setattr(ImageStore, method, use_later)


def vision_config(folder: Path, environment: dict[str, Any], **images: Any) -> RunConfig:
    bounds = IMAGES.model_dump(exclude_unset=True) | images
    rollout = {"engine": "transformers", "num_threads": 1, "environment": {"attempts": 1} | environment}
    rollout["sampling"] = {"max_tokens": TURN_TOKENS, "temperature": 1.0}
    return run_config(folder, model={"max_model_len": 400}, rollout=rollout, images=bounds)


def folder_of(tmp_path: Path, family: str = "qwen2_5_vl") -> Path:
    """A model folder whose chat template writes calls of tools, too."""
    folder = tmp_path / "model"
    if not folder.exists():
        copy_vision_model(folder, family)
        template = folder / "chat_template.jinja"
        template.write_text(template.read_text().replace("<|im_end|>", f"{CALLS}<|im_end|>"))
    return folder


class Stage:
    """A folder of a model that sees, the run's store of pictures, and players of one environment."""

    def __init__(self, tmp_path: Path, family: str = "qwen2_5_vl", **environment: Any) -> None:
        self.run_dir = tmp_path
        self.folder = folder_of(tmp_path, family)
        self.maker = PictureMaker(self.folder, tmp_path)
        images = environment.pop("images", {})
        self.config = vision_config(self.folder, environment, **images)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(self.folder)
        self.requests: list[GenerationRequest] = []

    def ticket(self, pictures: Sequence[bytes] = (), truth: str = "1", **fields: Any) -> Ticket:
        """A question with these pictures at its beginning, as the trainer issues it."""
        places = [{"type": "image"}, {"type": "text", "text": "! "}] * len(pictures)
        prompt = [{"role": "user", "content": [*places, {"type": "text", "text": "what is it?"}]}]
        ids, images = self.first_prompt(prompt, pictures)
        settings = {"ticket": 1, "step": 0, "min_version": 0, "group_size": 4, "sampling": SAMPLING} | fields
        return Ticket(
            prompt_ids=np.asarray(ids, np.int32),
            images=images,
            ground_truth=truth,
            extra={"prompt": prompt},
            **settings,
        )

    def first_prompt(
        self, prompt: list[dict[str, Any]], pictures: Sequence[bytes]
    ) -> tuple[list[int], tuple[Image, ...]]:
        tokenizer = self.tokenizer
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        expanded, spans = self.maker.processor.expand(ids, pictures)
        images = []
        for png, (first, num_tokens) in zip(pictures, spans, strict=True):
            width, height = PilImage.open(io.BytesIO(png)).size
            about = {"digest": self.maker.store.put(png), "num_bytes": len(png)}
            span = {"first": first, "num_tokens": num_tokens}
            images.append(Image(**about, width=width, height=height, **span))
        return expanded.tolist(), tuple(images)

    @contextlib.asynccontextmanager
    async def player(self) -> AsyncIterator[Player]:
        """A started player."""
        tokenizer = self.tokenizer
        player = build_player(self.config, lambda ids: str(tokenizer.decode(ids)), run_dir=self.run_dir)
        await player.start()
        try:
            yield player
        finally:
            await player.close()

    @contextlib.asynccontextmanager
    async def engine(self) -> AsyncIterator[TransformersEngine]:
        """A started engine."""
        engine = TransformersEngine(self.config)
        await engine.start()
        try:
            yield engine
        finally:
            await engine.close()

    def asking(self, player: Player, engine: Engine, name: str) -> Any:
        """What a worker does for a turn of a session: read its pictures, and ask the engine."""

        async def ask(
            ids: Sequence[int], sampling: SamplingParams, on_tokens: Any = None, images: Sequence[Image] = ()
        ) -> Generation:
            files = await player.pictures.read(images)
            seen = tuple(map(Picture, images, files))
            number = len(self.requests)
            request = GenerationRequest(f"{name}-{number}", list(ids), sampling, pictures=seen)
            self.requests.append(request)
            # A model with random weights hardly ever ends a turn, and a turn that is cut ends its session.
            return replace(await engine.generate(request), finish="stop")

        return ask


def trajectory_of(ticket: Ticket, played: Played, index: int = 0) -> Trajectory:
    about = {name: getattr(ticket, name) for name in ("ticket", "step", "group_size", "ground_truth")}
    return Trajectory(**about, index=index, **played.fields())


class Script:
    """Says these lines, in turn, and notes the pictures of each question."""

    def __init__(self, tokenizer: Any, *lines: str) -> None:
        self.tokenizer = tokenizer
        self.lines = list(lines)
        self.asked: list[tuple[list[int], tuple[Image, ...]]] = []

    async def __call__(
        self,
        ids: Sequence[int],
        sampling: SamplingParams,
        on_tokens: Any = None,
        images: Sequence[Image] = (),
    ) -> Generation:
        self.asked.append((list(ids), tuple(images)))
        line = self.lines.pop(0)
        # Character by character: a model never samples the tokens of pictures, and may spell their names.
        pieces = [*line] if "<|" in line else [line]
        said = [token for piece in pieces for token in self.tokenizer.encode(piece, add_special_tokens=False)]
        said.append(self.tokenizer.eos_token_id)
        return Generation(said, [-0.5] * len(said), ((len(self.asked), 0),), "stop")

    def reading(self, pictures: SessionPictures) -> Any:
        """The same for a worker, which reads the pictures of a turn for its engine."""

        async def ask(*question: Any, images: Sequence[Image] = ()) -> Generation:
            await pictures.read(images)
            # A limit of time that is over ends what waits, and nothing else.
            await asyncio.sleep(0)
            return await self(*question, images=images)

        return ask
