"""Pictures of coloured noise, prompts that have them, and what transformers computes of such a prompt."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

from examples.small_vision_models import SMALL_FAMILIES
from tests.support.versions import Chain
from tests.support.vision import file_of, image_of, noise
from tidemill.common.config.images import ImagesConfig
from tidemill.common.images.processor import PictureProcessor, load_processor
from tidemill.common.wire.messages import SamplingParams
from tidemill.services.rollout.engines.engine import Generation, GenerationRequest, Picture
from tidemill.services.rollout.engines.held_weights import as_tensor

TEXT_NAMES = ("language_model", "model.layers", "embed_tokens", "lm_head", "model.norm")
"""In names of weights that only read text; the others belong to tower and projector."""
UNUSED_NAMES = ("vision_model.encoder.layers.1.", "vision_model.post_layernorm")
"""The same of LLaVA's layers behind the one whose features it takes: training leaves them as they are, and
vLLM does not hold them."""
SIZES = ((56, 56), (90, 60), (64, 120))
"""Width and height: those of the first are the smallest that Qwen's processors leave as they are."""


def noise_png(seed: int, size: tuple[int, int] = SIZES[0]) -> bytes:
    """A picture as the store has it."""
    return file_of(noise(*size, seed))


@dataclass(frozen=True)
class Seeing:
    """A model folder, with its processor and tokenizer."""

    folder: Path
    family: str
    processor: PictureProcessor
    tokenizer: Any

    @classmethod
    def of(cls, folder: Path, family: str) -> "Seeing":
        processor = load_processor(folder, ImagesConfig.model_validate({}))
        return cls(folder, family, processor, AutoTokenizer.from_pretrained(folder))

    def prompt(self, text: str, files: Sequence[bytes]) -> tuple[list[int], tuple[Picture, ...]]:
        """Expanded ids of a text in which `*` stands for the next picture, and the pictures."""
        row = SMALL_FAMILIES[self.family]
        ids = self.tokenizer(text.replace("*", row.picture_text))["input_ids"]
        expanded, spans = self.processor.expand(ids, files)
        images = [image_of(png, *span) for png, span in zip(files, spans, strict=True)]
        pictures = tuple(Picture(image, png) for image, png in zip(images, files, strict=True))
        return expanded.tolist(), pictures

    def request(
        self, name: str, text: str, files: Sequence[bytes] = (), **sampling: Any
    ) -> GenerationRequest:
        ids, pictures = self.prompt(text, files)
        params = SamplingParams.model_validate({"max_tokens": 12} | sampling)
        return GenerationRequest(name, ids, params, pictures=pictures)

    def model(self, dtype: torch.dtype = torch.float32) -> Any:
        return AutoModelForImageTextToText.from_pretrained(self.folder, dtype=dtype).eval()

    @torch.inference_mode()
    def expected(self, model: Any, request: GenerationRequest, generation: Generation) -> list[float]:
        """Logprobs of the completion by one plain pass of transformers over all of it, which computes the
        positions itself, without the ids that are never sampled."""
        ids_1T = torch.tensor([[*request.prompt_ids, *generation.token_ids]])
        inputs = {}
        if request.pictures:
            inputs = self.processor.pixels([picture.png for picture in request.pictures])
            inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
            if self.processor.family.token_types:
                is_pixel_1T = ids_1T == self.processor.placeholder_id
                inputs[self.processor.family.token_types] = is_pixel_1T.int()
        logits_TV = model(input_ids=ids_1T, use_cache=False, **inputs).logits[0]
        if hasattr(model.model, "rope_deltas"):
            model.model.rope_deltas = None  # a later pass would take them
        logits_TV[:, list(self.processor.banned_ids)] = -torch.inf
        logits_TV = logits_TV[len(request.prompt_ids) - 1 : -1] / (request.sampling.temperature or 1.0)
        targets_T1 = torch.tensor(generation.token_ids)[:, None]
        logprobs: list[float] = logits_TV.log_softmax(-1).gather(-1, targets_T1)[:, 0].tolist()
        return logprobs


def mixed_requests(seeing: Seeing) -> list[GenerationRequest]:
    """One, several and no pictures, of different sizes, with different numbers of tokens; the first group has
    four samples."""
    files = [noise_png(seed, size) for seed, size in enumerate(SIZES)]
    return [
        *(seeing.request(f"group{i}", "what is *?", files[:1]) for i in range(4)),
        seeing.request("text", "no picture", max_tokens=16),
        seeing.request("two", "the first * and * the second one", files[1:], max_tokens=5),
        seeing.request("same ids", "what is *?", [noise_png(9)], max_tokens=9),
        seeing.request("again", "*, *, *.", [files[2], files[0], files[2]], temperature=0.7),
        seeing.request("short text", "a", temperature=0.0),
    ]


def write_versions(seeing: Seeing, run_dir: Path) -> tuple[Chain, dict[int, Seeing]]:
    """A chain whose version 0 is the starting model, 1 changes all of it, 2 the tower and projector alone,
    and 3 what reads text alone; and the folder of each version."""
    chain = Chain(run_dir)
    chain.full(0, seeing.folder / "model.safetensors")
    texts = {name for name in chain.tensors for word in TEXT_NAMES if word in name}
    unused = {name for name in chain.tensors for word in UNUSED_NAMES if word in name}
    towers = set(chain.tensors) - texts - unused
    assert len(towers) > 10
    folders = {0: seeing}
    for version, changed in ((1, set(chain.tensors)), (2, towers), (3, texts)):
        chain.delta(version, share=0.05, names=changed)
        folder = run_dir / f"folder{version}"
        shutil.copytree(seeing.folder, folder)
        tensors = {name: as_tensor(info, bits.copy()) for name, (info, bits) in chain.tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        folders[version] = replace(seeing, folder=folder)
    return chain, folders
