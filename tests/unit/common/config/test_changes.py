"""What a run may change when it is resumed, and what it may not."""

from typing import Any

import pytest

from tests.support.trajectories import make_config
from tidemill.common.config import RunConfig, changed_fields
from tidemill.common.config.changes import FIXED
from tidemill.common.errors import ConfigError
from tidemill.services.console.launch.up import _check_changes
from tidemill.services.console.options import UpOptions
from tidemill.services.console.run.folder import RunFolder


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any, bool]]:
    found = changed_fields(make_config(**before), make_config(**after))
    return {change.field: (change.before, change.after, bool(change.refusal)) for change in found}


def test_changes_are_named_by_field_with_both_values() -> None:
    before = {"trainer": {"steps": 4, "optimizer": {"lr": 0.1}}}
    after = {"trainer": {"steps": 9, "optimizer": {"lr": 0.2}}, "rollout": {"workers": 3}}
    assert changes(before, after) == {
        "trainer.steps": (4, 9, False),
        "trainer.optimizer.lr": (0.1, 0.2, False),
        "rollout.workers": (1, 3, False),
    }


@pytest.mark.parametrize(
    ("after", "field"),
    [
        ({"trainer": {"group_size": 4}}, "trainer.group_size"),
        ({"trainer": {"groups_per_step": 4}}, "trainer.groups_per_step"),
        ({"model": {"path": "other"}}, "model.path"),
        ({"model": {"path": "model", "dtype": "bfloat16"}}, "model.dtype"),
        ({"data": {"train": "other.jsonl"}}, "data.train"),
        ({"seed": 3}, "seed"),
        ({"data": {"train": [{"name": "a", "path": "train.jsonl"}]}}, "data.train"),
        ({"data": {"train": "train.jsonl", "curriculum": {}}}, "data.curriculum"),
        ({"data": {"train": "train.jsonl", "stream": True}}, "data.stream"),
    ],
)
def test_what_would_contradict_the_history_is_refused(after: dict[str, Any], field: str) -> None:
    (name, (_, _, is_refused)) = next(iter(changes({}, after).items()))
    assert (name, is_refused) == (field, True)


def test_the_id_of_the_run_is_no_change() -> None:
    assert changes({"run_id": "a"}, {"run_id": "b"}) == {}


def test_every_fixed_field_exists() -> None:
    for name in FIXED:
        section: Any = RunConfig
        for part in name.split("."):
            section = section.model_fields[part].annotation if hasattr(section, "model_fields") else None
        assert section is not None


class TestResume:
    @pytest.fixture
    def resume(self, tmp_path: Any) -> Any:
        folder = RunFolder(tmp_path, "one")
        folder.create(make_config(run_id="one", trainer={"steps": 4}))
        (folder.path / "metrics.jsonl").write_text(
            "".join(f'{{"kind": "step", "step": {i}}}\n' for i in range(3))
        )
        options = UpOptions(config=tmp_path / "config.yaml", run_id="one", resume=True)
        return lambda **after: _check_changes(options, make_config(run_id="one", **after), folder)

    def test_allowed_changes_are_told(self, resume: Any) -> None:
        assert [str(change) for change in resume(trainer={"steps": 9})] == ["trainer.steps: 4 -> 9"]

    def test_others_are_refused_with_the_reason(self, resume: Any) -> None:
        with pytest.raises(ConfigError, match=r"trainer\.group_size: 8 -> 2 \(groups that were issued"):
            resume(trainer={"steps": 4, "group_size": 2})

    def test_steps_are_not_taken_back(self, resume: Any) -> None:
        with pytest.raises(ConfigError, match=r"3 committed steps, more than trainer\.steps = 2"):
            resume(trainer={"steps": 2})
