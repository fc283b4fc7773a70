"""Samples with pictures for the trainer, and what a plain pass of transformers over one of them gives."""

import copy
import io
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as PilImage
from transformers import AutoModelForImageTextToText
from transformers.models.llama import modeling_llama
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl

from tests.support.rank_runs import policy_on
from tests.support.samples import sample_of
from tests.support.vision import image_of, png_of
from tidemill.common.config.images import ImagesConfig
from tidemill.common.config.run import ModelConfig
from tidemill.common.config.trainer import TrainerConfig
from tidemill.common.images.processor import load_processor
from tidemill.common.images.store import ImageStore
from tidemill.common.wire.images import Image, images_of
from tidemill.services.trainer.groups.sample import Sample, SegmentTokens
from tidemill.services.trainer.policy.fsdp.ranks import Ranks
from tidemill.services.trainer.policy.model_loading import load_model
from tidemill.services.trainer.policy.options import PictureSettings
from tidemill.services.trainer.policy.transformers_policy import TransformersPolicy

IMAGES = ImagesConfig(max_pixels=28 * 28 * 16)
SIZES = ((56, 56), (84, 56), (40, 100))
"""Widths and heights."""
TEXT_IDS = 90
"""Ids below it are characters."""


def compute_in_float64(monkeypatch: Any) -> None:
    """Without these changes norms, and rotations in towers, compute in float32 whatever the weights are: the
    gradients of samples that share something are added before they are rounded there, and not after."""

    def norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight * hidden * (hidden.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()

    def rotate(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        half = modeling_qwen3_vl.rotate_half
        wide_cos = cos.unsqueeze(-2).to(q.dtype)
        wide_sin = sin.unsqueeze(-2).to(q.dtype)
        return q * wide_cos + half(q) * wide_sin, k * wide_cos + half(k) * wide_sin

    for kind in (
        modeling_llama.LlamaRMSNorm,
        modeling_qwen2_5_vl.Qwen2_5_VLRMSNorm,
        modeling_qwen3_vl.Qwen3VLTextRMSNorm,
    ):
        monkeypatch.setattr(kind, "forward", norm)
    for module in (modeling_qwen2_5_vl, modeling_qwen3_vl):
        monkeypatch.setattr(module, "apply_rotary_pos_emb_vision", rotate)


class PictureMaker:
    """Makes samples of a model folder, whose pictures are in a run's store."""

    def __init__(self, folder: Path, run_dir: Path) -> None:
        self.folder = folder
        self.settings = PictureSettings(str(folder), IMAGES, run_dir)
        self.processor = load_processor(str(folder), IMAGES)
        self.store = ImageStore(run_dir)
        self._plain_models: dict[torch.dtype, Any] = {}

    @cached_property
    def _loaded(self) -> Any:
        """The folder's model as a trainer loads it; each policy gets a copy."""
        return load_model(ModelConfig(path=str(self.folder), max_model_len=256), torch.device("cpu"))

    def sample(
        self,
        key: tuple[int, int],
        pictures: Sequence[bytes],
        num_tokens: int = 6,
        seed: int = 0,
        prompt_seed: int | None = None,
        **fields: Any,
    ) -> Sample:
        """Text, each picture and text behind it, and a completion of random ids."""
        rng = np.random.default_rng(seed if prompt_seed is None else prompt_seed)
        ids = rng.integers(3, TEXT_IDS, 4).tolist()
        for _ in pictures:
            ids += [self.processor.placeholder_id, *rng.integers(3, TEXT_IDS, 5).tolist()]
        expanded, spans = self.processor.expand(ids, list(pictures))
        images = []
        for png, (first, count) in zip(pictures, spans, strict=True):
            self.store.put(png)
            images.append(image_of(png, first, count))
        completion = np.random.default_rng(seed + 1000).integers(3, TEXT_IDS, num_tokens)
        logprobs = np.full(num_tokens, -3.0)
        fields = {"advantage": float(rng.normal()) + 0.1, "images": tuple(images)} | fields
        return sample_of(key, expanded, completion, logprobs, **fields)

    def session(self, key: tuple[int, int], later: Sequence[bytes], seed: int = 0) -> Sample:
        """A sample with a segment for each picture of `later`: after a prompt with a picture and the model's
        first turn, the same in all segments, the environment shows it, and the model takes another turn."""
        rng = np.random.default_rng(seed)
        first = self.sample(key, [png_of(0)], num_tokens=3, seed=seed)
        prompt_ids = first.prompt_ids
        start = len(prompt_ids) + 3
        segments = []
        completions: list[Any] = []
        masks = []
        images: list[Image] = []
        for number, png in enumerate(later):
            text = rng.integers(3, TEXT_IDS, 6).tolist()
            context, ((offset, count),) = self.processor.expand(
                [*text[:2], self.processor.placeholder_id, text[2]], [png]
            )
            width, height = PilImage.open(io.BytesIO(png)).size
            reference = {"digest": self.store.put(png), "num_bytes": len(png)}
            images += (image.model_copy(update={"segment": number}) for image in first.images)
            images.append(
                Image(
                    **reference,
                    width=width,
                    height=height,
                    first=start + offset,
                    num_tokens=count,
                    segment=number,
                )
            )
            turn = text[3:]
            completions += [*first.completion_ids, *context, *turn]
            masks += [True] * 3 + [False] * len(context) + [True] * len(turn)
            segments.append(SegmentTokens(prompt_ids, 3 + len(context) + len(turn)))
        mask = np.asarray(masks, np.bool_)
        logprobs = np.where(mask, -3.0, 0.0).astype(np.float32)
        sample = Sample(
            key,
            tuple(segments),
            np.asarray(completions, np.int32),
            mask,
            {"rollout_logprobs": logprobs},
            images=tuple(images),
        )
        sample.set_advantage(float(rng.normal()) + 0.1)
        return sample

    def samples(self) -> list[Sample]:
        """Two groups of one picture, of which some share the beginning of their completions or differ in the
        picture alone; one of two pictures; one of text; sessions with pictures in later turns and forks."""
        first = png_of(0)
        second = png_of(1)
        samples = [
            self.sample((0, 0), [first], seed=0, prompt_seed=0),
            self.sample((0, 1), [first], seed=1, prompt_seed=0),
            # Other pixels behind the same ids.
            self.sample((0, 2), [second], seed=0, prompt_seed=0),
            self.sample((1, 0), [png_of(2, *SIZES[1])], 9, seed=2),
        ]
        pair = [png_of(3, *SIZES[2]), first]
        samples.append(self.sample((2, 0), pair, 4, seed=3, prompt_seed=3))
        samples.append(self.sample((2, 1), pair, 8, seed=4, prompt_seed=3))
        samples.append(self.sample((3, 0), [], 7, seed=5))
        samples.append(self.session((4, 0), [second], seed=6))
        samples.append(self.session((4, 1), [png_of(2, *SIZES[1]), first], seed=6))
        return samples

    def policy(
        self, dtype: torch.dtype = torch.float64, ranks: Ranks | None = None, **trainer: Any
    ) -> TransformersPolicy:
        """That of one process, or of one of these ranks."""
        trainer.setdefault("optimizer", {"lr": 1e-2})
        config = TrainerConfig.model_validate(trainer | {"num_ranks": ranks.size if ranks else 1})
        model = copy.deepcopy(self._loaded)
        if dtype == torch.float64:
            model = model.double()
        return policy_on(
            ranks,
            model,
            config,
            dtype=dtype,
            temperature=1.0,
            max_completion_tokens=16,
            pictures=self.settings,
        )

    def plain_model(self, dtype: torch.dtype = torch.float64) -> Any:
        """The folder's model as transformers loads it; each time another copy."""
        if dtype not in self._plain_models:
            model: Any = AutoModelForImageTextToText.from_pretrained(self.folder, dtype=dtype)
            self._plain_models[dtype] = model.eval()
        return copy.deepcopy(self._plain_models[dtype])

    def plain_logprobs(self, model: Any, sample: Sample) -> torch.Tensor:
        """Of the completion tokens, by transformers' own pass over each segment of this sample alone, without
        the ids that engines never sample; 0 at the tokens of pictures. Shape [T]."""
        of_segments = []
        for number, (segment, row) in enumerate(zip(sample.segments, sample.rows, strict=True)):
            images = images_of(sample.images, number)
            of_segments.append(self._plain_logprobs(model, row, len(segment.prompt_ids), images))
        return torch.cat(of_segments)

    def _plain_logprobs(self, model: Any, row: Any, num_prompt: int, images: Sequence[Image]) -> torch.Tensor:
        ids = torch.from_numpy(row.astype(np.int64))[None]
        inputs: dict[str, Any] = {}
        if images:
            inputs = self.processor.pixels([self.store.read(image) for image in images])
            types = torch.zeros_like(ids)
            for image in images:
                types[0, image.first : image.end] = 1
            if self.processor.family.token_types:
                inputs[self.processor.family.token_types] = types
        first = num_prompt - 1
        logits = model(input_ids=ids, use_cache=False, **inputs).logits[0, first:-1]
        if hasattr(model.model, "rope_deltas"):
            model.model.rope_deltas = None  # a later pass would take them
        banned_ids = torch.tensor(self.processor.banned_ids)
        logprobs = logits.index_fill(-1, banned_ids, -torch.inf).log_softmax(-1)
        targets = ids[0, first + 1 :]
        # Tokens of pictures have no probability, and no gradient may come from them.
        return logprobs.gather(-1, targets[:, None]).squeeze(-1).nan_to_num(neginf=0.0)
