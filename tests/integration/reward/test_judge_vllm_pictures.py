"""A judge that sees, behind a real vLLM server that `local` starts: it reads the picture of each sample."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from examples.small_vision_models import make_vision_model
from tests.integration.reward.test_model_rewards import num_scores, scores_of
from tests.support.pictures import noise_png
from tests.support.runs import ServiceRun
from tests.support.seen_samples import store_picture
from tests.support.trajectories import make_config, make_trajectory
from tests.support.vllm_machine import need_vllm
from tests.support.waiting import wait_until
from tidemill.common.config.images import ImagesConfig
from tidemill.common.images.processor import load_processor
from tidemill.common.images.store import ImageStore
from tidemill.common.process.vllm_machine import OWN_TORCHVISION
from tidemill.common.streams import append
from tidemill.common.wire.messages import ScoreStatus

need_vllm()
if find_spec("torchvision") is None and not (OWN_TORCHVISION / "torchvision").is_dir():
    pytest.fail("torchvision is not here: make torchvision", pytrace=False)

FAMILY = "qwen2_5_vl"
NUM_WORDS = 6
ARGS = ["--enforce-eager", "--max-num-seqs", "4", "--max-model-len", "128"]
LENGTH = "def read(words):\n    return float(len(words))\n"


def greedy(folder: Path, png: bytes, text: str) -> str:
    """What transformers writes of a picture and a text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = load_processor(str(folder), ImagesConfig())
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids, ((first, count),) = processor.expand(tokenizer(rendered)["input_ids"], [png])
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    row = [int(each) for each in ids]
    for _ in range(NUM_WORDS):
        types = torch.zeros(1, len(row), dtype=torch.long)
        types[0, first : first + count] = 1
        inputs: dict[str, Any] = processor.pixels([png])
        logits = model(
            input_ids=torch.tensor([row]), mm_token_type_ids=types, use_cache=False, **inputs
        ).logits[0, -1]
        row.append(int(logits.argmax()))
    return str(tokenizer.decode(row[len(ids) :], skip_special_tokens=True))


def write_normalisation(folder: Path) -> None:
    """As in folders of the hub. Where means stand in the processor's class alone, transformers normalises by
    these, and vLLM's server does not at all."""
    processor: Any = load_processor(str(folder), ImagesConfig()).image_processor
    path = folder / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    settings |= {"image_mean": list(processor.image_mean), "image_std": list(processor.image_std)}
    path.write_text(json.dumps(settings))


async def test_a_local_judge_reads_the_picture_of_each_sample(tmp_path: Path) -> None:
    folder = make_vision_model(tmp_path / "model", FAMILY, seed=3)
    write_normalisation(folder)
    (tmp_path / "length.py").write_text(LENGTH)
    judge = {
        "servers": "eye",
        "template": "{{ prompt }}",
        "max_tokens": NUM_WORDS,
        "extra_body": {"ignore_eos": True},
        "verdict": {"function": f"{tmp_path}/length.py:read"},
    }
    config = make_config(
        run_id="test",
        images={},
        servers={"eye": {"model": str(folder), "local": {"args": ARGS}}},
        reward={"rewards": {"eye": {"judge": judge, "timeout_s": 120.0}}},
    )
    files = [noise_png(0), noise_png(1), noise_png(0)]
    prompt = [{"role": "user", "content": "what"}]
    async with ServiceRun(tmp_path, config) as run:
        run.run_dir.mkdir(exist_ok=True)
        store = ImageStore(run.run_dir)
        samples = [
            make_trajectory(ticket, images=(store_picture(store, png, 0),), extra={"prompt": prompt})
            for ticket, png in enumerate(files)
        ]
        run.start("reward.replica", "replica", arguments=("--servers", "eye"))
        run.start("reward", "worker")
        await append(run.broker, run.keys.trajectories(), *samples)
        await wait_until(lambda: num_scores(run, len(samples)), 400, "all scores")
        scores = {score.ticket: score for score in await scores_of(run)}
    assert {score.status for score in scores.values()} == {ScoreStatus.OK}, scores
    judgements = [scores[ticket].detail["eye"]["judgement"] for ticket in range(3)]
    expected = [greedy(folder, png, "what") for png in files]
    assert judgements == expected
    assert judgements[0] != judgements[1], "pictures that the model tells apart"
