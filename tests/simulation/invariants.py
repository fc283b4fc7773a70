"""What must hold."""
from typing import Any


class Judge:
    def __init__(self, world, config, schedule): self.world=world
    def see(self, record): ...
    def judge(self, fleet, injector, verdict):
        verdict.violations += fleet.crashes
    def may_end(self, outcome): return False
    def standing(self):
        return str({k.decode().rpartition(":")[2]: len(v.ids) for k,v in self.world.cluster.server.space.values.items() if hasattr(v,"ids")})
