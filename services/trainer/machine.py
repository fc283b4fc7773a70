"""`python -m tidemill.services.trainer.machine REQUEST`: is this machine ready for a run, and how fast is it?

The request is JSON: `config`, a whole run's, and `runs`, the folder of runs. The answer has `facts`: `what`
was examined, what was found as `text`, and a `remedy` where that is bad; `is_problem` where the run would
fail. A process of its own, because it imports torch; the ranks that sum gradients are further processes with
a deadline, because a collective call that hangs never returns.
"""

import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from tidemill.common.config import RunConfig
from tidemill.common.digits import few_digits
from tidemill.common.errors import ConfigError
from tidemill.common.process.checks import Answer, answer_check
from tidemill.common.process.children import end_with_parent
from tidemill.common.process.gpus import ask_driver
from tidemill.common.process.programs import Program, run_own

GIB = 1 << 30
MIB = 1 << 20
GB = 1e9
RANKS_DEADLINE_S = 40.0
SHM = "/dev/shm"
LEAST_SHM = GIB
"""NCCL and vLLM share memory there; containers give 64 MiB by default."""
LEAST_FREE = 0.9
"""Share of a GPU's memory that has to be free."""
SLOW_COPY = 8 * GB
SLOW_SUM = 5 * GB
SLOW_DISK = 0.2 * GB
SLOW_FSYNC_S = 0.05
DISK_BYTES = 256 * MIB
"""Written to see how fast the disk is."""
BYTES_OF_A_MASTER = 12
"""Bytes of a parameter in a checkpoint: float32, and two moments of Adam."""


@dataclass(frozen=True, slots=True)
class Fact:
    what: str
    text: str
    remedy: str = ""
    is_problem: bool = False


def examine(request: dict[str, Any]) -> Answer:
    """Examine everything; what cannot be examined is a fact too."""
    config = RunConfig.model_validate(request["config"])
    size = _size(config)
    parts: list[Callable[[], Iterator[Fact]]] = [
        _look_at_driver,
        _look_at_compiler,
        _look_at_memory,
        _look_at_copies,
        partial(_look_at_ranks, config, size),
        _look_at_shared_memory,
        partial(_look_at_disk, config, Path(request["runs"]), size),
    ]
    return {"facts": [asdict(fact) for checks in parts for fact in checks()]}


def _has_gpu() -> bool:
    return bool(torch.cuda.is_available())


def _size(config: RunConfig) -> int:
    """Parameters of the model; 0 where its config.json is not here."""
    from tidemill.services.trainer.policy.memory.sizes import read_model

    try:
        return read_model(config).parameters if config.trainer.policy != "simulated" else 0
    except ConfigError:
        return 0


def driver_list() -> str:
    """The driver's own list of GPUs; empty where there is no driver."""
    listed = ask_driver("--query-gpu=name,driver_version", "--format=csv,noheader") or ""
    return listed.strip().replace("\n", "; ")


def gpu_problem(driver: str) -> str:
    """Why torch sees no GPU; empty where it does."""
    installed = f"torch {version('torch')}"
    if _has_gpu():
        return ""
    if not driver:
        return "no NVIDIA GPU: nvidia-smi finds none"
    if torch.version.cuda is None:
        return (
            f"{installed} is the build for CPUs, the driver has {driver}: remove .venv, let pip find the "
            "CUDA build"
        )
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"{installed} (CUDA {torch.version.cuda}) cannot use {driver}: {error}"
    return f"{installed} sees no GPU, the driver has {driver}; is CUDA_VISIBLE_DEVICES set?"


def compiler_problem() -> str:
    """What Triton lacks; empty where it has all."""
    has_compiler = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("clang")
    if has_compiler and (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return ""
    return (
        "Triton needs a C compiler and Python's headers (Debian and Ubuntu: apt-get install gcc python3-dev)"
    )


def _look_at_driver() -> Iterator[Fact]:
    driver = driver_list()
    problem = gpu_problem(driver)
    if not problem:
        text = f"{driver or 'a driver'}; torch {version('torch')} for CUDA {torch.version.cuda} uses it"
        yield Fact("driver", text)
    elif driver:
        remedy = "install a newer driver, or the torch that was built for this one; nvidia-smi names its CUDA"
        yield Fact("driver", problem, remedy, is_problem=True)
    else:
        yield Fact("driver", f"{problem}; left out: NVLink, NCCL, pinned memory, each GPU's free memory")


def _look_at_compiler() -> Iterator[Fact]:
    problem = compiler_problem()
    # On a CPU torch.compile and vLLM do not need it.
    yield Fact("compiler", problem or "here, with Python.h", is_problem=bool(problem) and _has_gpu())


def _look_at_memory() -> Iterator[Fact]:
    host = psutil.virtual_memory()
    yield Fact("host memory", f"{host.available / GIB:.1f} of {host.total / GIB:.1f} GiB are free")
    for gpu in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(gpu)
        remedy = "" if free >= LEAST_FREE * total else "nvidia-smi shows whose processes hold it; end them"
        text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free, {torch.cuda.get_device_name(gpu)}"
        yield Fact(f"GPU {gpu}", text, remedy, is_problem=bool(remedy))
    links = [line for line in (ask_driver("nvlink", "--status") or "").splitlines() if "GB/s" in line]
    if links:
        yield Fact("NVLink", f"{len(links)} links of all GPUs are up")
    elif torch.cuda.device_count() > 1:
        yield Fact("NVLink", "none is up", "sums and all-gathers go over PCIe: prefer trainer.shard_ranks 1")


def _seconds(work: Callable[[], object], rounds: int = 5) -> float:
    """Median time of the work, the device's included."""
    times = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        work()
        if _has_gpu():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def _look_at_copies() -> Iterator[Fact]:
    count = torch.cuda.device_count()
    host = torch.ones(GIB if count else GIB // 8, dtype=torch.uint8)
    if not count:
        copied = torch.empty_like(host)
        yield Fact("host copies", f"{len(host) / _seconds(lambda: copied.copy_(host)) / GB:.1f} GB/s")
        return
    try:
        host = host.pin_memory()
    except RuntimeError as error:
        remedy = "give the container more memory and `ulimit -l unlimited`"
        yield Fact("pinned memory", f"1 GiB cannot be pinned: {error}", remedy, is_problem=True)
        return
    for gpu in range(count):
        with torch.cuda.device(gpu):
            device = torch.empty_like(host, device="cuda")
            to = len(host) / _seconds(partial(device.copy_, host))
            back = len(host) / _seconds(partial(host.copy_, device))
        slow = "fewer PCIe lanes than it has, or a process on another NUMA node: see nvidia-smi topo -m"
        text = f"{to / GB:.1f} GB/s from pinned memory, {back / GB:.1f} back"
        yield Fact(f"copies, GPU {gpu}", text, slow if min(to, back) < SLOW_COPY else "")


def _look_at_ranks(config: RunConfig, size: int) -> Iterator[Fact]:
    """How fast ranks sum gradients, with as many of them as this machine has room for."""
    from tidemill.services.trainer.policy.fsdp.ranks import variables_of_ranks

    asked = config.trainer.num_ranks
    gpus = torch.cuda.device_count()
    num_ranks = min(asked, gpus or asked)
    backend = "NCCL" if gpus else "gloo"
    if num_ranks < 2:
        yield Fact("ranks", f"{num_ranks} of {asked} here: nothing is summed over ranks")
        return
    visible = {}
    if gpus and config.trainer.gpus:
        visible["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, config.trainer.gpus[:num_ranks]))
    ranks = [
        subprocess.Popen(
            run_own(Program.TRAINER_MACHINE, RANK, str(os.getpid())),
            env=os.environ | variables | visible,
            # Only rank 0 is read: another one's pipe would fill.
            stdout=subprocess.DEVNULL if rank else subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, variables in enumerate(variables_of_ranks(num_ranks))
    ]
    ranks_text = f"{backend} over {num_ranks} ranks"
    remedy = "NCCL_DEBUG=INFO NCCL_DEBUG_FILE=nccl.%p tells why" if gpus else "look at the host's load"
    try:
        said, _ = ranks[0].communicate(timeout=RANKS_DEADLINE_S)
    except subprocess.TimeoutExpired:
        yield Fact(ranks_text, f"no answer in {RANKS_DEADLINE_S:g} s", remedy, is_problem=True)
        return
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    rates = [line for line in said.splitlines() if line.startswith(RATE)]
    if not rates:
        yield Fact(ranks_text, f"failed: {said.strip()[-300:]}", remedy, is_problem=True)
        return
    rate = float(rates[0].removeprefix(RATE))
    took = f"; the gradients of this model take {few_digits(4 * size / rate, 2)} s" if size else ""
    is_slow = gpus > 0 and rate < SLOW_SUM
    yield Fact(
        ranks_text, f"{rate / GB:.1f} GB/s of bus in a sum{took}", f"slow: {remedy}" if is_slow else ""
    )


RANK = "--rank"
RATE = "rate "


def serve_rank(parent: int) -> None:
    """Run one rank; rank 0 prints the bus's bytes a second: 2 (n - 1) / n times those of the sum."""
    from tidemill.services.trainer.policy.fsdp.ranks import join_ranks

    end_with_parent(parent)
    torch.set_num_threads(1)
    ranks = join_ranks()
    data = torch.ones((256 if ranks.device.type == "cuda" else 8) * MIB, device=ranks.device)
    seconds = _seconds(lambda: dist.all_reduce(data))
    if ranks.is_leader:
        print(f"{RATE}{2 * (ranks.size - 1) / ranks.size * data.nbytes / seconds}", flush=True)
    ranks.close()


def _look_at_shared_memory() -> Iterator[Fact]:
    if not Path(SHM).is_dir():
        yield Fact(SHM, "is not there", "mount a tmpfs there", is_problem=True)
        return
    disk = shutil.disk_usage(SHM)
    remedy = "docker run --shm-size 8g; Kubernetes: an emptyDir of medium Memory there"
    text = f"{disk.free / GIB:.1f} of {disk.total / GIB:.1f} GiB are free"
    yield Fact(SHM, text, remedy if disk.free < LEAST_SHM else "", disk.free < LEAST_SHM // 4)


def _look_at_disk(config: RunConfig, runs: Path, size: int) -> Iterator[Fact]:
    """How fast the disk is, and whether checkpoints and full versions of this run fit on it."""
    folder = next(path for path in (runs, *runs.resolve().parents) if path.is_dir())
    block = os.urandom(8 * MIB)
    num_blocks = max(1, DISK_BYTES // len(block))
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".tidemill-check-", buffering=0) as file:
            started = time.perf_counter()
            for _ in range(num_blocks):
                file.write(block)
            os.fsync(file)
            rate = num_blocks * len(block) / (time.perf_counter() - started)
            fsync_s = _seconds(lambda: _append(file), 15)
    except OSError as error:
        yield Fact("disk", f"{folder}: {error.strerror}", "name another with TIDEMILL_RUNS_DIR", True)
        return
    slow = "take a local disk, a longer trainer.checkpoint_every or weights.base_every"
    text = f"{rate / GB:.2f} GB/s written to {folder}, {1000 * fsync_s:.1f} ms to make a commit durable"
    yield Fact("disk", text, slow if rate < SLOW_DISK or fsync_s > SLOW_FSYNC_S else "")
    if not size:
        yield Fact("checkpoints", "not known: the model's config.json is not here")
        return
    checkpoint = BYTES_OF_A_MASTER * size
    base = (2 if config.model.dtype == "bfloat16" else 4) * size
    # One more of each is written before the oldest goes.
    needed = checkpoint * (config.trainer.keep_checkpoints + 1) + 2 * base
    free = shutil.disk_usage(folder).free
    text = (
        f"{few_digits(checkpoint / GB, 2)} GB each, {few_digits(checkpoint / rate, 2)} s to write; "
        f"a version in full {few_digits(base / GB, 2)} GB, {few_digits(base / rate, 2)} s, beside the steps; "
        f"{few_digits(needed / GB, 2)} GB in all, {few_digits(free / GB)} are free"
    )
    lower = "make room, or lower trainer.keep_checkpoints"
    yield Fact("checkpoints", text, lower if free < needed else "", free < needed)


def _append(file: Any) -> None:
    file.write(b"a commit")
    os.fsync(file)


if __name__ == "__main__":
    if sys.argv[1:2] == [RANK]:
        serve_rank(int(sys.argv[2]))
    else:
        sys.exit(answer_check(examine))
