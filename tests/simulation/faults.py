"""Injects the faults of a schedule into a world. `KINDS` lists them, with what each does.

Nothing here knows what the services do about it. A fault that finds nothing to happen to is left out.
"""

import contextvars
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.simulation import damage, operators, strangers
from tests.simulation.cluster import State, Weather
from tests.simulation.fleet import Fleet
from tests.simulation.loop import START_S
from tests.simulation.process import Process
from tests.simulation.redis.keyspace import split
from tests.simulation.redis.server import stream_keys
from tests.simulation.schedule import Fault, Schedule
from tests.simulation.world import World
from tidemill.common.config import RunConfig
from tidemill.common.redis.broker import _script
from tidemill.common.wire.messages import CLAIMS_FOLDER

SCRIPTED = ("EVALSHA", "FCALL")
"""Entries may be appended by a script."""
GRACE_S = 20.0
"""How long a fault waits for its moment: for the next command of some kind, or for a process to be there."""


def script_sha(name: str) -> bytes:
    """The SHA by which a script is called."""
    return _script(name)[1].encode()


@dataclass(frozen=True)
class Moment:
    """The n-th command of a kind from now on: `command` is its name or that of its script (`XADD` stands for
    every script), and `text` is part of its first words."""

    command: str
    text: str
    count: int = 1

    def is_command(self, fields: list[bytes]) -> bool:
        name = split(fields)[0].decode()
        keys = stream_keys(fields) if name == "XREADGROUP" else []
        words = b" ".join((*fields[:8], *keys, b"")).decode(errors="replace")
        is_script = fields[1:2] == [script_sha(self.command)] if self.command.islower() else False
        is_it = name == self.command or (self.command == "XADD" and name in SCRIPTED) or is_script
        return is_it and self.text in words


@dataclass
class Armed:
    """Something that happens when a command of process `who` comes for the `num_left`-th time."""

    who: str
    moment: Moment
    happen: Callable[[], None]
    num_left: int = 1


class Injector:
    """`arm` sets every fault's alarm; `done` counts those that happened."""

    def __init__(self, world: World, fleet: Fleet, config: RunConfig, schedule: Schedule) -> None:
        self.world = world
        self.fleet = fleet
        self.config = config
        self.schedule = schedule
        self.rng = random.Random(f"faults {schedule.seed}")
        self.done: Counter[str] = Counter()
        self.num_torn = 0
        """Most checkpoints that were torn without a new one in between."""
        self._torn: list[str] = []
        self._damaged = b""
        """SHA of the script whose last argument arrives cut off; empty for none."""
        self.num_lost = 0
        """Entries that Redis has lost."""
        ends = [fault.at_s + float(fault.how.get("for_s", 0.0)) for fault in schedule.faults]
        self.quiet_at_s = START_S + max(ends, default=0.0) + GRACE_S
        self._armed: list[Armed] = []
        """What waits for the arrival of a command."""
        self._armed_sending: list[Armed] = []
        """What waits for a command that a process is about to send."""
        self._followers: dict[int, Fault] = {}
        """By the id of a fault: the one that comes behind it."""
        world.cluster.before = self._before
        world.cluster.sending = lambda process, fields: self._spring(self._armed_sending, process, fields)

    def arm(self) -> None:
        for before, fault in itertools.pairwise((None, *self.schedule.faults)):
            assert fault is not None
            if before is not None and fault.how.get("follows"):
                self._followers[id(before)] = fault
            else:
                self._at(START_S + fault.at_s, lambda fault=fault: self._do(fault))

    def _at(self, when: float, call: Callable[[], None]) -> None:
        self.world.loop.call_at(when, call, context=contextvars.Context())

    def _after(self, delay_s: float, call: Callable[[], None]) -> None:
        self._at(self.world.loop.now + delay_s, call)

    def _do(self, fault: Fault) -> None:
        if self.fleet.outcome:
            return

        def happen() -> None:
            if later_s := fault.how.get("later_s"):
                self._after(later_s, lambda: self._happen(fault))
            else:
                self._happen(fault)

        who = fault.how.get("of", fault.target) or "trainer"
        if before := fault.how.get("before"):
            self._wait_for(self._armed, who, before, happen)
        elif sending := fault.how.get("sending"):
            self._wait_for(self._armed_sending, who, sending, happen)
        else:
            self._happen(fault)

    @staticmethod
    def _wait_for(armed: list[Armed], who: str, words: Sequence[Any], happen: Callable[[], None]) -> None:
        moment = Moment(*words)
        armed.append(Armed(who, moment, happen, moment.count))

    def _before(self, process: Process, fields: list[bytes]) -> None:
        """A command arrives at the server: some faults have waited for it."""
        if self._damaged and fields[1:2] == [self._damaged] and fields[-1]:
            fields[-1] = fields[-1][: len(fields[-1]) // 2]
            self._damaged = b""
        self._spring(self._armed, process, fields)

    @staticmethod
    def _spring(armed_faults: list[Armed], process: Process, fields: list[bytes]) -> None:
        """Let those faults happen that have waited for this command."""
        for armed in list(armed_faults):
            if process.name == armed.who and armed.moment.is_command(fields):
                armed.num_left -= 1
                if not armed.num_left:
                    armed_faults.remove(armed)
                    armed.happen()

    def _happen(self, fault: Fault) -> None:
        self.world.tell("FAULT", repr(fault))
        if hold_s := fault.how.get("hold_s"):  # others come before the trainer when Redis is back
            self.cut_off(Fault(fault.at_s, "cut_off", "trainer", {"for_s": hold_s}))
        if KINDS[fault.kind](self, fault) is not False:
            self.done[fault.kind] += 1
        if then := fault.how.get("then"):  # at the next moment of its kind
            self._do(Fault(fault.at_s, *then, {"before": fault.how["before"]}))
        if (follower := self._followers.get(id(fault))) is not None:
            self._after(follower.at_s, lambda: self._do(follower))

    # What happens.

    def kill(self, fault: Fault) -> bool:
        """SIGKILL: now, or at a command that is not sent, or one that is applied, or at a file operation, or
        behind a payload that no entry claims yet."""
        process = self.fleet.find(fault.target)
        if process is None:
            return False
        if (step := fault.how.get("step", "now")) == "now":
            self.world.kill(process)
        else:
            process.trap = step
            process.num_until_trap = fault.how.get("count", 0)
        return True

    def freeze(self, fault: Fault) -> bool:
        """A process is frozen for longer than its leases, and then goes on; at the latest then, where it is
        frozen `until` a command of the trainer, or of the process `until_of`, arrives."""
        process = self.fleet.find(fault.target)
        if process is None:
            return False
        self.world.freeze(process)
        self._after(fault.how["for_s"], lambda: self.world.thaw(process))
        if until := fault.how.get("until"):
            who = fault.how.get("until_of", "trainer")
            self._wait_for(self._armed, who, until, lambda: self.world.thaw(process))
        return True

    def term(self, fault: Fault) -> bool:
        """SIGTERM: it drains, and is started again."""
        if self.fleet.find(fault.target) is None:
            return False
        self.fleet.terminate(fault.target)
        return True

    def restart(self, fault: Fault) -> bool:
        """Redis dies, and comes back without its last writes."""
        if self.world.cluster.state is not State.UP:
            return False
        keep = self._units_kept(fault.how)
        self.world.cluster.go_down()
        self._after(fault.how.get("for_s", 1.0), lambda: self._come_up(keep, 0.0))
        return True

    def failover(self, fault: Fault) -> bool:
        """A replica takes over that lags behind; the old master answers reads for a while."""
        cluster = self.world.cluster
        if cluster.state is not State.UP:
            return False
        keep = self._units_kept(fault.how)
        cluster.demote()
        for_s = fault.how.get("for_s", 1.0)
        self._after(for_s / 2, cluster.go_down)
        self._after(for_s, lambda: self._come_up(keep, fault.how.get("clock_s", 0.0)))
        return True

    def empty(self, fault: Fault) -> bool:
        """FLUSHALL, or a restart without an append-only file."""
        cluster = self.world.cluster
        if cluster.state is not State.UP:
            return False
        self.world.was_emptied = True
        if fault.how.get("flush"):
            self.num_lost += self.world.history.flush(len(cluster.server.log))
            cluster.server.apply([[b"FLUSHALL"]])
        else:
            self.num_lost += self.world.history.forget_after(0)
            cluster.go_down()
            self._after(fault.how.get("for_s", 1.0), lambda: self._come_up(0, 0.0))
        return True

    def slow(self, fault: Fault) -> None:
        """Every command takes long for a while."""
        self._weather(fault, Weather(slow_s=fault.how["slow_s"]))

    def unreliable(self, fault: Fault) -> None:
        """Commands get lost, or their answers, for a while; with `fate`, one of the two alone."""
        fates = (fault.how["fate"],) if "fate" in fault.how else Weather.fates
        weather = Weather(lose_share=fault.how["share"], fates=fates, hang_share=fault.how.get("hang", 0.0))
        self._weather(fault, weather)

    def full(self, fault: Fault) -> None:
        """Redis has no memory left for a while."""
        self._weather(fault, Weather(is_full=True))

    def operate(self, _: Fault) -> None:
        """An operator looks at the run, and puts its dead letters back."""
        operators.operate(self.world, self.fleet)

    def second(self, _: Fault) -> bool:
        """A second trainer is started on the same folder beside the one that lives."""
        if self.fleet.find("trainer") is None:
            return False
        operators.start_second_trainer(self.world, self.fleet)
        return True

    def add(self, fault: Fault) -> None:
        """One more worker: it starts now, and stays."""
        self.fleet.add(fault.target, fault.target.partition("-")[0])

    def older(self, fault: Fault) -> None:
        """One more worker, of an older release that does not know claims; it is updated after a while."""
        self.world.older.add(fault.target)
        self.add(fault)

        def update() -> None:
            self.world.older.discard(fault.target)
            self.fleet.terminate(fault.target)

        self._after(fault.how["for_s"], update)

    def cut_off(self, fault: Fault) -> bool:
        """One process cannot reach Redis for a while."""
        process = self.fleet.find(fault.target)
        if process is None:
            return False
        self.world.cluster.cut_off.add(process)
        self._after(fault.how["for_s"], lambda: self.world.cluster.cut_off.discard(process))
        return True

    def server_clock(self, fault: Fault) -> None:
        """Redis's clock jumps."""
        self.world.clocks.server_offset_s += fault.how["by_s"]

    def host_clock(self, fault: Fault) -> None:
        """The clock of one host jumps, and stays so for those that start there later."""
        member = self.fleet.members[fault.target]
        member.wall_offset_s += fault.how["by_s"]
        if member.process is not None:
            member.process.wall_offset_s += fault.how["by_s"]

    def disk_full(self, fault: Fault) -> None:
        """Nothing can be written for a while."""
        self.world.disk.is_full = True
        self._after(fault.how["for_s"], lambda: setattr(self.world.disk, "is_full", False))

    def away(self, fault: Fault) -> None:
        """No payload can be read or written for a while."""
        self.world.is_store_away = True
        self._after(fault.how["for_s"], lambda: setattr(self.world, "is_store_away", False))

    def vanish(self, fault: Fault) -> bool:
        """Newest payloads are gone, or have a bit of theirs changed."""
        folder = self.world.folder / self.world.run_id / CLAIMS_FOLDER
        files = sorted(folder.glob("[0-9]*"), key=lambda path: (path.stat().st_mtime_ns, path.name))
        for path in files[-fault.how["count"] :]:
            if (share := fault.how.get("share")) is None:
                path.unlink()
            else:
                damage.flip(path, share)
        return bool(files)

    def tear(self, fault: Fault) -> bool:
        """The trainer dies, and one of its files is damaged."""
        if (process := self.fleet.find("trainer")) is not None:
            self.world.kill(process)
        target = fault.how["what"]
        run_dir = self.world.folder / self.world.run_id
        if target == "checkpoint" and (newest := damage.newest(run_dir)):
            # Torn again: it is the same one, and no new one has come in between.
            self._torn = [*self._torn, newest] if newest in self._torn else [newest]
            self.num_torn = max(self.num_torn, len(set(self._torn)))
        return damage.tear(run_dir, target, fault.how.get("share", 0.5))

    def foreign(self, fault: Fault) -> bool:
        """Another program writes into a stream."""
        return strangers.write(self.world, fault.target, fault.how["what"], self.rng)

    def damage(self, fault: Fault) -> None:
        """The payload of the next message that is published arrives cut off."""
        self._damaged = script_sha(fault.target)

    def config(self, fault: Fault) -> bool:
        """The run is resumed with another config."""
        tree = self.config.model_dump(mode="json")
        for dotted, value in fault.how["set"].items():
            section, *names = dotted.split(".")
            node = tree[section]
            for name in names[:-1]:
                node = node[name]
            node[names[-1]] = value
        self.config = RunConfig.model_validate(tree)
        text = self.config.model_dump_json().encode()
        if self.world.cluster.state is not State.UP:
            return False
        self.world.cluster.server.apply([[b"SET", self.world.keys.config.encode(), text]])
        if (process := self.fleet.find("trainer")) is not None:
            self.world.kill(process)
        return True

    def _units_kept(self, how: dict[str, Any]) -> int:
        """How many writes the next server knows: all but the last `lose`, or but those from a commit on, or
        (`lose_step`) but those after the last commit, or (`lose_from`) but those from a command on, which is
        counted from the newest one back."""
        log = self.world.cluster.server.log
        num_units = len(log)
        if words := how.get("lose_from"):
            moment = Moment(*words)
            units = [n for n, (_, unit) in enumerate(log) if any(map(moment.is_command, unit))]
            num_units = min([num_units, *units[-moment.count :]])
        if num_commits := how.get("lose_commits", 0):
            commits = self.world.history.of("commits")
            units = [record.unit for record in commits if not record.is_foreign][-num_commits:]
            num_units = min([num_units, *units])
        if how.get("lose_step"):
            commits = self.world.history.of("commits")
            num_units = max(
                [record.unit + 1 for record in commits if not record.is_foreign], default=num_units
            )
        return max(0, num_units - int(how.get("lose", 0)))

    def _come_up(self, num_units: int, clock_s: float) -> None:
        world = self.world
        self.num_lost += world.history.forget_after(num_units)
        world.clocks.server_offset_s += clock_s
        world.cluster.come_up(num_units)
        world.watch_server()
        world.tell("FAULT", f"Redis is back with {num_units} writes")

    def _weather(self, fault: Fault, weather: Weather) -> None:
        self.world.cluster.weather = weather
        self._after(fault.how["for_s"], lambda: self._clear(weather))

    def _clear(self, weather: Weather) -> None:
        if self.world.cluster.weather is weather:
            self.world.cluster.weather = Weather()


KINDS: dict[str, Callable[[Injector, Fault], Any]] = {
    "kill": Injector.kill,
    "freeze": Injector.freeze,
    "term": Injector.term,
    "restart": Injector.restart,
    "failover": Injector.failover,
    "empty": Injector.empty,
    "slow": Injector.slow,
    "unreliable": Injector.unreliable,
    "full": Injector.full,
    "add": Injector.add,
    "older": Injector.older,
    "operate": Injector.operate,
    "second": Injector.second,
    "cut_off": Injector.cut_off,
    "server_clock": Injector.server_clock,
    "host_clock": Injector.host_clock,
    "disk_full": Injector.disk_full,
    "away": Injector.away,
    "vanish": Injector.vanish,
    "tear": Injector.tear,
    "foreign": Injector.foreign,
    "damage": Injector.damage,
    "config": Injector.config,
}
