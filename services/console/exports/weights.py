"""`tidemill weights`: what versions a run has on the disk, what they are made of, and whether they are
whole."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tidemill.common.errors import WeightsError
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
from tidemill.services.console.options import WeightsOptions
from tidemill.services.console.run.folder import find_run
from tidemill.services.console.text.tree import note, part, print_tree, table, terminal


@dataclass(frozen=True, slots=True)
class VersionRow:
    """One version; `problem` is empty where it was not looked for, or none was found."""

    version: int
    kind: str
    chain: int
    """Versions that have to be read for it."""
    num_bytes: int
    share_of_full: float | None
    share_changed: float | None
    encode_s: float
    digest: str
    problem: str = ""


def list_versions(options: WeightsOptions) -> bool:
    """Print all versions; returns whether none has a problem. With `--verify` every byte is read: checksums,
    every record of a delta, and the digest of full versions that have one over their weights."""
    run = find_run(options.run_id, options.runs_dir).path
    rows = [_row(run, version, options.verify) for version in folder_versions(run / WEIGHTS_FOLDER)]
    if options.as_json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        _print(rows, options.verify)
    return not any(row.problem for row in rows)


def _row(run: Path, version: int, verify: bool) -> VersionRow:
    try:
        manifest = read_manifest(run, version)
        if manifest is None:
            raise WeightsError("it has no manifest.json; a trainer that starts writes it again.")
    except WeightsError as error:
        return VersionRow(version, "?", 0, 0, None, None, 0.0, "", str(error))
    length, problem = 0, ""
    try:
        length = len(read_chain(run, manifest))
        if verify:
            _verify(run, manifest)
    except WeightsError as error:
        problem = str(error)
    changed = manifest.share_changed
    return VersionRow(
        version=version,
        kind=f"delta to {manifest.parent}" if manifest.is_delta else "full",
        chain=length,
        num_bytes=manifest.num_bytes,
        share_of_full=manifest.num_bytes / manifest.full_bytes if manifest.full_bytes else None,
        share_changed=changed if changed >= 0.0 else None,
        encode_s=manifest.encode_s,
        digest=manifest.digest,
        problem=problem,
    )


def _verify(run: Path, manifest: WeightManifest) -> None:
    """This version's own files; those of its parents have rows of their own. Raises WeightsError."""
    paths = verified_files(run, manifest)
    if manifest.is_delta:
        for path in paths:
            for record in read_delta(path):
                record.patch()
    elif is_additive(manifest.digest):
        found = str(digest_of(tensor for path in paths for tensor in read_safetensors(path)))
        if found != manifest.digest:
            raise WeightsError(f"its files have digest {found}, the manifest says {manifest.digest}.")


def _print(rows: list[VersionRow], verify: bool) -> None:
    shown = (
        {
            "version": row.version,
            "kind": row.kind,
            "read": row.chain or None,
            "size": row.num_bytes,
            "of full": row.share_of_full,
            "changed": row.share_changed,
            "encode": row.encode_s or None,
            "digest": row.digest.removeprefix("w1:")[:12],
            "whole": ("no" if row.problem else "yes") if verify else None,
        }
        for row in rows
    )
    versions = table(shown, {"size": "bytes", "of full": "share", "changed": "share", "encode": "s"})
    problems = (note(f"version {row.version}: {row.problem}", "red") for row in rows if row.problem)
    print_tree(terminal(), part("", versions, problems))
