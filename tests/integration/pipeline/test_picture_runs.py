"""Whole runs with pictures, by real processes on a real Redis: whatever dies, and whatever a file is, each
sample is trained once, or its row is left out with a reason."""

import io
import signal
import socket
import struct
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import xxhash

from tests.chaos.mortal_pictures import COUNT, POINT, SIGNAL
from tests.support.picture_runs import GROUPS, STEPS, draw_rows, picture_config, row_of
from tests.support.runs import ServiceRun
from tests.support.training import messages
from tests.support.vision import file_of, noise
from tests.support.waiting import wait_until
from tidemill.common.images.door import NOTES_FILE
from tidemill.common.images.store import IMAGES_FOLDER, ImageStore
from tidemill.common.wire.messages import Commit, Ticket, Trajectory

KILLED = {
    "before a picture is written": ("door", 2),
    "with a picture written, before its note": ("door", 2),
    "before the notes are written": ("door", 1),
    "with its pictures read, before it generates": ("claim", 2),
    "with a sample generated, before its entry": ("claim", 2),
    "between training and commit": ("step", 1),
    "between commit and weights": ("step", 1),
}
"""Where a process is killed: when in the run (as pictures are taken in, as a worker holds a claim, in a
step), and which time it comes there."""
MORTAL = "tests.chaos.mortal_pictures"


def assert_pictures_are_those_of_their_rows(
    run: ServiceRun, tickets: list[Ticket], samples: list[Trajectory], commits: list[Commit]
) -> None:
    """Each row has the same picture in all its tickets and samples, whole in the store."""
    images = {ticket.ticket: ticket.images for ticket in tickets}
    of_rows: dict[int, set[str]] = {}
    for ticket in tickets:
        of_rows.setdefault(ticket.row, set()).update(image.digest for image in ticket.images)
    assert max(len(digests) for digests in of_rows.values()) == 1
    store = ImageStore(run.run_dir)
    for sample in samples:
        assert sample.images == images[sample.ticket] and not sample.fault
        assert all(store.read(image) for image in sample.images)
    assert not [drop for commit in commits for drop in commit.dropped]


@pytest.fixture
def rows(tmp_path: Path) -> list[dict[str, Any]]:
    return draw_rows(tmp_path, 6)


def of_moment(moment: str, points: tuple[str, ...]) -> list[str]:
    return [point for point in points if KILLED[point][0] == moment]


async def killed(run: ServiceRun, point: str) -> None:
    """Start the service of a point, which dies there."""
    _, count = KILLED[point]
    run.variables[MORTAL] = {POINT: point, SIGNAL: "SIGKILL", COUNT: str(count)}
    run.start(MORTAL, point)
    assert await run.wait(point) == -signal.SIGKILL, run.log_of(point)


async def stopped(run: ServiceRun, point: str) -> str:
    """Start the service of a point, which stands still there; returns the process's name."""
    run.variables[MORTAL] = {POINT: point, SIGNAL: "SIGSTOP", COUNT: "1"}
    run.start(MORTAL, point)
    pid = run.processes[point].pid

    def is_stopped() -> bool:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    await wait_until(is_stopped, awaited=point)
    return point


async def num_entries(run: ServiceRun) -> int:
    """Tickets that are issued."""
    return int(await run.broker.execute("XLEN", run.keys.prompts()))


def kill_redis(run: ServiceRun, name: str) -> None:
    """Redis dies of SIGKILL while a process stands still, which goes on when it is back."""
    run.redis.kill()
    run.redis.start()
    run.processes[name].send_signal(signal.SIGCONT)


FEW_POINTS = (
    "with a picture written, before its note",
    "with a sample generated, before its entry",
    "between training and commit",
)
"""One of each kind: while pictures are taken in, between a claim and its entry, and in a step."""


@pytest.mark.timeout(900)  # a dozen starts of processes, on a busy machine
@pytest.mark.parametrize(
    "points", [FEW_POINTS, pytest.param(tuple(KILLED), marks=pytest.mark.long)], ids=["few", "all"]
)
async def test_kills_between_claim_and_entry_lose_no_sample_and_train_none_twice(tmp_path, rows, points):
    """Redis is killed, too: while the trainer has pictures and no tickets, and a worker an entry."""
    config = picture_config(tmp_path, rows, streams__lease_s=1.5)
    async with ServiceRun(tmp_path, config) as run:
        store = run.run_dir / IMAGES_FOLDER
        run.start("reward")
        for point in of_moment("door", points):
            await killed(run, point)
            assert not (store / NOTES_FILE).exists() and not await num_entries(run)
        trainer = await stopped(run, "with the notes written, before the tickets")
        assert (store / NOTES_FILE).exists() and not await num_entries(run)
        kill_redis(run, trainer)
        for point in of_moment("claim", points):
            await killed(run, point)
        worker = await stopped(run, "with an entry, before the next one")
        kill_redis(run, worker)
        await run.reach(1)
        run.kill(trainer)
        for point in of_moment("step", points):
            await killed(run, point)
        run.start("trainer")
        commits = await run.trained()
        tickets = await messages(run.broker, run.keys.prompts(), Ticket)
        samples = await messages(run.broker, run.keys.trajectories(), Trajectory)
        assert Counter(len(set(commit.trained_keys)) for commit in commits) == {GROUPS * 4: STEPS}
        assert_pictures_are_those_of_their_rows(run, tickets, samples, commits)
        for path in store.glob("*.png"):
            assert xxhash.xxh3_128_hexdigest(path.read_bytes()) == path.stem
        assert len(list(store.glob("*.png"))) == len(rows)


def header_of(width: int, height: int) -> bytes:
    """A PNG file of this size, with only the beginning of its pixels."""
    file = b"\x89PNG\r\n\x1a\n"
    for name, content in (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(bytes(100))),
    ):
        checksum = zlib.crc32(name + content)
        file += struct.pack(">I", len(content)) + name + content + struct.pack(">I", checksum)
    return file


def animation() -> bytes:
    frames = [noise(20, 20, seed) for seed in range(3)]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    return buffer.getvalue()


BROKEN = {
    "damaged.png": (file_of(noise(40, 40))[:-200], "cannot be decoded"),
    "page.png": (b"<html>not found</html>", "it is none of PNG"),
    "huge.png": (header_of(40_000, 40_000), "pixels, and at most"),
    "animated.gif": (animation(), "only still pictures"),
    "empty.png": (b"", "it is empty"),
    "without-pixels.png": (header_of(0, 40), "cannot be decoded"),
    "mislabelled.jpg": (file_of(noise(20, 20)), "labelled JPEG, and its content is PNG"),
}
"""Contents of files, and why their rows are left out."""


@pytest.fixture
def visits() -> Iterator[tuple[int, list[int]]]:
    """A server on this machine, at a private address: its port, and the ports of who came."""
    came: list[int] = []
    server = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, (_, port) = server.accept()
                came.append(port)
                connection.close()

    Thread(target=accept, daemon=True).start()
    yield server.getsockname()[1], came
    server.close()


async def test_each_picture_that_is_none_costs_its_own_row_and_the_others_are_trained(tmp_path, rows, visits):
    port, came = visits
    reasons = {name: reason for name, (_, reason) in BROKEN.items()}
    for name, (content, _) in BROKEN.items():
        (tmp_path / name).write_bytes(content)
    for address in (f"http://127.0.0.1:{port}/a.png", "http://169.254.169.254/latest/meta-data"):
        reasons[address] = "not a public address"
    reasons["nowhere.png"] = "No such file"
    without_picture = {"prompt": "w1 w2", "ground_truth": "3"}
    # Between the others, so that a row that is left out would move those behind it.
    mixed = [*rows[:3], *map(row_of, reasons), *rows[3:], without_picture]
    good = {0, 1, 2, *range(3 + len(reasons), len(mixed))}
    config = picture_config(tmp_path, mixed, data__shuffle=False)
    async with ServiceRun(tmp_path, config) as run:
        run.start_all()
        commits = await run.trained()
        tickets = await messages(run.broker, run.keys.prompts(), Ticket)
        samples = await messages(run.broker, run.keys.trajectories(), Trajectory)
        log = run.log_of("trainer")
    assert {ticket.row for ticket in tickets} == good
    trained = [key for commit in commits for key in commit.trained_keys]
    assert len(trained) == len(set(trained)) == STEPS * GROUPS * 4
    assert_pictures_are_those_of_their_rows(run, tickets, samples, commits)
    for number, (name, reason) in enumerate(reasons.items()):
        line = f"pictures.jsonl line {4 + number}: "
        assert line in log and reason in log.partition(line)[2][:400], name
    assert not came, "no connection was made to a private address"
