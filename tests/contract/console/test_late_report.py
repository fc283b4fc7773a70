"""A run that no `tidemill up` has watched has the same report, from its commits."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.support.histories import write_small_run
from tidemill.common.errors import ConfigError
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.embedded import EmbeddedRedis
from tidemill.common.run.state import FINISHED, RUNNING, update_state
from tidemill.common.wire.keys import Keys
from tidemill.services.console.options import StatusOptions
from tidemill.services.console.status.report import show_report


@pytest.fixture(autouse=True)
def on_this_server(redis_server: EmbeddedRedis, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_REDIS_URL", redis_server.url)
    monkeypatch.setenv("TIDEMILL_RUN_ID", keys.run_id)


async def finish(broker: Broker, keys: Keys, tickets_issued: int) -> None:
    await write_small_run(broker, keys)
    await update_state(broker, keys, status=FINISHED, version=2, tickets_issued=tickets_issued)


async def report(runs: Path) -> int:
    return await asyncio.to_thread(show_report, StatusOptions(as_json=True, runs_dir=runs))


async def test_a_finished_run_is_reported_and_kept_in_its_folder(
    broker: Broker, keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await finish(broker, keys, tickets_issued=5)
    (tmp_path / keys.run_id).mkdir()
    assert await report(tmp_path) == 0
    tree = json.loads(capsys.readouterr().out)
    assert (tree["ok"], tree["steps"], tree["lost"], tree["duplicated_in_training"]) == (True, 2, 0, 0)
    assert tree["wall_s"] == 19.5
    assert json.loads((tmp_path / keys.run_id / "summary.json").read_text()) == tree


async def test_what_was_lost_is_said_and_the_exit_code_is_1(
    broker: Broker, keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await finish(broker, keys, tickets_issued=6)
    assert await report(tmp_path) == 1
    tree = json.loads(capsys.readouterr().out)
    assert tree["lost"] == 2 and not tree["ok"]
    assert not (tmp_path / keys.run_id).exists(), "the folder of the run is on another machine"


async def test_a_run_that_goes_on_has_no_report_yet(broker: Broker, keys: Keys, tmp_path: Path) -> None:
    await write_small_run(broker, keys)
    await update_state(broker, keys, status=RUNNING, version=1, tickets_issued=5)
    with pytest.raises(ConfigError, match=r"has not finished \(1 of 2 steps"):
        await report(tmp_path)
