"""A version of a run as a Hugging Face folder: config, tokenizer, weights, and where they come from.

The weights are copied as the engines loaded them, after their checksums were checked; a delta is applied to
the full version that its chain begins with, and the result held against its digest. Everything else comes
from the model that the run started with. The folder appears by one rename, complete.
"""

import contextlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from tidemill.common.config import ModelConfig
from tidemill.common.errors import ConfigError, WeightsError
from tidemill.common.files import aside_folder, publish_folder
from tidemill.common.run.model_config import overridden
from tidemill.common.run.state import BEST_FILE
from tidemill.common.run.weight_files import (
    WEIGHTS_FOLDER,
    folder_versions,
    read_chain,
    read_manifest,
    verified_files,
)
from tidemill.common.weights.delta import check_whole, write_whole

BEST, LAST = "best", "last"
ORIGIN_FILE = "tidemill.json"
"""Beside the weights: run, version and digest."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
"""Files with these suffixes, weights of the starting model and their indexes, are not copied."""


def export_version(run: Path, model: ModelConfig, version: str, target: Path) -> dict[str, Any]:
    """Write `version` of a run (a number, `best` or `last`) into the folder `target`. `model` is the run's.

    Returns what was written, as plain JSON.

    Raises:
        ConfigError: there is no such version, or `target` holds something already.
        WeightsError: the version's bytes are not those that the trainer wrote.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is there already and not empty; give a new folder.")
    number = find_version(run, version)
    manifest = read_manifest(run, number)
    if manifest is None:
        raise ConfigError(f"version {number} of {run.name} has no weights on the disk. {_known(run)}")
    base, *deltas = [verified_files(run, part) for part in read_chain(run, manifest)]
    source = _model_folder(model.path)
    with aside_folder(target, f"the export of version {number}") as aside:
        _copy_model_files(source, aside)
        paths = write_whole(base, deltas, aside)
        if deltas:
            # Files of a chain were changed here, so no checksum covers them; the digest covers all weights.
            check_whole(paths, manifest)
        _change_config(aside / "config.json", model.dtype, model.overrides)
        _write_index(aside, [path.name for path in paths])
        origin = {"run_id": run.name, "version": number, "digest": manifest.digest, "model": model.path}
        (aside / ORIGIN_FILE).write_text(json.dumps(origin, indent=1) + "\n", encoding="utf-8")
        num_bytes = sum(path.stat().st_size for path in paths)
        publish_folder(aside, target)
    return {**origin, "num_bytes": num_bytes}


def find_version(run: Path, version: str) -> int:
    """The version that `best`, `last` or a number means. Raises ConfigError: there is none."""
    if version == LAST:
        for number in reversed(folder_versions(run / WEIGHTS_FOLDER)):
            with contextlib.suppress(WeightsError):  # what was written last may be torn
                if read_manifest(run, number) is not None:
                    return number
        raise ConfigError(f"{run} holds no weights yet: no version has been written.")
    if version == BEST:
        try:
            return int(json.loads((run / BEST_FILE).read_bytes())["version"])
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigError(
                f"{run} has no best version: no evaluation has a score, or trainer.evaluation.keep_best is "
                f"empty. {_known(run)}"
            ) from None
    if not version.isdecimal():
        raise ConfigError(f"--version is {version!r}; expected a number, {BEST} or {LAST}.")
    return int(version)


def _known(run: Path) -> str:
    versions = folder_versions(run / WEIGHTS_FOLDER)
    listing = ", ".join(map(str, versions)) or "none"
    return f"Versions there are: {listing} (trainer.keep_weights says how many stay)."


def _model_folder(model: str) -> Path:
    """The folder of the starting model; one of the hub is downloaded without its weights."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, ignore_patterns=[f"*{suffix}*" for suffix in WEIGHT_SUFFIXES]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(f"config and tokenizer of {model} cannot be had: {error}") from None


def _copy_model_files(source: Path, target: Path) -> None:
    for path in sorted(source.iterdir()):
        is_weight = any(suffix in path.suffixes for suffix in WEIGHT_SUFFIXES)
        if path.is_file() and not is_weight and not path.name.startswith("."):
            shutil.copyfile(path, target / path.name)
    if not (target / "config.json").is_file():
        raise ConfigError(f"{source} has no config.json; an export needs that of the starting model.")


def _change_config(path: Path, dtype: str, overrides: Mapping[str, Any]) -> None:
    """Set dtype and overrides in config.json, so that the weights load as they are stored."""
    tree = overridden(json.loads(path.read_bytes()), overrides)
    tree.pop("torch_dtype", None)
    path.write_text(json.dumps({**tree, "dtype": dtype}, indent=2) + "\n", encoding="utf-8")


def _write_index(folder: Path, names: list[str]) -> None:
    """Say which file holds which tensor, where there are several."""
    if len(names) < 2:
        return
    weight_map: dict[str, str] = {}
    for name in names:
        with safe_open(folder / name, "numpy") as file:
            weight_map |= dict.fromkeys(file.keys(), name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
