"""Whatever is written into a run's streams, its services go on, and the run comes out whole."""

import random
from pathlib import Path

import msgpack

from tests.support.runs import ServiceRun, simulated_config
from tests.support.training import commits_of, make_score
from tests.support.trajectories import make_trajectory
from tests.support.waiting import wait_until
from tidemill.common.wire import codec
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Lane, Message, WeightFile, WeightManifest

GROUPS, STEPS, SEED, MUTATIONS = 4, 10, 7, 60


def hostile_payloads() -> list[bytes]:
    """Lies about sizes, deep nesting, code, and real messages with damaged bytes."""
    rng = random.Random(SEED)
    payloads = [
        b"",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"cposix\nsystem\n(S'touch pwned'\ntR.",
        msgpack.packb({"ticket": 2**63, "index": -1}),
        msgpack.packb({"ticket": float("nan")}),
        b"x" * (1 << 20),
    ]
    messages: list[Message] = [make_trajectory(1, 1), make_score(1, 1), make_trajectory(10**9, 0)]
    for _ in range(MUTATIONS):
        damaged = bytearray(codec.encode_payload(rng.choice(messages)))
        for _ in range(rng.randint(1, 8)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        payloads.append(bytes(damaged))
    return payloads


def hostile_entries() -> list[tuple[bytes, ...]]:
    """Field lists of stream entries: with our fields, with others, of a newer release."""
    rng = random.Random(SEED)
    entries = [(b"v", codec.SCHEMA, b"p", payload) for payload in hostile_payloads()]
    entries += [(b"v", b"9.0", b"p", b"\x80"), (b"junk", b"1"), (b"v", b"\xff" * 1000, b"p", b"\x80")]
    rng.shuffle(entries)
    return entries


def escaping_manifests(version: int) -> list[WeightManifest]:
    """Paths out of the run's folder, as far as the message lets them be written at all."""
    found = []
    for folder, name in (("..", "passwd"), ("/etc", "passwd"), ("v00000001", "../../../passwd")):
        file = WeightFile.model_construct(name=name, num_bytes=1, checksum="0" * 32)
        found.append(
            WeightManifest.model_construct(version=version, folder=folder, files=(file,), digest="0" * 32)
        )
    return found


async def pollute(run: ServiceRun, keys: Keys) -> None:
    """Everything, into every stream that more than the trainer writes to, or that is read by newest."""
    streams = [f(lane) for f in (keys.trajectories, keys.scores) for lane in Lane] + [keys.dead]
    for key in streams:
        for entry in hostile_entries():
            await run.broker.execute("XADD", key, "*", *entry)
    for number, manifest in enumerate(escaping_manifests(10**6), 1):
        fields = (b"v", codec.SCHEMA, b"p", codec.encode_payload(manifest))
        await run.broker.execute("XADD", keys.weights, f"0-{number}", *fields)


async def test_a_run_comes_out_whole_among_hostile_messages(tmp_path: Path) -> None:
    config = simulated_config(
        tmp_path, trainer__steps=STEPS, trainer__simulated={"group_s": 0.05}, streams__max_attempts=2
    )
    async with ServiceRun(tmp_path, config) as run:
        await pollute(run, run.keys)
        run.start_all()
        await wait_until(lambda: "step committed" in run.log_of("trainer"))
        for key in (run.keys.trajectories(), run.keys.scores(), run.keys.dead):
            for entry in hostile_entries():
                await run.broker.execute("XADD", key, "*", *entry)
        assert await run.wait("trainer") == 0, run.log_of("trainer")
        commits = await commits_of(run.broker, run.keys)
        assert [commit.step for commit in commits] == list(range(STEPS))
        trained = [key for commit in commits for key in commit.trained_keys]
        assert len(trained) == len(set(trained)) == STEPS * GROUPS * config.trainer.group_size
        for role in ("rollout", "reward"):
            assert run.processes[role].poll() is None, run.log_of(role)
            assert await run.stop(role) == 0, run.log_of(role)
        dead = await run.broker.execute("XLEN", run.keys.dead)
        assert dead > 2 * len(hostile_entries()), "the reward workers dead-lettered what they could not read"
