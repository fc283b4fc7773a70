"""vLLM's processes share nothing with the worker that starts them, also where vLLM would fork, as on GPUs."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.vllm_machine import need_vllm

need_vllm()

PROGRAM = """
import asyncio, signal, time

def core(ready):
    signal.signal(signal.SIGTERM, lambda *_: exit(0))  # vLLM's core has a handler of its own too
    ready.send(True)
    time.sleep(600)

async def main():
    from tidemill.services.rollout.engines.vllm_launch import set_environment
    from vllm.utils.system_utils import get_mp_context

    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    set_environment()
    context = get_mp_context()
    mine, its = context.Pipe()
    process = context.Process(target=core, args=(its,))
    process.start()
    await asyncio.to_thread(mine.recv)
    process.terminate()
    await asyncio.to_thread(process.join)
    await asyncio.sleep(0)
    return int(stopped.is_set())

if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
"""


def test_ending_vllms_processes_stops_no_worker(tmp_path: Path) -> None:
    """A forked process has the event loop's signal socket: its SIGTERM would be the worker's."""
    program = tmp_path / "worker.py"
    program.write_text(PROGRAM)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    ended = subprocess.run([sys.executable, str(program)], env=variables, timeout=300)
    assert ended.returncode == 0
