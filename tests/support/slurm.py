"""Debian's Slurm on this machine: a controller and nodes of two CPUs, with a key and folders of its own."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.servers import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=20
{nodes}
PartitionName=main Nodes=ALL Default=YES State=UP
"""


def is_installed() -> bool:
    """Whether it is installed, and may be started: its daemons need root."""
    paths = [shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") for name in PROGRAMS]
    return all(paths) and os.geteuid() == 0


class Slurm:
    def __init__(self, folder: Path, num_nodes: int) -> None:
        self.folder = folder
        self.nodes = [f"n{number + 1}" for number in range(num_nodes)]
        host = socket.gethostname()
        nodes = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=2 State=UNKNOWN"
            for name in self.nodes
        ]
        text = CONFIG.format(host=host, port=free_port(), folder=folder, nodes="\n".join(nodes))
        (folder / "slurm.conf").write_text(text)
        path = f"{os.environ['PATH']}:/usr/sbin"
        self.env = {**os.environ, "PATH": path, "SLURM_CONF": str(folder / "slurm.conf")}

    @contextlib.contextmanager
    def running(self) -> Iterator["Slurm"]:
        folder = self.folder
        for name in ("state", *(f"spool-{node}" for node in self.nodes)):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        files = {"key-file": key, "socket": folder / "munge.socket", "pid-file": folder / "munge.pid"}
        files |= {"log-file": folder / "munge.log", "seed-file": folder / "munge.seed"}
        programs = [
            ["munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in files.items())]
        ]
        programs.append(["slurmctld", "-D"])
        programs += [["slurmd", "-D", "-N", node] for node in self.nodes]
        started: list[subprocess.Popen[bytes]] = []
        with (folder / "daemons.log").open("ab") as log:
            try:
                for program in programs:
                    started.append(subprocess.Popen(program, env=self.env, stdout=log, stderr=log))
                yield self
            finally:
                for process in reversed(started):
                    process.send_signal(signal.SIGTERM)
                    process.wait()

    def call(self, *words: str) -> str:
        """The output of a Slurm command; empty where it fails."""
        done = subprocess.run(words, env=self.env, capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else ""
