"""Chains of versions on the disk, as a trainer writes them: full ones, and deltas of single values."""

from collections.abc import Collection
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tidemill.common.files import file_checksum, write_atomically
from tidemill.common.run.weight_files import MANIFEST_FILE, WEIGHTS_FOLDER, version_name
from tidemill.common.weights.bits import Bits, TensorInfo, read_safetensors
from tidemill.common.weights.delta import DeltaWriter, delta_name
from tidemill.common.weights.digest import digest_of
from tidemill.common.wire.messages import DELTA_ENCODING, WeightFile, WeightManifest
from tidemill.services.trainer.weights.store import WeightSource, WeightStore

FULL_FILE = "model.safetensors"
RANKS = 2
"""Ranks, each of which writes a file of a delta."""


def write_version(store: WeightStore, version: int, policy: WeightSource) -> WeightManifest:
    """Publish the policy's weights as `version`, here and now."""
    return store.finish(store.begin(version, policy, policy.compare_weights()))


class Chain:
    """The versions of one run; `tensors` are those of the newest one, flat."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.manifests: dict[int, WeightManifest] = {}
        self.tensors: dict[str, tuple[TensorInfo, Bits]] = {}
        self.random = np.random.default_rng(0)
        self.term = 1

    @property
    def newest(self) -> WeightManifest:
        return self.manifests[max(self.manifests)]

    def full(self, version: int, file: Path) -> WeightManifest:
        """A full version, of the file's bytes."""
        self.tensors = {info.name: (info, np.array(bits)) for info, bits in read_safetensors(file)}
        return self.base(version)

    def base(self, version: int) -> WeightManifest:
        """A full version of what the newest one holds."""
        folder = self._folder(version)
        arrays = {name: bits.reshape(info.shape) for name, (info, bits) in self.tensors.items()}
        save_file(arrays, folder / "x", metadata={"format": "pt"})
        dtypes = {"u2": "BF16", "u4": "F32"}
        data = (folder / "x").read_bytes()
        (folder / "x").unlink()
        size = int.from_bytes(data[:8], "little")
        header = data[8 : 8 + size]
        for bits, name in dtypes.items():
            header = header.replace(f'"U{int(bits[1]) * 8}"'.encode(), f'"{name}"'.encode())
        (folder / FULL_FILE).write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
        return self._publish(version, [FULL_FILE])

    def delta(
        self, version: int, share: float = 0.01, names: Collection[str] | None = None
    ) -> WeightManifest:
        """The next version: about `share` of all values get others, or of those of the tensors `names`."""
        parent = self.newest
        folder = self._folder(version)
        writers = [DeltaWriter(folder / delta_name(rank, RANKS)) for rank in range(RANKS)]
        for number, (info, bits) in enumerate(self.tensors.values()):
            if names is not None and info.name not in names:
                continue
            changed = np.flatnonzero(self.random.random(len(bits)) < share)
            # Only the last bits change: about as much as in training, and never to infinity.
            bits[changed] ^= self.random.integers(1, 1 << 6, len(changed)).astype(bits.dtype) << 16 * (
                bits.itemsize == 4
            )
            writers[number % RANKS].add(info, changed, bits[changed])
        files = [writer.write().name for writer in writers]
        base = parent.base if parent.is_delta else parent.version
        return self._publish(
            version,
            files,
            encoding=DELTA_ENCODING,
            parent=parent.version,
            parent_digest=parent.digest,
            base=base,
        )

    def paths(self, version: int) -> list[Path]:
        manifest = self.manifests[version]
        return [self.run_dir / WEIGHTS_FOLDER / manifest.folder / file.name for file in manifest.files]

    def _folder(self, version: int) -> Path:
        folder = self.run_dir / WEIGHTS_FOLDER / version_name(version)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _publish(self, version: int, names: list[str], **fields: object) -> WeightManifest:
        folder = self._folder(version)
        manifest = WeightManifest.model_validate(
            {
                "version": version,
                "folder": folder.name,
                "files": [
                    WeightFile(
                        name=name,
                        num_bytes=(folder / name).stat().st_size,
                        checksum=file_checksum(folder / name),
                    )
                    for name in names
                ],
                "digest": str(digest_of(self.tensors.values())),
                "term": self.term,
            }
            | fields
        )
        write_atomically(folder / MANIFEST_FILE, manifest.model_dump_json(indent=1))
        self.manifests[version] = manifest
        return manifest
