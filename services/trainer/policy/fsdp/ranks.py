"""The processes that train one model together: who they are, and how they exchange bytes.

Started by torchrun (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT`), or by rank 0 itself on
its own machine (`trainer.num_ranks`). Rank 0 leads. Bytes travel over gloo, in a group of its own that waits
for months: between two steps the leader may have nothing to say for hours. A rank that dies breaks the
connection, and the others end with an error. Nothing is pickled.
"""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, get_args

import numpy as np
import structlog
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from tidemill.common.config.trainer import TrainerConfig
from tidemill.common.errors import ConfigError, TidemillError
from tidemill.common.process.programs import Program, ending_in_words, run_own
from tidemill.services.trainer.policy.columns import ContextGroup
from tidemill.services.trainer.weights.peers import Thread

log = structlog.get_logger(__name__)

GRACE_S = 10.0
"""Time for the call under way to raise, and for the trainer to end as it does after errors."""
EXPLANATION_S = 2.0
"""A broken connection may be noticed before the process whose end broke it."""
BEAT_S = 2.0
SILENT_S = 60.0
"""Time between two heartbeats, and the time without one after which a rank is lost: loading may block all
threads of a process."""
SHUTDOWN_TIMEOUT_S = 60.0
EXIT_CODE = 1


class RankWatch:
    """What one process knows of the other ranks, until the run is over.

    Notices within seconds that another rank has ended, names it, and ends this one. Collective calls on GPUs
    do not notice: they wait for minutes. So rank 0 watches the processes that it has started. Between hosts,
    where torchrun starts them, each rank counts up in torch's store: rank 0 looks at all others, and they at
    rank 0. A process that has lost a rank kills those that it started, and ends: by the error that the call
    under way raises, or, where that call goes on waiting, without it.
    """

    def __init__(self, started: Mapping[int, "subprocess.Popen[bytes]"] | None = None) -> None:
        """Watch the processes that this one has started, by rank."""
        self._started = dict(started or {})
        self._is_over = threading.Event()
        self._lost = threading.Event()
        self._lock = threading.Lock()
        self._reason = ""
        self._exit_code = EXIT_CODE
        self._explains = bool(started)
        for rank in self._started:
            self._run(self._wait_for, rank)

    def follow(self, beats: "Heartbeats") -> None:
        """Send heartbeats, and watch those of the others."""
        self._explains = True
        self._run(self._count, beats)
        self._run(self._guard, beats)

    def loss(self) -> tuple[str, int]:
        """Which rank is lost and why, and the exit code for it; empty where none is known to be."""
        if self._explains:
            self._lost.wait(EXPLANATION_S)
        return self._reason, self._exit_code

    def stop(self) -> None:
        """The run is over: a rank that ends from now on is not lost."""
        self._is_over.set()

    def join(self) -> None:
        deadline = time.monotonic() + (0.0 if self._lost.is_set() else SHUTDOWN_TIMEOUT_S)
        for process in self._started.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _run(self, work: Callable[..., None], *args: object) -> None:
        threading.Thread(target=work, args=args, daemon=True, name="ranks").start()

    def _wait_for(self, rank: int) -> None:
        code = self._started[rank].wait()
        self._lose(f"rank {rank} has ended with {ending_in_words(code)}; see its output above", code)

    def _count(self, beats: "Heartbeats") -> None:
        num_failed = 0
        reason = ""
        while not reason and not self._is_over.wait(BEAT_S):
            try:
                reason = beats.look()
                num_failed = 0
            except RuntimeError as error:  # once, it may be that rank 0 has just ended, as this one will
                num_failed += 1
                reason = f"rank 0 cannot be reached any more ({error})" if num_failed > 1 else ""
        if reason:
            self._lose(reason)

    def _guard(self, beats: "Heartbeats") -> None:
        """Notices a host without power, which refuses no connection: `_count` waits for it."""
        while not self._is_over.wait(BEAT_S):
            if beats.is_stuck():
                self._lose(f"the host of rank 0 has not answered for {SILENT_S:.0f} s")
                return

    def _lose(self, reason: str, code: int = EXIT_CODE) -> None:
        with self._lock:
            # The first loss is the cause: ranks that end because of it are not reported.
            if self._is_over.is_set() or self._lost.is_set():
                return
            # A rank that was killed has a negative code, which no process can exit with.
            self._reason = reason
            self._exit_code = code if code > 0 else EXIT_CODE
            self._lost.set()
        log.error("a rank of the trainer is lost", reason=reason)
        for process in self._started.values():
            process.kill()
        if not self._is_over.wait(GRACE_S):
            print(f"tidemill trainer: {reason}", file=sys.stderr, flush=True)
            # The main thread waits in a call that never returns, and would not see an exception.
            os._exit(self._exit_code)


class Heartbeats:
    """Counters in torch's store: a rank counts up its own, and looks at those of others."""

    def __init__(self, store: Any, rank: int, size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._rank = rank
        self._clock = clock
        watched = range(1, size) if rank == 0 else range(1)
        self._looked_at = clock()
        self._seen = {number: (0, clock()) for number in watched}
        """The last number of each, and since when it has been that."""

    def look(self) -> str:
        """Count once; returns which rank has not counted for too long, as a sentence; empty where none."""
        self._store.add(f"tidemill/beat/{self._rank}", 1)
        for rank, (before, since) in self._seen.items():
            # Adding 0 reads it: `get` would wait for a number that is not there yet.
            number = self._store.add(f"tidemill/beat/{rank}", 0)
            if number != before:
                self._seen[rank] = number, self._clock()
            elif self._clock() - since > SILENT_S:
                return (
                    f"rank {rank} has been silent for {SILENT_S:.0f} s: it, its host or the network is gone"
                )
        self._looked_at = self._clock()
        return ""

    def is_stuck(self) -> bool:
        """Whether `look` has taken too long."""
        return self._clock() - self._looked_at > SILENT_S


PATIENCE = timedelta(days=365)
NCCL_TIMEOUT = timedelta(minutes=5)
"""Limit of a collective call on GPUs, in which ranks wait for each other's compute alone: else one hangs."""
JOIN_TIMEOUT = timedelta(hours=1)
"""Time for all ranks to join: rank 0 reads its data first, and an engine may have to leave its GPU."""


class RankLostError(TidemillError):
    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(f"{reason}. Start the trainer again: it goes on from its last checkpoint")
        self.exit_code = exit_code


class Ranks:
    """This process among those that train together."""

    mesh: DeviceMesh
    shard_size: int
    """Ranks that hold one copy of the model together."""
    replica: int
    shard: int
    """Which copy this rank holds a part of, and which part."""
    context: ContextGroup | None = None
    """The ranks that share this rank's tiles; None where none do."""
    expert_mesh: DeviceMesh | None = None
    """Axes: copies of the model, shards of the same experts, other experts. None where all have the same."""

    def __init__(self, rank: int, size: int, device: torch.device, watch: RankWatch | None = None) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self._watch = watch or RankWatch()
        # One group for each thread: within a group, all ranks have to make their calls in the same order.
        self._groups = {
            thread: dist.new_group(backend="gloo", timeout=PATIENCE) for thread in get_args(Thread)
        }

    def lay_out(self, shard_size: int | None, context_size: int = 1, expert_size: int = 1) -> None:
        """Let each `shard_size` ranks (None: all) hold a copy of the model, each `context_size` ranks share
        tiles, and each `expert_size` ranks divide the experts of a layer. A call of all ranks."""
        # Neighbours: these exchange most, and are on one machine if possible.
        ranks_DC = torch.arange(self.size).view(-1, context_size).tolist()
        if context_size > 1:
            group, _ = dist.new_subgroups_by_enumeration(ranks_DC, timeout=_timeout(self.device))
            self.context = ContextGroup(group, self.rank % context_size, context_size)
        else:
            self.context = None
        self.shard_size = shard_size or self.size
        self.replica, self.shard = divmod(self.rank, self.shard_size)
        copies = {"replica": self.size // self.shard_size} if self.shard_size < self.size else {}
        self.mesh = self._make_mesh(copies | {"shard": self.shard_size})
        self.expert_mesh = None
        if expert_size > 1:
            shards = {"expert_shard": self.shard_size // expert_size, "expert": expert_size}
            self.expert_mesh = self._make_mesh(copies | shards)

    def _make_mesh(self, sizes: Mapping[str, int]) -> DeviceMesh:
        """A mesh of axes by name, from ranks that are far apart to neighbours."""
        kind = self.device.type
        names = tuple(sizes)
        if len(sizes) == 1:
            return init_device_mesh(kind, (self.size,), mesh_dim_names=names)
        # Groups that torch makes itself for a mesh have its own timeout, and not that of the whole.
        ranks = torch.arange(self.size).view(*sizes.values())
        groups = []
        for axis in range(ranks.ndim):
            members = ranks.movedim(axis, -1).flatten(0, -2).tolist()
            groups.append(dist.new_subgroups_by_enumeration(members, timeout=_timeout(self.device))[0])
        return DeviceMesh.from_group(groups, kind, ranks, mesh_dim_names=names)

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0, which owns streams and commits."""
        return self.rank == 0

    def broadcast(self, payload: bytes = b"") -> bytes:
        """The leader's bytes, on every rank. Raises RankLostError: another rank has ended."""
        return self.deal([payload] * self.size if self.is_leader else ())

    def deal(self, payloads: Sequence[bytes]) -> bytes:
        """The bytes that rank 0 has for this rank. Raises RankLostError: another rank has ended."""
        group = self._groups["policy"]
        with self._naming_lost_ranks():
            length = torch.empty(1, dtype=torch.int64)
            lengths = [torch.tensor([len(payload)]) for payload in payloads] or None
            dist.scatter(length, lengths, 0, group=group)
            if not self.is_leader:
                return self._receive(int(length), 0)
            sent = {rank: _tensor_of(payload) for rank, payload in enumerate(payloads) if rank and payload}
            # All at once; `sent` keeps the tensors until they are sent.
            for work in [dist.isend(data, rank, group=group) for rank, data in sent.items()]:
                assert work is not None, "all ranks are in the group"
                work.wait()
            return payloads[0]

    def collect(self, payload: bytes) -> list[bytes]:
        """Every rank's bytes, in the order of ranks, on rank 0; on the others none. Raises RankLostError:
        another rank has ended."""
        group = self._groups["policy"]
        with self._naming_lost_ranks():
            lengths = [torch.empty(1, dtype=torch.int64) for _ in range(self.size if self.is_leader else 0)]
            dist.gather(torch.tensor([len(payload)]), lengths or None, 0, group=group)
            if self.is_leader:
                others = [self._receive(int(lengths[rank]), rank) for rank in range(1, self.size)]
                return [payload, *others]
            if payload:
                dist.send(_tensor_of(payload), 0, group=group)
            return []

    def _receive(self, length: int, rank: int) -> bytes:
        data = torch.empty(length, dtype=torch.uint8)
        if length:
            dist.recv(data, rank, group=self._groups["policy"])
        return data.numpy().tobytes()

    def meet(self) -> None:
        """Wait for all ranks, for as long as it takes: one whose disk is slow is not one that hangs."""
        self.gather(b"")

    def gather(self, payload: bytes, thread: Thread = "policy") -> list[bytes]:
        """Every rank's bytes, in the order of ranks, on every rank; `thread` is the one that calls. Raises
        RankLostError: another rank has ended."""
        group = self._groups[thread]
        with self._naming_lost_ranks():
            lengths = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(lengths, torch.tensor([len(payload)]), group=group)
            sizes = [int(length) for length in lengths]
            # `all_gather` takes tensors of one size: shorter ones are padded, and cut again below.
            padded = torch.zeros(max(sizes), dtype=torch.uint8)
            padded[: len(payload)] = _tensor_of(payload)
            parts = [torch.empty_like(padded) for _ in sizes]
            if len(padded):
                dist.all_gather(parts, padded, group=group)
            return [
                payload_of_rank[:size].numpy().tobytes()
                for payload_of_rank, size in zip(parts, sizes, strict=True)
            ]

    def close(self) -> None:
        """Leave the group; rank 0 waits for those that it started."""
        # First: the others end now too, and that is no loss.
        self._watch.stop()
        dist.destroy_process_group()
        self._watch.join()

    @contextmanager
    def _naming_lost_ranks(self) -> Iterator[None]:
        """Torch raises a RuntimeError with the addresses of sockets where a peer is gone."""
        try:
            yield
        except RuntimeError as error:
            addresses = " ".join(str(error).split())[:200]
            reason, code = self._watch.loss()
            reason = reason or f"another rank has ended, its log says why ({addresses})"
            raise RankLostError(reason, code) from error


def _timeout(device: torch.device) -> timedelta | None:
    """Limit of a collective call; None is torch's own."""
    return NCCL_TIMEOUT if device.type == "cuda" else None


def _tensor_of(payload: bytes) -> Tensor:
    # A copy that may be written: torch warns of memory that is read-only.
    return torch.from_numpy(np.frombuffer(bytearray(payload), dtype=np.uint8))


def join_ranks(
    environment: Mapping[str, str] = os.environ,
    started: Mapping[int, "subprocess.Popen[bytes]"] | None = None,
) -> Ranks:
    """Meet the other ranks, as torchrun's variables say; `started` are those that this process has started.
    Raises ConfigError: there are more ranks on this machine than GPUs."""
    rank = int(environment["RANK"])
    size = int(environment["WORLD_SIZE"])
    device = torch.device("cpu")
    if torch.cuda.is_available():
        local = int(environment.get("LOCAL_RANK", rank))
        if local >= torch.cuda.device_count():
            raise ConfigError(
                f"rank {local} of this machine has no GPU: torch sees {torch.cuda.device_count()}. "
                "Lower trainer.num_ranks, or start fewer processes"
            )
        device = torch.device("cuda", local)
        # Before the group is made: NCCL, and all that names no device, takes this one.
        torch.cuda.set_device(device)
    host = environment["MASTER_ADDR"]
    port = int(environment["MASTER_PORT"])
    watch = RankWatch(started)
    # A store of our own: torch's would wait for ranks to join only as long as a collective call may take.
    store, *_ = next(rendezvous(f"tcp://{host}:{port}", rank, size, timeout=JOIN_TIMEOUT))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("ranks", store),  # type: ignore[attr-defined]
        rank=rank,
        world_size=size,
        timeout=_timeout(device),
    )
    if int(environment.get("LOCAL_WORLD_SIZE", size)) < size:
        # A connection of its own: the group's is taken while a call waits for a key.
        beats = dist.TCPStore(host, port, is_master=False)  # type: ignore[attr-defined]
        watch.follow(Heartbeats(beats, rank, size))
    return Ranks(rank, size, device, watch)


def lead_ranks(config: TrainerConfig) -> Ranks | None:
    """The ranks that rank 0 leads; None where it trains alone.

    Without torchrun it starts the other ranks itself; they end when it does.

    Raises:
        ConfigError: torchrun started another number of ranks than `trainer.num_ranks`.
    """
    size = int(os.environ.get("WORLD_SIZE", "0"))
    if size > 1 and size != config.num_ranks:
        raise ConfigError(
            f"torchrun started {size} ranks, trainer.num_ranks is {config.num_ranks}; make them equal"
        )
    if config.num_ranks == 1:
        return None
    if size > 1:
        return join_ranks()
    of_leader, *of_others = variables_of_ranks(config.num_ranks)
    command = run_own(Program.TRAINER_RANK, str(os.getpid()))
    started = {rank: subprocess.Popen(command, env=os.environ | v) for rank, v in enumerate(of_others, 1)}
    return join_ranks(of_leader, started)


def variables_of_ranks(size: int) -> list[dict[str, str]]:
    """Environment variables with which each of `size` ranks on this machine joins, as torchrun sets them."""
    with socket.socket() as probe:
        # Another process may take the port before the store: the start fails then, and can be tried again.
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
