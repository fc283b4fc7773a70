"""`tidemill export`: writes a version as a folder; without an output, lists what versions a run has on the
disk, what they are made of, and whether they are whole."""

from pathlib import Path
from typing import Any

from rich.console import Console

from tidemill.common.errors import ConfigError, WeightsError
from tidemill.common.run.state import CONFIG_FILE
from tidemill.common.run.weight_files import (
    WEIGHTS_FOLDER,
    folder_versions,
    read_chain,
    read_manifest,
    verified_files,
)
from tidemill.common.weights.bits import read_safetensors
from tidemill.common.weights.delta import read_delta
from tidemill.common.weights.digest import digest_of, is_additive
from tidemill.common.wire.messages import WeightManifest
from tidemill.services.console.exports.model_folder import export_version
from tidemill.services.console.options import ExportOptions
from tidemill.services.console.run.folder import find_run, nearest
from tidemill.services.console.text.tree import Node, note, part, show, table


def export(options: ExportOptions) -> int:
    if options.output is None:
        if options.version != "last":
            raise ConfigError("--version is of a folder to write: name it with -o FOLDER")
        return list_versions(options)
    if options.verify or options.as_json:
        raise ConfigError("--verify and --json are of the list of versions: leave out -o")
    folder = find_run(options.run_id, options.runs_dir)
    if (config := folder.config()) is None:
        raise ConfigError(
            f"{nearest(folder.path)} has no {CONFIG_FILE}: no such run here. Name the run, and its folder of "
            "runs with --runs-dir."
        )
    result = export_version(folder.path, config.model, options.version, options.output.resolve())
    where, num_bytes = nearest(options.output.resolve()), result["num_bytes"]
    Console(highlight=False).print(
        f"version {result['version']} of {folder.run_id} is in [bold]{where}[/] ({num_bytes:,} bytes)",
        soft_wrap=True,
    )
    return 0


def list_versions(options: ExportOptions) -> int:
    """With `--verify` every byte is read: checksums, every record of a delta, and the digest of full versions
    that have one over their weights; returns 1 where one is not whole."""
    run = find_run(options.run_id, options.runs_dir).path
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
                record.patch()
    elif is_additive(manifest.digest):
        found = str(digest_of(tensor for path in paths for tensor in read_safetensors(path)))
        if found != manifest.digest:
            raise WeightsError(f"its files have digest {found}, the manifest says {manifest.digest}.")


def _tree(rows: list[dict[str, Any]], verify: bool) -> Node:
    shown = (
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
    versions = table(shown, {"size": "bytes", "of full": "share", "changed": "share", "encode": "s"})
    problems = (note(f"version {row['version']}: {row['problem']}", "red") for row in rows if row["problem"])
    return part("", versions, problems)
