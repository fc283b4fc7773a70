"""Starts a service in its container: on free GPUs, with a metrics port and a name that no other replica has.

    start.py tidemill.services.rollout --run my-run

`TIDEMILL_GPUS=0,1,2,3` names the GPUs of all replicas of a service on this machine, `TIDEMILL_GPUS_EACH`
how many each of them gets (1). A replica takes the first free ones: it holds a lock on one file for each GPU,
in a folder that all containers of the machine share. The kernel frees a lock when its process ends, however
it ends, so `--scale` and kill -9 need no bookkeeping. With `TIDEMILL_GPUS` empty nothing is taken: the
service sees what the container sees.

`TIDEMILL_METRICS_PORT` is 9464; 0 takes a free one, for containers that share the network of their machine.
The health check finds it in a file. The service takes the place of this process (exec), locks included.
Needs only Python.
"""

import fcntl
import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

GPUS_VARIABLE = "TIDEMILL_GPUS"
EACH_VARIABLE = "TIDEMILL_GPUS_EACH"
LOCKS_VARIABLE = "TIDEMILL_GPU_LOCKS"
PORT_VARIABLE = "TIDEMILL_METRICS_PORT"
PORT_FILE_VARIABLE = "TIDEMILL_METRICS_PORT_FILE"
LOCKS_FOLDER = "/gpus"
PORT = "9464"
PORT_FILE = "/tmp/metrics-port"
MISTAKE = 2
NOTHING_FREE = 3


def main() -> None:
    """Take GPUs, choose a port, then become the service."""
    if len(sys.argv) < 2:
        end("usage: start.py MODULE ARGUMENTS...", MISTAKE)
    module, *arguments = sys.argv[1:]
    wanted = [gpu.strip() for gpu in os.environ.get(GPUS_VARIABLE, "").split(",") if gpu.strip()]
    if wanted:
        count = number(EACH_VARIABLE, "1", 1, len(wanted))
        gpus = take(wanted, count, Path(os.environ.get(LOCKS_VARIABLE) or LOCKS_FOLDER))
        os.environ |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        print(f"GPUs {', '.join(gpus)} of {', '.join(wanted)}", file=sys.stderr, flush=True)
    port = number(PORT_VARIABLE, PORT, 0, 65535) or free_port()
    Path(os.environ.get(PORT_FILE_VARIABLE) or PORT_FILE).write_text(str(port), encoding="utf-8")
    name = f"{module.rpartition('.')[2]}-{socket.gethostname()}-{port}"
    flags = ["--metrics-port", str(port), "--name", name]
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *flags, *arguments])


def take(wanted: list[str], count: int, folder: Path) -> list[str]:
    """Lock the first `count` free GPUs, for as long as this process, or what it becomes, lives."""
    folder.mkdir(parents=True, exist_ok=True)
    held: list[str] = []
    for gpu in wanted:
        descriptor = os.open(folder / f"gpu-{gpu}", os.O_CREAT | os.O_RDWR, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        os.set_inheritable(descriptor, True)
        held.append(gpu)
        if len(held) == count:
            return held
    end(
        f"{len(held)} of the GPUs {', '.join(wanted)} are free and every replica gets {count}: name more "
        "GPUs, or scale down.",
        NOTHING_FREE,
    )


def number(variable: str, default: str, lowest: int, highest: int) -> int:
    """A whole number from an environment variable; another value ends the program."""
    text = os.environ.get(variable) or default
    if not text.isdecimal() or not lowest <= int(text) <= highest:
        end(f"{variable} is {text!r}; expected a number from {lowest} to {highest}.", MISTAKE)
    return int(text)


def free_port() -> int:
    """A port that is free now. If another process takes it first, the service ends and is started again."""
    with socket.create_server(("", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def end(message: str, code: int) -> NoReturn:
    print(f"tidemill: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
