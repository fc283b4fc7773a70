"""The parts of the proof: what each runs, what it needs, and about how long it takes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

LIMIT_S = 515.0
"""Of every part: one ends, whatever happens, within nine minutes."""


DID_NOT_START = "did_not_start"
"""A figure: why an engine did not, where that is a finding."""


@dataclass(frozen=True)
class Part:
    """A command whose last line is JSON, and what it needs of a machine with GPUs."""

    name: str
    text: str
    command: tuple[str, ...]
    """After `python -m`; `--dry` is added in a dry run, unless `dry_command` takes its place."""
    estimate_s: int
    """On one H100. Estimated, not measured."""
    gpus: int = 1
    gpu_gib: float = 8.0
    host_gib: float = 8.0
    disk_gib: float = 4.0
    vllm: bool = False
    compiles: bool = False
    dry_command: tuple[str, ...] | None = None
    goals: tuple[tuple[str, str, float], ...] = ()
    """Figure, `>=` or `<=`, and the bound."""

    def words(self, dry: bool) -> tuple[str, ...]:
        """The command's arguments after the interpreter."""
        if dry and self.dry_command is not None:
            return ("-m", *self.dry_command)
        return ("-m", *self.command, *(["--dry"] if dry else []))


def _mfu(name: str, text: str, estimate_s: int, **needs: Any) -> Part:
    kind, shape, *flags = name.split("_")
    ranks = ("--ranks", "0") if kind == "fsdp" else ()
    command = ("benchmarks.gpu.mfu", shape, *ranks, *(f"--{flag}" for flag in flags))
    return Part(name, text, command, estimate_s, **needs)


def _engine(name: str, shape: str, text: str, estimate_s: int, *options: str, **needs: Any) -> Part:
    command = ("benchmarks.gpu.engine", shape, *options)
    return Part(name, text, command, estimate_s, vllm=True, compiles=True, **needs)


MFU_GOAL = (("mfu", ">=", 0.45),)
GAPS = (("gap", "<=", 0.1),)
PAUSES = (("full_pause_over_copy_ms", "<=", 100.0), ("delta_pause_over_copy_ms", "<=", 100.0))
TESTS = "benchmarks.gpu.pytest_part"

PARTS: tuple[Part, ...] = (
    Part("machine", "matrix products and copies", ("benchmarks.gpu.machine", "--speed"), 30),
    Part("tests_policy", "tests/gpu: the policy's numbers", (TESTS, "test_policy.py"), 90),
    Part("tests_speed", "tests/gpu: fused and compiled", (TESTS, "test_trainer_speed.py"), 90, compiles=True),
    Part("tests_engine", "tests/gpu: vLLM", (TESTS, "test_vllm_engine.py"), 150, vllm=True, compiles=True),
    Part(
        "tests_updates",
        "tests/gpu: versions into vLLM, on one GPU and two, and a worker's end",
        (TESTS, "test_vllm_updates.py", "test_stopping.py"),
        180,
        vllm=True,
        compiles=True,
    ),
    Part("tests_ranks", "tests/gpu: ranks over NCCL", (TESTS, "test_ranks.py"), 240, gpus=2),
    _mfu("mfu_0.6b", "a step at 0.6B, 16k packed", 60, gpu_gib=22),
    _mfu("mfu_4b", "a step at 4B", 150, gpu_gib=22, host_gib=24, disk_gib=12, goals=MFU_GOAL),
    _mfu("mfu_8b", "a step at 8B", 200, gpu_gib=22, host_gib=40, disk_gib=20, goals=MFU_GOAL),
    _mfu(
        "mfu_4b_compiled", "the same, with compile", 240, gpu_gib=22, host_gib=24, disk_gib=12, compiles=True
    ),
    _engine("engine_0.6b", "0.6b", "tokens/s, updates, logprobs at 0.6B", 150, goals=PAUSES + GAPS),
    _engine("engine_4b", "4b", "at 4B", 210, gpu_gib=30, host_gib=32, disk_gib=24, goals=PAUSES + GAPS),
    _engine("engine_8b", "8b", "at 8B", 300, gpu_gib=58, host_gib=48, disk_gib=42, goals=PAUSES + GAPS),
    _engine("engine_moe", "moe", "128 experts", 240, gpu_gib=32, host_gib=32, disk_gib=26, goals=GAPS),
    _engine("fp8_weights", "0.6b", "fp8 weights", 120, "--option", "quantization=fp8", "--may-refuse"),
    _engine("fp8_cache", "0.6b", "fp8 KV cache", 150, "--option", "kv_cache_dtype=fp8", "--may-refuse"),
    Part(
        "run_one_gpu",
        "a whole run, all on one GPU",
        ("benchmarks.gpu.whole_run", "--one-gpu"),
        210,
        gpu_gib=38,
        host_gib=24,
        disk_gib=30,
        vllm=True,
        compiles=True,
    ),
    Part(
        "run_gpus",
        "a whole run, a GPU for each",
        ("benchmarks.gpu.whole_run",),
        210,
        gpus=2,
        gpu_gib=22,
        host_gib=24,
        disk_gib=30,
        vllm=True,
        compiles=True,
    ),
    _mfu("fsdp_0.6b", "ranks over NCCL beside one", 150, gpus=2, gpu_gib=22, host_gib=24),
    _mfu(
        "fsdp_8b", "ranks over NCCL at 8B", 300, gpus=2, gpu_gib=22, host_gib=80, disk_gib=20, goals=MFU_GOAL
    ),
    _engine("engine_tp2", "4b", "two GPUs", 240, "--tensor-parallel", "2", gpus=2, gpu_gib=30, disk_gib=24),
    Part(
        "weights",
        "bytes and times of versions, on the CPU",
        ("benchmarks.weights", "--parameters", "1e9"),
        90,
        host_gib=16,
        dry_command=("benchmarks.weights", "--parameters", "4e7", "--steps", "1", "--hidden", "96"),
    ),
    Part(
        "trainer",
        "a step beside other trainers",
        ("benchmarks.trainer", "--rounds", "1"),
        400,
        gpu_gib=22,
        host_gib=16,
        dry_command=("benchmarks.trainer", "--rounds", "1", "--steps", "1"),
    ),
)


def missing(part: Part, facts: dict[str, Any], dry: bool) -> tuple[list[str], list[str]]:
    """What this machine lacks for a part: what can be set right, and what it has too little of."""
    wrong = [facts["vllm_problem"]] if part.vllm else []
    if dry:  # tiny models, on GPUs where there are some
        too_few = [_gpus_missing(part, facts)] if 0 < len(facts["gpus"]) < part.gpus else []
        return [*filter(None, [*wrong, facts["bfloat16_problem"] if part.vllm else ""])], too_few
    if facts["gpu_problem"]:
        return [*filter(None, [facts["gpu_problem"], *wrong])], []
    wrong.append(facts["compiler"] if part.compiles else "")
    return [*filter(None, wrong)], list(_too_little(part, facts))


def _too_little(part: Part, facts: dict[str, Any]) -> Iterator[str]:
    if len(facts["gpus"]) < part.gpus:
        yield _gpus_missing(part, facts)
    if facts["capability"] < 8.0:
        yield f"a GPU of compute capability 8.0, for bfloat16; here is {facts['capability']:g}"
    for what, wanted in (("GPU", part.gpu_gib), ("host", part.host_gib), ("disk", part.disk_gib)):
        here = facts[f"{what.lower()}_gib"]
        if here < wanted:
            kind = "free disk" if what == "disk" else f"{what} memory"
            yield f"{wanted:g} GiB of {kind}, here are {here:.0f}"


def _gpus_missing(part: Part, facts: dict[str, Any]) -> str:
    return f"{part.gpus} GPUs, here {'is' if len(facts['gpus']) == 1 else 'are'} {len(facts['gpus'])}"


def chosen(names: Sequence[str]) -> list[Part]:
    """Parts by name or pattern (`mfu_*`); all where none is named.

    Raises:
        ValueError: a name fits no part.
    """
    for name in names:
        if not any(fnmatch(part.name, name) for part in PARTS):
            raise ValueError(f"there is no part {name!r}; parts are {', '.join(part.name for part in PARTS)}")
    return [part for part in PARTS if not names or any(fnmatch(part.name, name) for name in names)]
