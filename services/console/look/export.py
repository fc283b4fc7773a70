"""`tidemill export`: writes a version of a run as a Hugging Face folder; without an output, lists the
versions on the disk, what they are made of, and whether they are whole.

A folder has config, tokenizer, weights, and where they come from. The weights are copied as the engines
loaded them, after their checksums were checked; a delta is applied to the full version that its chain begins
with, and the result held against its digest. Everything else comes from the model that the run started with.
The folder appears by one rename, complete.
"""

import contextlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from safetensors import safe_open

from tidemill.common.config import ModelConfig
from tidemill.common.errors import ConfigError, WeightsError
from tidemill.common.files import aside_folder, did_you_mean, publish_folder
from tidemill.common.run.model_config import overridden
from tidemill.common.run.state import BEST_FILE, CONFIG_FILE
from tidemill.common.run.weight_files import (
    WEIGHTS_FOLDER,
    folder_versions,
    read_chain,
    read_manifest,
    verified_files,
)
from tidemill.common.weights.bits import read_safetensors
from tidemill.common.weights.delta import check_whole, read_delta, write_whole
from tidemill.common.weights.digest import digest_of, is_additive
from tidemill.common.wire.messages import WeightManifest
from tidemill.services.console.commands import ExportOptions
from tidemill.services.console.run.folder import find_run, nearest
from tidemill.services.console.text.tree import Node, note, part, show, table

BEST = "best"
LAST = "last"
ORIGIN_FILE = "tidemill.json"
"""Beside the weights: run, version and digest."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
"""Weights of the starting model, and lists of them, stay behind."""


def export(options: ExportOptions) -> int:
    if options.output is None:
        if options.version != "last":
            raise ConfigError("--version is of a folder to write: name it with -o FOLDER")
        return list_versions(options)
    if options.verify or options.as_json:
        raise ConfigError("--verify and --json are of the list of versions: leave out -o")
    folder = find_run(options.run_id, options.runs_dir)
    config = folder.config()
    if config is None:
        raise ConfigError(
            f"{nearest(folder.path)} has no {CONFIG_FILE}: no such run here. Name the run, and its folder of "
            "runs with --runs-dir."
        )
    result = export_version(folder.path, config.model, options.version, options.output.resolve())
    where = nearest(options.output.resolve())
    num_bytes = result["num_bytes"]
    Console(highlight=False).print(
        f"version {result['version']} of {folder.run_id} is in [bold]{where}[/] ({num_bytes:,} bytes)",
        soft_wrap=True,
    )
    return 0


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
    chain = [verified_files(run, link) for link in read_chain(run, manifest)]
    base = chain[0]
    deltas = chain[1:]
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
    """The folder of the starting model: itself, or the hub's without its weights."""
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
    """Let readers load the weights as they are stored, into the model that was trained."""
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


def list_versions(options: ExportOptions) -> int:
    """With `--verify` every byte is read: checksums, every record of a delta, and the digest of full versions
    that have one over their weights; returns 1 where one is not whole.

    Raises:
        ConfigError: there is no such run.
    """
    folder = find_run(options.run_id, options.runs_dir)
    run = folder.path
    if not run.is_dir():
        raise ConfigError(
            f"there is no run {folder.run_id!r} in {nearest(folder.runs)}. Give its id, or the folder "
            f"of runs with --runs-dir.{did_you_mean(Path(nearest(run)), Path.is_dir)}"
        )
    rows = [_row(run, version, options.verify) for version in folder_versions(run / WEIGHTS_FOLDER)]
    show(rows, _tree(rows, options.verify), options.as_json)
    return 1 if options.verify and any(row["problem"] for row in rows) else 0


def _row(run: Path, version: int, verify: bool) -> dict[str, Any]:
    """One version. `chain` counts the versions that have to be read for it; `problem` is empty where it was
    not looked for, or none was found."""
    row: dict[str, Any] = {"version": version, "kind": "?", "chain": 0, "num_bytes": 0}
    row |= {"share_of_full": None, "share_changed": None, "encode_s": 0.0, "digest": "", "problem": ""}
    try:
        manifest = read_manifest(run, version)
        if manifest is None:
            raise WeightsError("it has no manifest.json; a trainer that starts writes it again.")
        row["kind"] = f"delta to {manifest.parent}" if manifest.is_delta else "full"
        row |= {"num_bytes": manifest.num_bytes, "encode_s": manifest.encode_s, "digest": manifest.digest}
        if manifest.full_bytes:
            row["share_of_full"] = manifest.num_bytes / manifest.full_bytes
        if manifest.share_changed >= 0.0:
            row["share_changed"] = manifest.share_changed
        row["chain"] = len(read_chain(run, manifest))
        if verify:
            _verify(run, manifest)
    except WeightsError as error:
        row["problem"] = str(error)
    return row


def _verify(run: Path, manifest: WeightManifest) -> None:
    """Check this version's own files; those of its parents have rows of their own. Raises WeightsError."""
    paths = verified_files(run, manifest)
    if manifest.is_delta:
        for path in paths:
            for record in read_delta(path):
                record.decode()
    elif is_additive(manifest.digest):
        digest = str(digest_of(tensor for path in paths for tensor in read_safetensors(path)))
        if digest != manifest.digest:
            raise WeightsError(f"its files have digest {digest}, the manifest says {manifest.digest}.")


def _tree(rows: list[dict[str, Any]], verify: bool) -> Node:
    version_rows = (
        {
            "version": row["version"],
            "kind": row["kind"],
            "read": row["chain"] or None,
            "size": row["num_bytes"],
            "of full": row["share_of_full"],
            "changed": row["share_changed"],
            "encode": row["encode_s"] or None,
            "digest": row["digest"].removeprefix("w1:")[:12],
            "whole": ("no" if row["problem"] else "yes") if verify else None,
        }
        for row in rows
    )
    versions = table(version_rows, {"size": "bytes", "of full": "share", "changed": "share", "encode": "s"})
    problems = (note(f"version {row['version']}: {row['problem']}", "red") for row in rows if row["problem"])
    return part("", versions if rows else note("no weights are on the disk", "dim"), problems)
