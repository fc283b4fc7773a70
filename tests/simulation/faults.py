"""Does a schedule's faults to a world."""

from collections import Counter

from common.config import RunConfig
from tests.simulation.fleet import Fleet
from tests.simulation.loop import START_S
from tests.simulation.schedule import Schedule
from tests.simulation.world import World


class Injector:
    """`arm` sets every fault's alarm."""

    def __init__(self, world: World, fleet: Fleet, config: RunConfig, schedule: Schedule) -> None:
        self.world, self.fleet, self.config, self.schedule = world, fleet, config, schedule
        self.done: Counter[str] = Counter()
        self.quiet_at_s = START_S

    def arm(self) -> None: ...
