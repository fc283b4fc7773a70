"""Mixed into vLLM's workers: new weights reach the model from here, inside the process that computes.

An update has two halves. `tidemill_stage` reads a version's files into host memory on a thread of its
own while generation goes on; `tidemill_apply` copies them into the model while it is paused. Staging
touches nothing the model computes with, so a missing or torn file costs no pause.

Importing this module on a CPU installs a plain matrix product in place of vLLM's packed one. It has to
happen before the model loads: the packed kernels free every linear layer's parameter and compute from a
private copy of it, which no later update reaches.
"""

import contextlib
import os
import select
import signal
import threading
import time
from concurrent.futures import Future
from typing import Any

from tidemill.services.rollout.engines.vllm_launch import OWNER_VARIABLE


def _install_unpacked_gemm() -> None:
    """Let CPU linear layers compute from `layer.weight` itself."""
    import torch
    import vllm.model_executor.layers.utils as layer_utils

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    # Both callers import the name when they run, so replacing the module's attribute reaches them.
    layer_utils.dispatch_cpu_unquantized_gemm = dispatch


def _is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


class WeightLoader:
    """Methods that vLLM adds to its worker class; `collective_rpc` calls them on every rank."""

    model_runner: Any
    _tidemill_staging: "Future[dict[str, Any]] | None" = None

    def tidemill_stage(self, files: list[str]) -> None:
        """Start to read `files` into host memory; returns at once."""
        staging: Future[dict[str, Any]] = Future()
        self._tidemill_staging = staging
        pin = not _is_cpu()
        threading.Thread(target=_read_into, args=(staging, files, pin), daemon=True, name="stage").start()

    def tidemill_is_staged(self) -> bool:
        """Whether the files are read; raises what went wrong while reading."""
        assert self._tidemill_staging is not None, "tidemill_stage comes first"
        if not self._tidemill_staging.done():
            return False
        self._tidemill_staging.result()
        return True

    def tidemill_apply(self) -> float:
        """Copy the staged weights into the model and free them. Returns the seconds it took.

        Raises:
            ValueError: the files lack a parameter of the model, which would have kept its old values.
        """
        import torch

        assert self._tidemill_staging is not None, "tidemill_stage comes first"
        started = time.perf_counter()
        tensors, self._tidemill_staging = self._tidemill_staging.result(), None
        model = self.model_runner.get_model()
        with torch.no_grad():
            loaded = model.load_weights(iter(tensors.items()))
        if loaded is not None:
            missing = sorted({name for name, _ in model.named_parameters()} - set(loaded))
            if missing:
                raise ValueError(f"{len(missing)} parameters got no new weights: {', '.join(missing[:5])}")
        if not _is_cpu():
            torch.accelerator.synchronize()
        return time.perf_counter() - started


def _read_into(staging: "Future[dict[str, Any]]", files: list[str], pin: bool) -> None:
    """Read every tensor of `files` into memory that no file backs, page-locked where a GPU copies from it."""
    from safetensors import safe_open

    try:
        tensors = {}
        for file in files:
            with safe_open(file, framework="pt", device="cpu") as reader:
                for name in reader.keys():  # noqa: SIM118 -- not a dict, it cannot be iterated
                    tensor = reader.get_tensor(name)
                    tensors[name] = tensor.pin_memory() if pin else tensor.clone()
        staging.set_result(tensors)
    except Exception as error:
        staging.set_exception(error)


def _end_with(owner: int) -> None:
    """End this process, and the engine's core above it, when the process `owner` ends.

    vLLM's processes survive a killed parent: they would keep the GPU's memory from the next worker.
    """
    core = os.getppid()
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        poll = select.poll()
        poll.register(os.pidfd_open(owner), select.POLLIN)
        poll.poll()
    if core not in (owner, 1) and os.getppid() == core:
        os.kill(core, signal.SIGKILL)
    os._exit(1)


if OWNER_VARIABLE in os.environ:
    threading.Thread(
        target=_end_with, args=(int(os.environ[OWNER_VARIABLE]),), daemon=True, name="owner"
    ).start()
    if _is_cpu():
        _install_unpacked_gemm()
