"""What these tests share: contexts of a trainer process, and what is said while a history is read."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import tiny_model
from tests.support.whole_trainer import trainer_context
from tidemill.common.history import history as history_module
from tidemill.common.process.service import ServiceContext
from tidemill.common.redis.broker import Broker
from tidemill.common.wire.keys import Keys


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make(broker: Broker, keys: Keys, tmp_path: Path, model: Path) -> Callable[..., ServiceContext]:
    """The context of a trainer process; all of a test share streams and run folder."""
    data = tmp_path / "train.jsonl"
    data.write_text("".join(f'{{"prompt": "w{i}", "ground_truth": "{i}"}}\n' for i in range(9)))
    held_out = tmp_path / "held.jsonl"
    held_out.write_text('{"prompt": "w1", "ground_truth": "1"}\n{"prompt": "w2", "ground_truth": "2"}\n')
    run_dir = tmp_path / "run"

    def make(
        steps: int = 6, has_eval: bool = False, trims: bool = False, archives: bool = False, **trainer: Any
    ) -> ServiceContext:
        reward = trainer.pop("reward", {})
        sampling = trainer.pop("sampling", {})
        archive = trainer.pop("archive", {})
        held = {"eval": {"held": str(held_out)}} if has_eval else {}
        return trainer_context(
            broker, keys, run_dir, model,
            data={"train": str(data), **held},
            rollout={"sampling": {"max_tokens": 8, **sampling}},
            trainer={"steps": steps, **trainer},
            streams={"trim": trims, "archive": {"enabled": archives, "segment_mb": 0.004, **archive}},
            reward=reward,
        )  # fmt: skip

    return make


@pytest.fixture
def history_log() -> Iterator[list[logging.LogRecord]]:
    """What reading a history has logged so far."""
    records: list[logging.LogRecord] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    keeper = Keeper()
    history_module.log.addHandler(keeper)
    yield records
    history_module.log.removeHandler(keeper)
