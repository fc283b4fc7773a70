"""A recorded config means what it meant when it was recorded, whatever today's defaults are."""

import json

import pytest
import yaml

from tests.support.models import run_config
from tidemill.common.config import RunConfig, changed_fields, parse_config, parse_recorded
from tidemill.common.config.algorithm_table import PRESETS
from tidemill.common.history import History
from tidemill.services.console.run.folder import RunFolder
from tidemill.services.trainer.replay.__main__ import _config


def recorded_before(config: RunConfig) -> dict[str, object]:
    """The tree that a release without the fields of today would have written."""
    tree = config.model_dump(mode="json")
    del tree["trainer"]["algorithm"]["kl"]["bound"]
    tree["trainer"]["algorithm"]["dual_clip"] = None
    return tree


@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_a_run_recorded_before_a_bound_existed_has_none(preset):
    tree = recorded_before(run_config("model", trainer={"algorithm": {"preset": preset}}))
    algorithm = parse_recorded(tree, "test").trainer.algorithm
    assert algorithm.kl.bound is None and algorithm.dual_clip_bound is None
    del tree["trainer"]["algorithm"]["dual_clip"]
    assert parse_recorded(tree, "test").trainer.algorithm.dual_clip_bound is None
    assert "bound" not in tree["trainer"]["algorithm"]["kl"], "what was given is left as it was"


@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_a_run_recorded_today_is_read_as_it_is(preset):
    config = run_config("model", trainer={"algorithm": {"preset": preset}})
    assert parse_recorded(config.model_dump(mode="json"), "test") == config
    assert parse_recorded(json.loads(config.model_dump_json()), "test") == config


def test_a_config_that_a_user_writes_takes_todays_defaults():
    tree = run_config("model").model_dump(mode="json", exclude_defaults=True)
    algorithm = parse_config(tree, "test").trainer.algorithm
    assert (algorithm.kl.bound, algorithm.dual_clip_bound) == (10.0, 3.0)


def test_the_folder_of_an_old_run_is_read_so_and_a_resume_tells_the_difference(tmp_path):
    config = run_config("model")
    folder = RunFolder(tmp_path, "old")
    folder.path.mkdir()
    (folder.path / "config.yaml").write_text(yaml.safe_dump(recorded_before(config)))
    recorded = folder.config()
    assert {change.field for change in changed_fields(recorded, config)} == {
        "trainer.algorithm.kl.bound",
        "trainer.algorithm.dual_clip",
    }


async def test_a_replay_of_an_old_run_computes_what_was_computed_then(tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(recorded_before(run_config("model"))))
    algorithm = (await _config(tmp_path, History("old", tmp_path, None))).trainer.algorithm
    assert algorithm.kl.bound is None and algorithm.dual_clip_bound is None
