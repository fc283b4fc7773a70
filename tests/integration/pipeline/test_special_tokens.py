"""Whole runs of a model whose thoughts are marked by special tokens: rewards, a judge, an environment."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.misbehaving import MisbehavingServer
from tests.support.models import PIECES
from tests.support.runs import ServiceRun, simulated_config
from tests.support.training import messages
from tidemill.common.wire.messages import Score, Trajectory

WORDS = [*PIECES[:3], "[THINK]", "[/THINK]", *PIECES[5:]]
"""A vocabulary in which two words became the marks of a thought."""
OPEN = 3
CLOSE = 4
END = 1
ENVIRONMENT = """
import json
from pathlib import Path

class Echo:
    def reset(self, row):
        self.num_heard = 0

    def step(self, text):
        self.num_heard += 1
        with Path(__file__).with_name("heard").open("a") as file:
            file.write(json.dumps(text) + chr(10))
        return "w9", 0.0, self.num_heard == 2
"""
REWARD = """
def compute_score(solution_str, extra_info):
    thought = extra_info.get("thought")
    is_parted = thought is not None and "THINK]" not in solution_str + thought
    return {"score": float(len(solution_str.split())), "is_parted": float(is_parted),
            "thought": -1.0 if thought is None else float(len(thought.split()))}
"""


def write_marked_tokenizer(folder: Path) -> None:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    tokenizer.save_pretrained(folder)


def parted(ids: list[int]) -> tuple[str, str]:
    """Thought and answer of one turn, from its ids alone."""
    is_open = CLOSE in ids and OPEN not in ids[: ids.index(CLOSE)]
    thought: list[str] = []
    answer: list[str] = []
    for token in ids:
        if token in (OPEN, CLOSE):
            is_open = token == OPEN
        elif token != END or token != ids[-1]:
            (thought if is_open else answer).append(WORDS[token])
    return " ".join(thought), " ".join(answer)


@pytest.mark.parametrize("special_tokens", ["auto", "shown", "hidden"])
async def test_rewards_and_judges_see_of_a_completion_what_the_run_says(tmp_path, special_tokens):
    (tmp_path / "marked.py").write_text(REWARD)
    async with MisbehavingServer() as judge:
        config = simulated_config(
            tmp_path,
            model__special_tokens=special_tokens,
            rollout__engine="transformers",
            servers={"judge": {"model": "m", "base_urls": [judge.url]}},
            reward={
                "processes": 1,
                "rewards": {
                    "own": {"function": f"{tmp_path / 'marked.py'}:compute_score"},
                    "judge": {
                        "judge": {
                            "servers": "judge",
                            "template": "<{{ thought }}><{{ completion }}>",
                            "verdict": {"regex": "Score: (.*)"},
                        }
                    },
                },
            },
            trainer__steps=2,
        )
        write_marked_tokenizer(tmp_path / "model")
        async with ServiceRun(tmp_path, config) as run:
            run.start_all()
            await run.trained()
            await run.stop_all("rollout", "reward")
            samples = await messages(run.broker, run.keys.trajectories(), Trajectory)
            scores = {score.key: score for score in await messages(run.broker, run.keys.scores(), Score)}
        asked = {request["messages"][-1]["content"] for request in judge.requests}
    is_parted = special_tokens == "auto"
    for sample in samples:
        thought, answer = parted(sample.completion_ids.tolist())
        if is_parted:
            words = " ".join((sample.thought or "").split()), " ".join(sample.text.split())
            assert words == (thought, answer)
        else:
            assert sample.thought is None
            ids = sample.completion_ids.tolist()
            marks = [token for token in ids if token in (OPEN, CLOSE)]
            assert sample.text.count("THINK]") == len(marks) * (special_tokens == "shown")
        assert f"<{sample.thought or ''}><{sample.text}>" in asked
        components = scores[sample.key].components
        assert components["own/is_parted"] == float(is_parted)
        assert components["own/thought"] == (len(thought.split()) if is_parted else -1.0)
    assert any(OPEN in sample.completion_ids for sample in samples), "the model marks thoughts"


async def test_an_environment_hears_answers_alone(tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(ENVIRONMENT)
    config = simulated_config(
        tmp_path,
        rollout__engine="transformers",
        rollout__environment={"use": f"{tmp_path / 'echo.py'}:Echo"},
        rollout__sampling={"max_tokens": 8},
        trainer__steps=1,
    )
    write_marked_tokenizer(tmp_path / "model")
    async with ServiceRun(tmp_path, config) as run:
        run.start_all()
        await run.trained()
        await run.stop_all("rollout", "reward")
        samples = await messages(run.broker, run.keys.trajectories(), Trajectory)
    heard = sorted(json.loads(line) for line in (tmp_path / "heard").read_text().splitlines())
    said: list[dict[str, Any]] = [
        message
        for sample in samples
        for message in (sample.session.messages if sample.session else ())
        if message["role"] == "assistant"
    ]
    assert heard == sorted(message["content"] for message in said)
    assert not any("THINK]" in text for text in heard)
    assert any(message.get("reasoning_content") for message in said)
