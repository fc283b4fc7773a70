"""Special tokens of models with marked thoughts, from engines to trajectories, environments and clients."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import run_config, tiny_llama
from tests.unit.common.run.test_special_tokens import ids_of, tokenizer_of
from tidemill.common.config.environment import EnvironmentConfig
from tidemill.common.wire import codec
from tidemill.common.wire.messages import SamplingParams, Ticket, Trajectory
from tidemill.services.reward.sample import RewardSample
from tidemill.services.rollout.engines import build_engine
from tidemill.services.rollout.engines.engine import Generation
from tidemill.services.rollout.engines.gpu_sharing import GpuSharingEngine
from tidemill.services.rollout.engines.model import ModelEngine, open_model
from tidemill.services.rollout.environments import build_player, load, player
from tidemill.services.rollout.environments.environment import Design
from tidemill.services.rollout.environments.stages import LocalStage
from tidemill.services.rollout.gateway.dialogue import Question
from tidemill.services.rollout.gateway.session import GatewaySession
from tidemill.services.rollout.sessions.player import Player
from tidemill.services.rollout.sessions.template_chat import open_chat

TURNS = {
    "magistral": ["[THINK]2 and 2[/THINK]4</s>", "[THINK]still[/THINK]It is 4.</s>"],
    "gptoss": [
        "<|channel|>analysis<|message|>2 and 2<|end|><|start|>assistant<|channel|>final<|message|>4"
        "<|return|>",
        "<|channel|>analysis<|message|>still<|end|><|start|>assistant<|channel|>final<|message|>It is 4."
        "<|return|>",
    ],
    "gemma4": [
        "<|channel>thought\n2 and 2<channel|>4<turn|>",
        "<|channel>thought\nstill<channel|>It is 4.<turn|>",
    ],
}
ECHO = """
class Echo:
    def reset(self, row):
        self.heard = []

    def step(self, text):
        self.heard.append(text)
        return "sure?", float(len(self.heard)), len(self.heard) == 2

    def get_metrics(self):
        return {"length": float(sum(map(len, self.heard)))}
"""


@pytest.fixture(params=TURNS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(tmp_path: Path, family: str) -> Path:
    tokenizer = tokenizer_of(family)
    tokenizer.save_pretrained(tmp_path)
    model = tiny_llama(vocab_size=len(tokenizer) + 3, max_position_embeddings=4096)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(tmp_path)
    return tmp_path


def config_of(folder: Path, special_tokens: str = "auto", **rollout: Any) -> Any:
    model = {"max_model_len": 4096, "special_tokens": special_tokens}
    return run_config(folder, model=model, rollout={"engine": "transformers"} | rollout)


class Script:
    """Says these turns, one after the other."""

    def __init__(self, tokenizer: Any, turns: Sequence[str]) -> None:
        self.turns = [ids_of(tokenizer, turn) for turn in turns]

    async def __call__(self, ids: Sequence[int], sampling: SamplingParams) -> Generation:
        turn = self.turns.pop(0)
        return Generation(turn, [-0.5] * len(turn), ((0, 0),), "stop")


def engine_of(config: Any) -> ModelEngine:
    """The config's engine with its model's tokenizer; it is not started."""
    engine = build_engine(config, "worker")
    assert isinstance(engine, ModelEngine)
    engine._folder = open_model(config.model)
    return engine


def ticket_of(folder: Path, family: str) -> Ticket:
    return Ticket(
        ticket=0,
        step=0,
        min_version=0,
        group_size=1,
        prompt_ids=open_chat(config_of(folder)).render([{"role": "user", "content": "2+2?"}]),
        extra={"prompt": [{"role": "user", "content": "2+2?"}]},
        sampling=SamplingParams(max_tokens=200),
    )


async def played_by(playing: Player, folder: Path, family: str) -> Trajectory:
    """The trajectory of one play, as it comes off the wire."""
    await playing.start()
    try:
        script = Script(tokenizer_of(family), TURNS[family])
        played = await playing.play(ticket_of(folder, family), "sample", script)
    finally:
        await playing.close()
    trajectory = Trajectory(ticket=0, index=0, step=0, group_size=1, **played.fields())
    return codec.decode(codec.encode(trajectory), Trajectory)


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
@pytest.mark.parametrize(
    ("special_tokens", "is_parted"), [("auto", True), ("parted", True), ("shown", False), ("hidden", False)]
)
async def test_a_completion_of_either_engine_is_read_as_the_run_says(
    folder, family, engine, special_tokens, is_parted
):
    config = config_of(folder, special_tokens, engine=engine)
    engine = engine_of(config)
    trajectory = await played_by(build_player(config, engine.decode, engine.read), folder, family)
    tokenizer = tokenizer_of(family)
    written = ids_of(tokenizer, TURNS[family][0])
    assert trajectory.completion_ids.tolist() == written, "ids stay as they are"
    if is_parted:
        assert (trajectory.text, trajectory.thought) == ("4", "2 and 2")
        return
    assert trajectory.thought is None
    assert trajectory.text == tokenizer.decode(written[:-1], skip_special_tokens=special_tokens == "hidden")


def test_an_engine_that_shares_its_gpu_reads_like_the_one_within(folder, family):
    engine = engine_of(config_of(folder))
    shared = GpuSharingEngine.__new__(GpuSharingEngine)
    shared._engine = engine
    written = ids_of(tokenizer_of(family), TURNS[family][0])
    assert shared.read(written) == engine.read(written)


@pytest.fixture
def on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def stage(config: EnvironmentConfig) -> LocalStage:
        design = load(config)
        assert isinstance(design, Design)
        return LocalStage(design, config.call_timeout_s)

    monkeypatch.setattr(player, "build_stage", stage)


@pytest.mark.parametrize(
    ("special_tokens", "is_parted"), [("auto", True), ("shown", False), ("hidden", False)]
)
async def test_an_environment_hears_the_answer_and_the_messages_have_both(
    on_the_loop, tmp_path, folder, family, special_tokens, is_parted
):
    (tmp_path / "echo.py").write_text(ECHO)
    config = config_of(folder, special_tokens, environment={"use": f"{tmp_path / 'echo.py'}:Echo"})
    engine = engine_of(config)
    trajectory = await played_by(build_player(config, engine.decode, engine.read), folder, family)
    session = trajectory.session
    assert session is not None
    said = [message for message in session.messages if message["role"] == "assistant"]
    if is_parted:
        assert [message["content"] for message in said] == ["4", "It is 4."]
        assert [message["reasoning_content"] for message in said] == ["2 and 2", "still"]
        assert session.metrics["length"] == len("4") + len("It is 4.")
        assert trajectory.thought == "2 and 2\n\nstill"
        assert trajectory.text.startswith("4")
        assert trajectory.text.endswith("It is 4.")
        assert "sure?" in trajectory.text
        sample = RewardSample(trajectory)
        assert sample.fields()["extra_info"]["thought"] == "2 and 2\n\nstill"
        assert sample.conversation[-2]["content"] == "It is 4."
    else:
        assert trajectory.thought is None
        assert all("still" in message["content"] or "2 and 2" in message["content"] for message in said)
        mark = "[THINK]" if family == "magistral" else "channel"
        assert (mark in said[0]["content"]) == (special_tokens == "shown")


@pytest.mark.parametrize("special_tokens", ["auto", "shown", "hidden"])
async def test_a_client_of_the_gateway_gets_the_answer_and_its_history_goes_on(
    folder, family, special_tokens
):
    config = config_of(folder, special_tokens)
    engine = engine_of(config)
    script = Script(tokenizer_of(family), TURNS[family])
    session = GatewaySession(
        open_chat(config),
        engine.decode,
        script,
        SamplingParams(max_tokens=200),
        EnvironmentConfig(),
        4096,
        engine.read,
    )
    asked = [{"role": "user", "content": "2+2?"}]
    first = await session.answer(Question(tuple(asked)))
    history = [*asked, {"role": "assistant", "content": first.text}, {"role": "user", "content": "sure?"}]
    second = await session.answer(Question(tuple(history)))
    await session.close()
    assert dict(session.counts) == {"clean": 1}, "dropped reasoning forks no history"
    played = session.played(None, {})
    if special_tokens == "auto":
        assert (first.text, first.message["reasoning_content"]) == ("4", "2 and 2")
        assert (second.text, second.message["reasoning_content"]) == ("It is 4.", "still")
        assert played.thought == "2 and 2\n\nstill"
    else:
        assert "2 and 2" in first.text
        assert played.thought is None


async def test_an_answer_that_a_client_has_changed_keeps_the_thought_that_was_sampled(folder, family):
    config = config_of(folder)
    engine = engine_of(config)
    tokenizer = tokenizer_of(family)
    turns = [turn.replace("4", "certainly 4, I think.") for turn in TURNS[family]]
    session = GatewaySession(
        open_chat(config),
        engine.decode,
        Script(tokenizer, turns),
        SamplingParams(max_tokens=200),
        EnvironmentConfig(),
        4096,
        engine.read,
    )
    asked = {"role": "user", "content": "2+2?"}
    first = await session.answer(Question((asked,)))
    changed = {"role": "assistant", "content": first.text.replace(", I think", "")}
    await session.answer(Question((asked, changed, {"role": "user", "content": "sure?"})))
    await session.close()
    assert dict(session.counts) == {"realigned": 1}
    (segment,) = (session.played(None, {}).first,)
    kept = ids_of(tokenizer, turns[0].partition(", I think")[0])
    assert segment.completion_ids.tolist()[: len(kept)] == kept
