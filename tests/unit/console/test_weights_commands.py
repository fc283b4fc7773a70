"""`tidemill export`: the list of versions, over a chain and its faults, and a version from a chain."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.models import make_policy, save_weights, tiny_model
from tests.support.versions import write_version
from tidemill.common.config import ModelConfig
from tidemill.common.errors import ConfigError
from tidemill.common.run.weight_files import read_manifest
from tidemill.services.console.exports.export import export as export_command
from tidemill.services.console.exports.export import export_version, list_versions
from tidemill.services.console.options import ExportOptions
from tidemill.services.trainer.weights.store import WeightStore


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run with a full version and two deltas."""
    store, policy = WeightStore(tmp_path / "one"), make_policy(dtype=torch.bfloat16)
    for version in range(3):
        with torch.no_grad():
            policy._model.get_input_embeddings().weight[version] += 0.5
        write_version(store, version, policy)
    save_weights(policy, tmp_path / "expected")
    return tmp_path


def rows(runs: Path, capsys: pytest.CaptureFixture[str], verify: bool) -> list[dict[str, object]]:
    code = list_versions(ExportOptions(run_id="one", verify=verify, as_json=True, runs_dir=runs))
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    assert code == (verify and any(row["problem"] for row in found))
    return found


def test_versions_are_listed_and_verified(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [(row["kind"], row["chain"]) for row in rows(runs, capsys, verify=True)] == [
        ("full", 1),
        ("delta to 0", 2),
        ("delta to 1", 3),
    ]
    list_versions(ExportOptions(run_id="one", runs_dir=runs))
    assert "delta to 1" in capsys.readouterr().out


def test_what_is_not_whole_says_why(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = runs / "one" / "weights" / "v00000001" / "delta-00000-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    assert [bool(row["problem"]) for row in rows(runs, capsys, verify=True)] == [False, True, False]
    assert not any(row["problem"] for row in rows(runs, capsys, verify=False)), "ls reads no bytes"
    shutil.rmtree(runs / "one" / "weights" / "v00000000")
    assert ["which is not there" in str(row["problem"]) for row in rows(runs, capsys, verify=False)] == [
        True
    ] * 2


def test_a_version_is_exported_from_its_chain(runs: Path) -> None:
    model = tiny_model(runs / "model")
    config = ModelConfig(path=str(model), dtype="bfloat16")
    result = export_version(runs / "one", config, "last", runs / "out")
    manifest = read_manifest(runs / "one", 2)
    assert manifest is not None and (result["version"], result["digest"]) == (2, manifest.digest)
    found = load_file(runs / "out" / "model.safetensors")
    expected = load_file(runs / "expected" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"version": "best"}, "-o FOLDER"),
        ({"verify": True, "output": Path("a")}, "--verify"),
    ],
)
def test_options_of_the_list_and_of_a_folder_are_not_mixed(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        export_command(ExportOptions(run_id="one", **options))
