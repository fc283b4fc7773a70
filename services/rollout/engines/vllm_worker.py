"""Runs in vLLM's worker processes: brings new weights into the model of one rank.

An update has two halves. `stage` works on a thread of its own while generation goes on: for a full version it
maps the files, whose pages all ranks of a machine share; for deltas it reads the changes of this rank's part
onto the device, and computes how they change the digest of the held weights. `apply` writes them while
generation is paused, and reads back what parameters hold now.

If it is known where the loader puts values, and they can be read back there, deltas are written there
directly, and on GPUs full versions too. Other full versions go through the model's loader as at the start; on
GPUs through vLLM's layerwise reload, which converts layouts again. Parameters are always written in place.

On a CPU vLLM computes from private copies, packed for its kernels: linear layers free their parameter,
experts replace it. `keep_parameters` runs before the model loads: linear layers then compute from the
parameter itself, and experts keep it beside the packed copy, which `refresh` makes again after an update.
"""

import contextlib
import json
import os
import select
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tidemill.common.files import write_atomically
from tidemill.common.weights.bits import Bits, TensorInfo
from tidemill.services.rollout.engines.checkpoint import checkpoint_tensors, read_tensors
from tidemill.services.rollout.engines.held_weights import (
    NAMES,
    HeldWeights,
    HostMemory,
    StagedChange,
    StagedVersion,
    apply,
    trace,
)
from tidemill.services.rollout.engines.vllm_launch import OWNER_VARIABLE, is_cpu


def keep_parameters() -> None:
    """Replace the functions that pack, tie or free parameters; call it before a model is loaded."""
    from vllm.model_executor.model_loader import utils as loader_utils

    # An untied head that equals the embeddings at the start would share their memory from then on, and get
    # their updates.
    loader_utils.maybe_retie_word_embeddings = lambda *_: None
    if not is_cpu():
        return
    import torch
    import vllm.model_executor.layers.utils as layer_utils
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    def dispatch(layer: Any, remove_weight: bool) -> None:
        # `remove_weight` does nothing here: updates are written into the weight that it would free.
        layer.cpu_linear = torch.nn.functional.linear

    # Both callers import the name when they run, so replacing the module's attribute reaches them.
    layer_utils.dispatch_cpu_unquantized_gemm = dispatch
    pack = CPUUnquantizedExperts.process_weights_after_loading
    compute = CPUUnquantizedExperts.apply

    def pack_beside(experts: Any, layer: Any) -> None:
        experts.tidemill_repack = lambda: _pack_beside(experts, layer, pack)
        experts.tidemill_repack()

    def compute_packed(experts: Any, **named: Any) -> None:
        compute(experts, **named | experts.tidemill_packed)

    CPUUnquantizedExperts.process_weights_after_loading = pack_beside
    CPUUnquantizedExperts.apply = compute_packed


def _pack_beside(experts: Any, layer: Any, pack: Any) -> None:
    """Let vLLM pack a module that has copies of the layer's experts."""
    from torch.nn import Module, Parameter

    copies = Module()
    for name, parameter in layer.named_parameters(recurse=False):
        copy = Parameter(parameter.detach().clone(), requires_grad=False)
        copies.register_parameter(name, copy)
    for name in ("moe_config", "activation"):
        setattr(copies, name, getattr(layer, name, None))
    pack(experts, copies)
    bias = getattr(layer, "w13_bias", None)
    if bias is not None and copies.w13_bias.shape != bias.shape:
        raise ValueError("experts with a bias whose size vLLM pads on this CPU cannot be updated")
    experts.tidemill_packed = {"w1": copies.w13_weight.data, "w2": copies.w2_weight.data}


def refresh(model: Any, dtype: Any) -> None:
    """Compute again what is derived from parameters: packed experts, absorbed matrices of MLA."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        repack = getattr(getattr(kernel, "fused_experts", None), "tidemill_repack", None)
        if repack is not None:
            repack()
        if hasattr(layer, "W_UV") or hasattr(layer, "W_UK_T"):
            layer.process_weights_after_loading(dtype)  # in place: captured graphs keep their addresses


REFUSED_QUANTIZATION = (
    "quantized weights ({}) cannot be updated: their scales would have to be computed again each time. Leave "
    "rollout.vllm.extra.quantization out, and start from a model that is not quantized"
)

Answer = dict[str, Any]
FullAndDeltas = tuple[Mapping[str, tuple[TensorInfo, Bits]], Sequence[Sequence[Path]]]
"""The tensors of a full version, and the files of each delta since then, oldest first."""


class WeightLoader:
    """Mixed into vLLM's worker class, which has `model_runner` and the rest."""

    model_runner: Any
    vllm_config: Any
    rank: int
    tidemill_weights: "RankWeights | None" = None

    def tidemill(self, method: str, *arguments: Any) -> Answer:
        """Call a method of this rank's weights; `collective_rpc` calls this on every rank. Exceptions are
        returned as `error`."""
        try:
            if self.tidemill_weights is None:
                model = self.model_runner.get_model()
                self.tidemill_weights = RankWeights(model, self.vllm_config, self.rank)
            answer: Answer = getattr(self.tidemill_weights, method)(*arguments)
            return {"error": ""} | answer
        # Returned, not raised: after a call that fails on one rank alone, vLLM's answers lag behind by one.
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}


class RankWeights:
    def __init__(self, model: Any, vllm_config: Any, rank: int = 0) -> None:
        self.model = model
        self._config = vllm_config
        self._rank = rank
        self.held = HeldWeights([])
        self._infos: list[TensorInfo] = []
        """The tensors of the version that `held` was traced with."""
        self._can_read_back = False
        """Whether `held` says where the checkpoint's values lie in the parameters."""
        self._no_patch = ""
        """Why deltas cannot be written over the full version that was loaded last."""
        self._loaded: set[str] | None = None
        """Parameters that the starting model's files filled: each version has to fill them again."""
        self._disowned: set[int] = set()
        """Numbers of pieces, in the order of `held`, that a lower rank counts in its digest."""
        # What is staged is one of these three.
        self._to_load: FullAndDeltas | None = None
        """For the model's loader."""
        self._to_copy: StagedVersion | None = None
        self._changes: list[StagedChange] = []
        self._memory = HostMemory()
        self._stream: Any = None

    def open(self) -> Answer:
        """Compare what the model holds with the files that it was just loaded from; `refuse` says why no
        update could be right, `unread` why what the engine holds cannot be read back."""
        quantization = self._config.model_config.quantization
        if quantization:
            return {"refuse": REFUSED_QUANTIZATION.format(quantization)}
        try:
            tensors = dict(self._starting_tensors())
            self._infos = [TensorInfo(name, NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()]
            self.held, self._loaded = trace(self.model.load_weights, self._infos)
            wrong = self._num_wrong(tensors.items())
            converted = f"{wrong:,} values lie in a converted layout" if wrong else ""
            unread = converted
        except AssertionError as error:
            converted = f"a parameter was replaced: {error}"
            unread = converted
        except (ValueError, KeyError, AttributeError) as error:
            unread = str(error)
            converted = ""
        self._can_read_back = not unread
        if converted and is_cpu():  # GPUs have the layerwise reload, which converts again
            return {"refuse": f"new weights would not reach what vLLM computes with on this CPU: {converted}"}
        return {"refuse": "", "unread": unread}

    def begin_staging(self, job: Mapping[str, Any]) -> Answer:
        """Start to stage `files` and `deltas`; returns at once. The result is written as JSON into the folder
        `report`, because asking for it by a call would hold up the engine's core."""

        def stage() -> None:
            try:
                answer = {"error": ""} | self.stage(job["files"], job["deltas"])
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            # The folder is gone where the engine has stopped waiting for this answer.
            with contextlib.suppress(OSError):
                write_atomically(Path(job["report"]) / f"{self._rank}.json", json.dumps(answer))

        # A daemon: a read that is under way must not keep the process from ending.
        threading.Thread(target=stage, daemon=True, name="stage").start()
        return {}

    def stage(self, files: Sequence[str], deltas: Sequence[Sequence[str]]) -> Answer:
        """Read what is to be applied. For deltas alone, returns their change of the held weights' digest.

        Raises:
            WeightsError: a file is missing, incomplete, or of another model.
            ValueError: deltas alone, and what the engine holds cannot be read back.
        """
        paths = [list(map(Path, delta)) for delta in deltas]
        # What an earlier update staged, and never applied, must not be written with this one.
        self._changes = []
        self._to_load = None
        self._to_copy = None
        if files:
            base = read_tensors([Path(file) for file in files])
            if self._is_copied(base):
                with self._beside():
                    self._to_copy = StagedVersion(self.held, checkpoint_tensors(base, paths), self._memory)
            else:
                self._to_load = (base, paths)
            return {}
        if not self._can_read_back:
            raise ValueError("what this engine holds cannot be read back, so it takes whole versions only")
        with self._beside():
            change, self._changes = self.held.stage(paths, self._disowned)
        return {"low": change.low, "high": change.high}

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """On a GPU, work on a stream of its own, complete at the end."""
        device: torch.device = next(self.model.parameters()).device
        if device.type != "cuda":
            yield
            return
        # One for all versions: torch keeps freed memory for the stream that used it, so that each further
        # stream would take a version's memory again.
        self._stream = self._stream or torch.cuda.Stream(device)
        # This thread's current stream would be that of device 0, or vLLM's.
        with torch.cuda.stream(self._stream):
            yield
        # Results are read on vLLM's stream, which does not wait for this one.
        self._stream.synchronize()

    def apply(self) -> Answer:
        """Write what was staged. `wrong`: how many values the parameters do not hold afterwards, or 1 if only
        the digest is known to differ; `traced`: whether `keys` has changed; `no_patch`: why deltas over this
        version could not be proven.

        Raises:
            ValueError: the files lack a parameter of the model, which would have kept its old values.
        """
        held = self.held
        to_load = self._to_load
        to_copy = self._to_copy
        changes = self._changes
        # Taken out first: what fails half way is not applied a second time, and its memory is free after it.
        self._changes = []
        self._to_load = None
        self._to_copy = None
        with torch.no_grad():
            if to_load is not None:
                wrong = self._load(*to_load)
            elif to_copy is not None:
                wrong = int(not to_copy.write())
                self._no_patch = ""
                self._refresh()
            else:
                wrong = apply(changes)
                self._refresh()
        if not is_cpu():
            # Copies run behind the host, and generation resumes when this call returns.
            torch.accelerator.synchronize()
        return {"wrong": wrong, "traced": held is not self.held, "no_patch": self._no_patch}

    def keys(self) -> Answer:
        """Which positions this rank holds, piece by piece."""
        return {"keys": [list(piece.key) for piece in self.held]}

    def disown(self, pieces: Sequence[Sequence[int]]) -> Answer:
        """Leave pieces out of digests: a lower rank counts them. `pieces[rank]`: places in `keys`."""
        self._disowned = set(pieces[self._rank])
        return {}

    def _is_copied(self, base: Mapping[str, tuple[TensorInfo, Bits]]) -> bool:
        """Whether a full version needs no loader: it has exactly the tensors whose places are known."""
        # On a CPU the loader reads the files' own pages: to stage them would take host memory twice.
        if not self._can_read_back or is_cpu() or self.held.reason_not_to_patch():
            return False
        return {info.name: info for info in self._infos} == {name: info for name, (info, _) in base.items()}

    def _load(self, base: Mapping[str, tuple[TensorInfo, Bits]], deltas: Sequence[Sequence[Path]]) -> int:
        tensors = checkpoint_tensors(base, deltas)
        loaded = self.model.load_weights(tensors) if is_cpu() else self._reload(tensors)
        self._refresh()
        expected = self._loaded or {
            name for name, parameter in self.model.named_parameters() if hasattr(parameter, "weight_loader")
        }
        if loaded is not None and (missing := sorted(expected - set(loaded))):
            raise ValueError(f"{len(missing)} parameters got no new weights: {', '.join(missing[:5])}")
        if not self._can_read_back:
            return 0
        infos = [info for info, _ in base.values()]
        if infos != self._infos:  # names and dtypes may be others than those of the starting model
            self._infos = infos
            self._disowned = set()
            self.held, _ = trace(self.model.load_weights, infos)
        self._no_patch = self.held.reason_not_to_patch()
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
        """Tensors of the files that vLLM loaded the model from, as its own loader names them."""
        from vllm.model_executor.model_loader import get_model_loader

        loader: Any = get_model_loader(self._config.load_config)
        if not hasattr(loader, "get_all_weights"):
            raise ValueError(f"load_format {self._config.load_config.load_format} names no tensors")
        yield from loader.get_all_weights(self._config.model_config, self.model)

    def _num_wrong(self, tensors: Iterable[tuple[str, Tensor]]) -> int:
        """How many held values differ from the checkpoint's, in the parameters' precision."""
        return sum(
            piece.num_wrong(tensor) for name, tensor in tensors for piece in self.held.pieces.get(name, [])
        )


def _end_with(owner: int) -> None:
    """End this process, and the engine's core above it, when the process `owner` ends.

    vLLM's processes survive a killed parent: they would keep the GPU's memory from the next worker.
    """
    # Before the wait: a process whose parent has ended is given another.
    core = os.getppid()
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        poll = select.poll()
        poll.register(os.pidfd_open(owner), select.POLLIN)
        poll.poll()
    # Only while it is still the parent: by now its number could be that of another process.
    if core not in (owner, 1) and os.getppid() == core:
        os.kill(core, signal.SIGKILL)
    # `sys.exit` would end this thread alone.
    os._exit(1)


# vLLM imports this module in each of its workers, before the model is loaded.
if OWNER_VARIABLE in os.environ:
    threading.Thread(
        target=_end_with, args=(int(os.environ[OWNER_VARIABLE]),), daemon=True, name="owner"
    ).start()
    keep_parameters()
