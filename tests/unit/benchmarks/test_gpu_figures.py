"""What the proof on a GPU computes and decides, without one: kernels, what is missing."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType

from benchmarks.gpu.__main__ import exit_code
from benchmarks.gpu.mfu import NONE, kernel_shares
from benchmarks.gpu.parts import PARTS, missing

H100: dict[str, Any] = {
    "machine": "16 cores",
    "packages": {"torch": "2.13.0"},
    "driver": "NVIDIA H100, 580",
    "gpus": ["NVIDIA H100"],
    "gpu_gib": 79.0,
    "gpu_problem": "",
    "vllm_problem": "",
    "compiler": "",
    "bfloat16_problem": "",
}
BY_NAME = {benchmark.name: benchmark for benchmark in PARTS}


def event(name: str, seconds: float, device: DeviceType = DeviceType.CUDA, annotation: bool = False) -> Any:
    return SimpleNamespace(
        key=name,
        device_type=device,
        is_user_annotation=annotation,
        self_device_time_total=seconds * 1e6,
        self_cpu_time_total=seconds * 1e6,
    )


def test_what_a_program_names_itself_is_no_kernel() -> None:
    """The optimizer's annotation spans its own kernels: with it they would count twice."""
    events = [
        event("nvjet_tst_128x256_64x4_1x2_h_bz_TNT", 0.5),
        event("multi_tensor_apply_kernel<FusedAdam>", 0.2),
        event("Optimizer.step#AdamW.step", 0.25, annotation=True),
        event("aten::mm", 9.0, DeviceType.CPU),
    ]
    shares = kernel_shares(events, 1.0, DeviceType.CUDA)
    assert shares["matrix products"] == pytest.approx(0.5) and shares["optimizer"] == pytest.approx(0.2)
    assert shares[NONE] == pytest.approx(0.3) and sum(shares.values()) == pytest.approx(1.0)
    assert kernel_shares(events, 10.0, DeviceType.CPU)["matrix products"] == pytest.approx(0.9)


SMALL = H100 | {"gpu_gib": 23.0}
OLD = H100 | {"gpus": [], "gpu_problem": "the driver is too old"}
BARE = H100 | {"vllm_problem": "vLLM is not installed", "compiler": "Triton needs a C compiler"}


@pytest.mark.parametrize(
    ("name", "facts", "dry", "wrong", "too_little"),
    [
        ("mfu_4b", H100, False, [], []),
        ("fsdp_8b", H100, False, [], ["2 GPUs, here is 1"]),
        ("fsdp_8b", H100, True, [], ["2 GPUs, here is 1"]),
        ("engine_8b", SMALL, False, [], ["58 GiB of GPU memory, here are 23"]),
        ("engine_4b", BARE, False, [BARE["vllm_problem"], BARE["compiler"]], []),
        ("mfu_4b", BARE, False, [], []),
        ("mfu_4b", OLD, False, ["the driver is too old"], []),
        ("fsdp_8b", OLD, True, [], []),
    ],
)
def test_each_part_says_what_it_lacks(name, facts, dry, wrong, too_little):
    assert missing(BY_NAME[name], facts, dry) == (wrong, too_little)


def test_the_exit_code_tells_what_went_wrong() -> None:
    done = {"state": "done"}
    small = {"state": "missing", "can_be_set_right": False}
    bare = small | {"can_be_set_right": True}
    assert (exit_code([done, small]), exit_code([done, bare])) == (0, 2)
    assert exit_code([bare, {"state": "late"}]) == exit_code([{"state": "failed"}]) == 1
