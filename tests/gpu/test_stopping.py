"""A worker with vLLM ends when it is stopped, with 0, and goes on when its engine is closed.

It is a process of its own that has not touched the GPU: in one that has, vLLM spawns its processes by itself.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.gpu.models import IS_DRY, gpu_model, needs_gpu
from tests.support.models import run_config
from tests.support.preloaded import REPO

pytest.importorskip("vllm", reason="vLLM is not installed; install the extra vllm")

pytestmark = [needs_gpu, pytest.mark.timeout(300)]

PROGRAM = """
import asyncio, os, signal, sys
from pathlib import Path
from tidemill.common.config import RunConfig
from tidemill.services.rollout.engines import build_engine

async def main():
    stopping = asyncio.Event()

    def handle():  # as services do: the first signal drains, a second one ends the process
        if stopping.is_set():
            os._exit(130)
        stopping.set()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, handle)
    engine = build_engine(RunConfig.model_validate_json(Path(sys.argv[1]).read_text()), "test-worker")
    await engine.start()
    print("started", flush=True)
    if sys.argv[2] == "stopped":
        await stopping.wait()
    await engine.close()
    await asyncio.sleep(0)
    print("stopping" if stopping.is_set() else "running", flush=True)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize(("how", "state"), [("stopped", "stopping"), ("closed", "running")])
def test_a_worker_ends_when_it_is_asked_and_not_by_its_engines_end(
    tmp_path: Path, how: str, state: str
) -> None:
    vllm = {"gpu_memory_utilization": 0.3, "enforce_eager": True}
    dtype = {"dtype": "float32" if IS_DRY else "bfloat16", "max_model_len": 128}
    config = run_config(
        gpu_model(tmp_path / "model"),
        model=dtype,
        rollout={"engine": "vllm", "max_num_seqs": 4, "vllm": vllm},
    )
    (tmp_path / "config.json").write_text(config.model_dump_json())
    (tmp_path / "worker.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "worker.py"), str(tmp_path / "config.json"), how]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    worker = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True, cwd=REPO)
    try:
        assert worker.stdout is not None
        assert "started\n" in iter(worker.stdout.readline, "")
        children = psutil.Process(worker.pid).children(recursive=True)
        if how == "stopped":
            worker.send_signal(signal.SIGTERM)
        said, _ = worker.communicate(timeout=120)
    finally:
        worker.kill()
    assert worker.returncode == 0 and said.split()[-1] == state
    psutil.wait_procs(children, timeout=60)
    assert not [child for child in children if child.is_running()]
