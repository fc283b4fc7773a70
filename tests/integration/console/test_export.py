"""`tidemill export`: what comes out is the policy, as Hugging Face's own classes load it; the list of
versions, over a chain and its faults."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from examples.small_vision_models import make_vision_model
from tests.support import preloaded
from tests.support.models import make_policy, save_weights, tiny_llama, tiny_model
from tests.support.trajectories import make_config
from tests.support.versions import Chain, write_version
from tidemill.common.config import ModelConfig
from tidemill.common.config.images import ImagesConfig
from tidemill.common.errors import ConfigError, WeightsError
from tidemill.common.images.processor import load_processor
from tidemill.common.run.weight_files import read_manifest, version_name
from tidemill.services.console.commands import ExportOptions
from tidemill.services.console.look.export import export as export_command
from tidemill.services.console.look.export import export_version, find_version, list_versions
from tidemill.services.trainer.weights.store import WeightStore


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two versions; the policy of version 1 is the model of seed 1."""
    run = tmp_path / "runs" / "one"
    store = WeightStore(run)
    for version in (0, 1):
        write_version(store, version, make_policy(model=tiny_llama(seed=version)))
    (run / "best.json").write_text('{"version": 0}')
    tree = make_config().model_dump(mode="json")
    tree["model"]["path"] = str(tiny_model(tmp_path / "model", seed=7))
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    return run


def assert_is_policy(folder: Path, version: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = tiny_llama(seed=version).state_dict()
    weights = model.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert AutoTokenizer.from_pretrained(folder).decode([3, 4]) == "w0 w1"
    origin = json.loads((folder / "tidemill.json").read_text())
    assert (origin["run_id"], origin["version"]) == ("one", version)


def tidemill(run: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TIDEMILL_REDIS_URL"}
    return preloaded.tidemill("export", "one", "--runs-dir", str(run.parent), *words, **environment)


def test_an_export_is_the_policy(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = tidemill(run, "-o", str(out))
    assert done.returncode == 0, done.stderr
    assert "version 1 of one" in done.stdout
    assert_is_policy(out, 1)
    best = tidemill(run, "--version", "best", "-o", str(tmp_path / "best"))
    assert best.returncode == 0, best.stderr
    assert_is_policy(tmp_path / "best", 0)
    missing = tidemill(run, "--version", "8", "-o", str(tmp_path / "no"))
    assert missing.returncode == 2 and "version 8 of one has no weights" in missing.stderr
    again = tidemill(run, "-o", str(out))
    assert again.returncode == 2 and "not empty" in again.stderr and "Traceback" not in again.stderr


def test_an_export_of_a_model_that_sees_has_its_image_processor(tmp_path: Path) -> None:
    start = make_vision_model(tmp_path / "start", "qwen2_5_vl")
    trained = make_vision_model(tmp_path / "trained", "qwen2_5_vl", seed=1)
    Chain(tmp_path / "run").full(0, trained / "model.safetensors")
    out = tmp_path / "out"
    export_version(tmp_path / "run", ModelConfig(path=str(start), dtype="float32"), "last", out)
    weights = AutoModelForImageTextToText.from_pretrained(out).state_dict()
    expected = AutoModelForImageTextToText.from_pretrained(trained).state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    images = ImagesConfig()
    assert load_processor(out, images).digest == load_processor(start, images).digest
    assert AutoTokenizer.from_pretrained(out).chat_template


def test_an_export_has_the_overrides_of_its_model(run: Path, tmp_path: Path) -> None:
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree["model"]["overrides"] = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    done = tidemill(run, "-o", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    rope = AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.rope_parameters
    assert (rope["rope_type"], rope["factor"]) == ("linear", 2.0)


def test_versions_are_found_by_name_and_number(run: Path) -> None:
    assert [find_version(run, name) for name in ("best", "last", "0")] == [0, 1, 0]
    with pytest.raises(ConfigError, match="expected a number, best or last"):
        find_version(run, "newest")
    (run / "best.json").unlink()
    with pytest.raises(ConfigError, match="no best version"):
        find_version(run, "best")


def test_damaged_weights_are_not_exported(run: Path, tmp_path: Path) -> None:
    path = run / "weights" / version_name(1) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(WeightsError, match="damaged"):
        export_version(run, ModelConfig(path=str(tmp_path / "model")), "last", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run with a full version and two deltas."""
    store = WeightStore(tmp_path / "one")
    policy = make_policy(dtype=torch.bfloat16)
    for version in range(3):
        with torch.no_grad():
            policy._model.get_input_embeddings().weight[version] += 0.5
        write_version(store, version, policy)
    save_weights(policy, tmp_path / "expected")
    return tmp_path


def rows(runs: Path, capsys: pytest.CaptureFixture[str], verify: bool) -> list[dict[str, object]]:
    code = list_versions(ExportOptions(run_id="one", verify=verify, as_json=True, runs_dir=runs))
    printed: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    assert code == (verify and any(row["problem"] for row in printed))
    return printed


def test_versions_are_listed_and_verified(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [(row["kind"], row["chain"]) for row in rows(runs, capsys, verify=True)] == [
        ("full", 1),
        ("delta to 0", 2),
        ("delta to 1", 3),
    ]
    list_versions(ExportOptions(run_id="one", runs_dir=runs))
    assert "delta to 1" in capsys.readouterr().out


@pytest.mark.parametrize("verify", [False, True])
def test_a_run_that_there_is_not_has_no_list_and_is_not_whole(runs: Path, verify: bool) -> None:
    with pytest.raises(ConfigError, match=r"no run 'won' in .* Did you mean .*one\?"):
        list_versions(ExportOptions(run_id="won", verify=verify, runs_dir=runs))


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
    weights = load_file(runs / "out" / "model.safetensors")
    expected = load_file(runs / "expected" / "model.safetensors")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"version": "best"}, "-o FOLDER"), ({"verify": True, "output": Path("a")}, "--verify")],
)
def test_options_of_the_list_and_of_a_folder_are_not_mixed(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        export_command(ExportOptions(run_id="one", **options))
