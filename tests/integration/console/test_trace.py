"""A real run, finished, archived, and without its Redis: every sample of it can be followed to its step."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import structlog
import yaml
from typer.testing import CliRunner

from tests.support.runs import ServiceRun, simulated_config
from tests.support.training import commits_of
from tidemill.common.archive.archiver import archive_stream, writing
from tidemill.common.history import StreamName
from tidemill.common.wire.messages import Commit
from tidemill.services.console.__main__ import app

STEPS = 4
REWARD = """
calls = {}

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    calls[solution_str] = calls.get(solution_str, 0) + 1
    if int(ground_truth) % 3 == 0 and calls[solution_str] == 1:
        raise RuntimeError("the judge was busy")
    return {"score": float(hash(solution_str) % 2), "judge": f"verdict on {ground_truth}"}
"""


async def train_and_archive(runs: Path) -> list[Commit]:
    config = simulated_config(runs, trainer__steps=STEPS, reward__backoff_s=0.01)
    (runs / "reward.py").write_text(REWARD)
    async with ServiceRun(runs, config, "real") as run:
        for role in ("rollout", "reward", "trainer"):
            run.start(role)
        assert await run.wait("trainer") == 0, run.log_of("trainer")
        (run.run_dir / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
        with writing(run.run_dir):
            for stream in StreamName:
                await archive_stream(
                    run.broker, run.keys, run.run_dir, stream, segment_bytes=20_000, is_last=True
                )
        return await commits_of(run.broker, run.keys)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Commit]]:
    """The folder of runs, and the commits of the run."""
    runs = tmp_path_factory.mktemp("runs")
    return runs, asyncio.run(train_and_archive(runs))


@pytest.fixture
def tidemill(real: tuple[Path, list[Commit]], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call a command on it; there is no Redis."""
    monkeypatch.delenv("TIDEMILL_REDIS_URL", raising=False)

    def tidemill(*words: str) -> str:
        result = CliRunner().invoke(app, [*words, "--runs-dir", str(real[0])], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    yield tidemill
    structlog.reset_defaults()


def test_every_trained_sample_leads_to_the_micro_batch_that_has_it(real: Any, tidemill: Any) -> None:
    commits = real[1]
    for commit in (commits[0], commits[-1]):
        for ticket in commit.groups:
            tree = json.loads(tidemill("trace", str(ticket), "real", "--json"))
            assert (tree["commit"]["step"], tree["commit"]["digest"]) == (commit.step, commit.digest)
            assert [s["advantage"] for s in tree["samples"]] == commit.advantages[str(ticket)]
            for sample in tree["samples"]:
                (place,) = sample["places"]
                batch = commit.mini_batches[place["mini_batch"]][place["micro_batch"]]
                assert tuple(batch[place["position"]]) == (ticket, sample["index"])
                assert sample["trajectory"]["spans"][0][0] >= commit.step - 1
                assert sample["trajectory"]["worker"] == "rollout" and sample["score"]["worker"] == "reward"


def test_streams_are_listed_read_and_searched_in_the_archive(real: Any, tidemill: Any) -> None:
    def streams(*words: str) -> list[Any]:
        lines = tidemill("streams", *words, "--run", "real", "--json").splitlines()
        return [json.loads(line) for line in lines]

    listed = {
        row["stream"]: row for row in json.loads(tidemill("streams", "show", "--run", "real", "--json"))
    }
    assert listed["commits"]["archived_entries"] == STEPS and listed["commits"]["redis_entries"] == 0
    assert "read from the archive" in tidemill("streams", "show", "--run", "real")
    scores = [record["message"] for record in streams("tail", "scores", "-n", "500")]
    tried = [score for score in scores if score["attempts"] > 1]
    assert tried and all("the judge was busy" in score["tries"][0][3] for score in tried)
    assert all(not score["tries"] for score in scores if score["attempts"] == 1)
    assert {hit["field"] for hit in streams("grep", "verdict on 1")} == {"detail.judge"}
    assert len(streams("grep", r"verdict on \d+$", "-n", "3")) == 3
