"""The parts of the proof: what each runs, what it needs, and about how long it takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

LIMIT_S = 515.0
"""Seconds after which a part is ended: with the grace period, within nine minutes."""
DID_NOT_START = "did_not_start"
"""Name of the figure that says why an engine did not start, where that is a finding."""


@dataclass(frozen=True)
class Part:
    """A command whose last line is JSON, or tests; and what it needs of a machine with GPUs."""

    name: str
    text: str
    command: str
    """Words after `python -m`; a dry run adds `--dry`, or sets a variable for tests."""
    estimate_s: int
    """Seconds on one H100, estimated."""
    gpus: int = 1
    gpu_gib: float = 8.0
    vllm: bool = False
    compiles: bool = False
    goals: tuple[tuple[str, str, float], ...] = ()
    """Figure, `>=` or `<=`, and the bound."""

    def words(self, dry: bool) -> list[str]:
        """The command's arguments after the interpreter."""
        return ["-m", *self.command.split(), *(["--dry"] if dry and not self.is_tests else [])]

    @property
    def is_tests(self) -> bool:
        """Whether it ends with what pytest says, and not with JSON."""
        return self.command.startswith("pytest")


TESTS = "pytest -q -rs -p no:xdist -p no:cacheprovider tests/gpu"
MFU = "benchmarks.gpu.mfu"
ENGINE = "benchmarks.gpu.engine"
RUN = "benchmarks.gpu.whole_run"
MFU_GOAL = (("mfu", ">=", 0.45),)
GAPS = (("gap", "<=", 0.1),)
PAUSES = (("full_pause_over_copy_ms", "<=", 100.0), ("delta_pause_over_copy_ms", "<=", 100.0), *GAPS)
VLLM: dict[str, Any] = {"vllm": True, "compiles": True}

PARTS = (
    Part("tests_policy", "tests/gpu: the policy's numbers", f"{TESTS}/test_policy.py", 90),
    Part("tests_speed", "tests/gpu: fused, compiled", f"{TESTS}/test_trainer_speed.py", 90, compiles=True),
    Part("tests_engine", "tests/gpu: vLLM", f"{TESTS}/test_vllm_engine.py", 150, **VLLM),
    Part(
        "tests_updates",
        "tests/gpu: versions into vLLM, on one GPU and two, and a worker's end",
        f"{TESTS}/test_vllm_updates.py tests/gpu/test_stopping.py",
        180,
        **VLLM,
    ),
    Part("tests_ranks", "tests/gpu: ranks over NCCL", f"{TESTS}/test_ranks.py", 240, gpus=2),
    Part("mfu_0.6b", "a step at 0.6B, 16k packed", f"{MFU} 0.6b", 60, gpu_gib=22),
    Part("mfu_4b", "a step at 4B", f"{MFU} 4b", 150, gpu_gib=22, goals=MFU_GOAL),
    Part("mfu_8b", "a step at 8B", f"{MFU} 8b", 200, gpu_gib=22, goals=MFU_GOAL),
    Part("mfu_4b_compiled", "the same, compiled", f"{MFU} 4b --compiled", 240, gpu_gib=22, compiles=True),
    Part("engine_0.6b", "tokens/s, updates, logprobs", f"{ENGINE} 0.6b", 150, goals=PAUSES, **VLLM),
    Part("engine_4b", "at 4B", f"{ENGINE} 4b", 210, gpu_gib=30, goals=PAUSES, **VLLM),
    Part("engine_8b", "at 8B", f"{ENGINE} 8b", 300, gpu_gib=58, goals=PAUSES, **VLLM),
    Part("engine_moe", "128 experts", f"{ENGINE} moe", 240, gpu_gib=32, goals=GAPS, **VLLM),
    Part("fp8_weights", "fp8 weights", f"{ENGINE} 0.6b --option quantization=fp8 --may-refuse", 120, **VLLM),
    Part("fp8_cache", "fp8 KV cache", f"{ENGINE} 0.6b --option kv_cache_dtype=fp8 --may-refuse", 150, **VLLM),
    Part("run_one_gpu", "a whole run, all on one GPU", f"{RUN} --one-gpu", 210, gpu_gib=38, **VLLM),
    Part("run_gpus", "a whole run, a GPU for each", RUN, 210, gpus=2, gpu_gib=22, **VLLM),
    Part("fsdp_0.6b", "ranks over NCCL beside one", f"{MFU} 0.6b --ranks 0", 150, gpus=2, gpu_gib=22),
    Part("fsdp_8b", "at 8B", f"{MFU} 8b --ranks 0", 300, gpus=2, gpu_gib=22, goals=MFU_GOAL),
    Part("engine_tp2", "two GPUs", f"{ENGINE} 4b --tensor-parallel 2", 240, gpus=2, gpu_gib=30, **VLLM),
)


def missing(piece: Part, facts: Mapping[str, Any], dry: bool) -> tuple[list[str], list[str]]:
    """What this machine lacks for a part: what can be set right, and what it has too little of."""
    num_gpus = len(facts["gpus"])
    too_little = []
    wrong = [facts["vllm_problem"]] if piece.vllm else []
    if not dry and facts["gpu_problem"]:
        return [text for text in (facts["gpu_problem"], *wrong) if text], []
    if num_gpus < piece.gpus and (num_gpus or not dry):
        too_little.append(f"{piece.gpus} GPUs, here {'is' if num_gpus == 1 else 'are'} {num_gpus}")
    if dry:  # tiny models, on GPUs where there are some
        wrong.append(facts["bfloat16_problem"] if piece.vllm else "")
    else:
        wrong.append(facts["compiler"] if piece.compiles else "")
        if facts["gpu_gib"] < piece.gpu_gib:
            too_little.append(f"{piece.gpu_gib:g} GiB of GPU memory, here are {facts['gpu_gib']:.0f}")
    return [text for text in wrong if text], too_little


def chosen(names: Sequence[str]) -> list[Part]:
    """Parts by name or pattern (`mfu_*`); all where none is named.

    Raises:
        ValueError: a name fits no part.
    """
    for name in names:
        if not any(fnmatch(piece.name, name) for piece in PARTS):
            raise ValueError(
                f"there is no part {name!r}; parts are {', '.join(piece.name for piece in PARTS)}"
            )
    if not names:
        return list(PARTS)
    pieces = []
    for piece in PARTS:
        if any(fnmatch(piece.name, name) for name in names):
            pieces.append(piece)
    return pieces
