"""The history of a run with pictures, scored again by rewards that see."""

import asyncio
import base64
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.letters import make_ticket
from tests.support.misbehaving import MisbehavingServer, answers
from tests.support.recorded import record, tidemill
from tests.support.seen_samples import BLUE, RED, Colour, png_of, seen_trajectory
from tests.support.trajectories import make_config
from tidemill.common.images.store import IMAGES_FOLDER, ImageStore
from tidemill.common.wire.messages import Score, ScoreStatus

GROUP_SIZE = 4
SEEING = """
def redness(data_source, solution_str, ground_truth, images):
    return float(sum(image.getpixel((0, 0))[0] for image in images))
"""


@pytest.fixture
def seen(tmp_path: Path) -> Path:
    """A folder of runs with one whose prompts have pictures: red ones of ticket 0, blue ones of ticket 1."""
    return record_seen(tmp_path, [RED], [BLUE])


def record_seen(tmp_path: Path, *colours: list[Colour]) -> Path:
    """The folder, with a run of a ticket for each of `colours`: those of the pictures in its prompt."""
    (tmp_path / "seeing.py").write_text(SEEING)
    config = make_config(
        run_id="seen", images={}, reward={"workers": 1, "max_attempts": 1, "function": "exact_match"}
    )
    (tmp_path / "made").mkdir()
    store = ImageStore(tmp_path / "made")
    tickets = [make_ticket(ticket, step=0, group_size=GROUP_SIZE) for ticket in range(len(colours))]
    trajectories = [
        seen_trajectory(store, of_prompt, ticket, index, group_size=GROUP_SIZE)
        for ticket, of_prompt in enumerate(colours)
        for index in range(GROUP_SIZE)
    ]
    scores = [
        Score(ticket=each.ticket, index=each.index, status=ScoreStatus.OK, value=0.0, worker="then")
        for each in trajectories
    ]
    folder = asyncio.run(record(tmp_path, config, tickets, trajectories, scores))
    store.folder.rename(folder / IMAGES_FOLDER)
    return tmp_path


def test_a_function_that_sees_scores_the_history_of_a_run_with_pictures(seen: Path) -> None:
    done = tidemill(seen, "rescore", "seen", "--reward", f"{seen / 'seeing.py'}:redness", "--json")
    assert done.returncode == 0, done.stderr
    sandbox = json.loads(done.stdout)["sandbox"]
    assert not (seen / sandbox / IMAGES_FOLDER).exists(), "they are read where the run has them"
    # A sandbox has no pictures itself, and its history can be scored again too.
    again = tidemill(seen, "rescore", sandbox, "--reward", f"{seen / 'seeing.py'}:redness", "--json")
    assert again.returncode == 0, again.stderr
    for run in (sandbox, json.loads(again.stdout)["sandbox"]):
        for ticket, value in ((0, 255.0), (1, 0.0)):
            output = tidemill(seen, "streams", "show", "scores", f"{ticket}.2", "--run", run, "--json")
            assert f'"value": {value}' in output.stdout, output.stdout + output.stderr


@pytest.mark.parametrize("colours", [([RED], [BLUE]), ([], [BLUE])])
def test_pictures_that_are_not_there_are_named_before_anything_starts(
    tmp_path: Path, colours: tuple[list[Colour], ...]
) -> None:
    seen = record_seen(tmp_path, *colours)
    (seen / "seen" / IMAGES_FOLDER).rename(seen / "elsewhere")
    done = tidemill(seen, "rescore", "seen", "--reward", f"{seen / 'seeing.py'}:redness")
    assert done.returncode == 2 and "the pictures of run seen are not in" in done.stderr


def test_a_judge_that_sees_scores_the_history_of_a_run_with_pictures(seen: Path) -> None:
    """Its servers come with the other config's reward."""

    async def rescore() -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
        async with MisbehavingServer(answers("Score: 7")) as server:
            judge = {"servers": "eye", "template": "{{ prompt }} {{ completion }}"}
            tree = {
                "model": {"path": "m"},
                "data": {"train": "train.jsonl"},
                "servers": {"eye": {"model": "m", "base_urls": [server.url]}},
                "reward": {"rewards": {"eye": {"judge": judge}}},
            }
            (seen / "judged.yaml").write_text(json.dumps(tree))
            arguments = ("rescore", "seen", "--config", str(seen / "judged.yaml"), "--json")
            return await asyncio.to_thread(tidemill, seen, *arguments), server.requests

    done, requests = asyncio.run(rescore())
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["agreement"]["compared"] == 2 * GROUP_SIZE
    urls = [request["messages"][0]["content"][0]["image_url"]["url"] for request in requests]
    # The completions of a group are equal, so that one request is made for all: for each picture another.
    expected = [
        f"data:image/png;base64,{base64.b64encode(png_of(colour)).decode()}" for colour in (RED, BLUE)
    ]
    assert sorted(urls) == sorted(expected)
