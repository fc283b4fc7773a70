"""What one rank of vLLM does with new weights: stage, apply, and prove. Runs in vLLM's worker processes.

Where it is known where the loader puts values, and they can be read back there, they are written there: those
of deltas, and on GPUs those of full versions. Other full versions go through the model's loader as at the
start; on GPUs through vLLM's layerwise reload, which converts layouts again. Either way parameters are
written in place, and read back afterwards.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tidemill.common.weights.bits import Bits, TensorInfo
from tidemill.services.rollout.engines.checkpoint import checkpoint_tensors, read_tensors
from tidemill.services.rollout.engines.held_weights import HeldWeights, StagedChange, apply, trace
from tidemill.services.rollout.engines.staged_version import NAMES, HostMemory, StagedVersion
from tidemill.services.rollout.engines.vllm_layers import is_cpu, reason_to_refuse, refresh


class RankWeights:
    """The weights of one rank's model."""

    def __init__(self, model: Any, vllm_config: Any) -> None:
        self.model, self._config = model, vllm_config
        self.held = HeldWeights([])
        self._infos: list[TensorInfo] = []
        self._is_plain = False
        self.no_patch = ""
        """Why deltas cannot be written over the full version that was loaded last."""
        self._loaded: set[str] | None = None
        """Parameters that the starting model's files filled: each version has to fill them again."""
        self._disowned: set[int] = set()
        self._full: tuple[Mapping[str, tuple[TensorInfo, Bits]], Sequence[Sequence[Path]]] | None = None
        self._changes: list[StagedChange] = []
        self._version: StagedVersion | None = None
        self._memory = HostMemory()
        self._stream: Any = None

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    def open(self) -> dict[str, Any]:
        """Compare what the model holds with the files that it was just loaded from."""
        if refuse := reason_to_refuse(self._config):
            return {"refuse": refuse}
        try:
            tensors = dict(self._starting_tensors())
            self._infos = [TensorInfo(name, NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()]
            self.held, self._loaded = trace(self.model.load_weights, self._infos)
            wrong = self._num_wrong(tensors.items())
            unread = converted = f"{wrong:,} values lie in a converted layout" if wrong else ""
        except AssertionError as error:
            unread = converted = f"a parameter was replaced: {error}"
        except (ValueError, KeyError, AttributeError) as error:
            unread, converted = str(error), ""
        self._is_plain = not unread
        if converted and is_cpu():  # GPUs have the layerwise reload, which converts again
            return {"refuse": f"new weights would not reach what vLLM computes with on this CPU: {converted}"}
        return {"refuse": "", "unread": unread}

    def stage(self, files: Sequence[str], deltas: Sequence[Sequence[str]]) -> dict[str, Any]:
        """Read what is to be applied. Of deltas alone: how they change the digest of what is held.

        Raises:
            WeightsError: a file is missing, torn, or of another model.
            ValueError: deltas alone, and what the engine holds cannot be read back.
        """
        paths = [[Path(path) for path in delta] for delta in deltas]
        self._changes, self._full, self._version = [], None, None
        if files:
            base = read_tensors([Path(file) for file in files])
            if self._is_copied(base):
                with self._beside():
                    tensors = checkpoint_tensors(base, paths)
                    self._version = StagedVersion(self.held, tensors, self._memory)
            else:
                self._full = (base, paths)
            return {}
        if not self._is_plain:
            raise ValueError("what this engine holds cannot be read back, so it takes whole versions only")
        with self._beside():
            change, self._changes = self.held.stage(paths, self._disowned)
        return {"low": change.low, "high": change.high}

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """On a GPU, work on a stream of its own, complete at the end: what reads its results is vLLM's
        stream, which knows nothing of this one. This thread's stream would be that of device 0, or vLLM's."""
        if self._device.type != "cuda":
            yield
            return
        # One for all versions: torch keeps what is freed for the stream that had it, so that each other one
        # would take a version's memory again.
        self._stream = self._stream or torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def apply(self) -> int:
        """Write what was staged; returns how many values the parameters do not hold afterwards, or 1 where
        only the sum is known.

        Raises:
            ValueError: the files lack a parameter of the model, which would have kept its old values.
        """
        full, version, changes = self._full, self._version, self._changes
        self._changes, self._full, self._version = [], None, None
        with torch.no_grad():
            if version is not None:
                wrong = self._copy(version)
            else:
                wrong = self._patch(changes) if full is None else self._load(*full)
        if not is_cpu():
            torch.accelerator.synchronize()
        return wrong

    def disown(self, pieces: Sequence[int]) -> None:
        """Leave these pieces out of digests: a lower rank counts them."""
        self._disowned = set(pieces)

    def _patch(self, changes: Sequence[StagedChange]) -> int:
        wrong = apply(changes)
        self._refresh()
        return wrong

    def _is_copied(self, base: Mapping[str, tuple[TensorInfo, Bits]]) -> bool:
        """Whether a full version needs no loader: it has the tensors whose places are known, each its own. On
        a CPU the loader reads the files' own pages, and host memory would be taken twice."""
        if not self._is_plain or is_cpu() or self.held.reason_not_to_patch():
            return False
        return {info.name: info for info in self._infos} == {name: info for name, (info, _) in base.items()}

    def _copy(self, version: StagedVersion) -> int:
        is_there = version.write()
        self._refresh()
        self.no_patch = ""
        return int(not is_there)

    def _load(self, base: Mapping[str, tuple[TensorInfo, Bits]], deltas: Sequence[Sequence[Path]]) -> int:
        tensors = checkpoint_tensors(base, deltas)
        loaded = self.model.load_weights(tensors) if is_cpu() else self._reload(tensors)
        self._refresh()
        expected = self._loaded or {
            name for name, parameter in self.model.named_parameters() if hasattr(parameter, "weight_loader")
        }
        if loaded is not None and (missing := sorted(expected - set(loaded))):
            raise ValueError(f"{len(missing)} parameters got no new weights: {', '.join(missing[:5])}")
        if not self._is_plain:
            return 0
        infos = [info for info, _ in base.values()]
        if infos != self._infos:  # names and dtypes may be others than those of the starting model
            self._infos, self._disowned = infos, set()
            self.held, _ = trace(self.model.load_weights, infos)
        self.no_patch = self.held.reason_not_to_patch()
        return self._num_wrong(checkpoint_tensors(base, deltas))

    def _refresh(self) -> None:
        refresh(self.model, self._config.model_config.dtype)

    def _reload(self, tensors: Iterator[tuple[str, Tensor]]) -> Any:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        with set_current_vllm_config(self._config):
            initialize_layerwise_reload(self.model)
            loaded = self.model.load_weights(tensors)
            finalize_layerwise_reload(self.model, self._config.model_config)
        return loaded

    def _starting_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Of the files that vLLM loaded the model from, as its own loader names them."""
        from vllm.model_executor.model_loader import get_model_loader

        loader: Any = get_model_loader(self._config.load_config)
        if not hasattr(loader, "get_all_weights"):
            raise ValueError(f"load_format {self._config.load_config.load_format} names no tensors")
        yield from loader.get_all_weights(self._config.model_config, self.model)

    def _num_wrong(self, tensors: Iterable[tuple[str, Tensor]]) -> int:
        """How many values held are not those of the checkpoint, in the precision that they are held in."""
        return sum(
            piece.num_wrong(tensor) for name, tensor in tensors for piece in self.held.pieces.get(name, [])
        )
