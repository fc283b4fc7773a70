"""Schedules that found something once, by what they found. What each said then stands in the README."""

from tests.simulation.schedule import Fault, Schedule, Setup

KNOWN = {
    "a worker holds a ticket on which it does not work": Schedule(
        7,
        Setup(steps=6, checkpoint_every=4),
        (Fault(3.0, "restart", "", {"for_s": 1.0, "lose": 5, "before": ["XADD", "prompts"]}),),
    ),
    "a version beyond its step": Schedule(
        46,
        Setup(max_staleness=0),
        (
            Fault(6.265, "restart", "", {"for_s": 1.62, "lose_commits": 2}),
            Fault(6.3, "kill", "trainer"),
        ),
    ),
    "two restarts between two commits": Schedule(
        25,
        Setup(checkpoint_every=1),
        (
            Fault(4.685, "restart", "", {"for_s": 2.9, "lose_commits": 2, "before": ["HSET", "state"]}),
            Fault(7.466, "restart", "", {"for_s": 2.21, "lose_commits": 4}),
        ),
    ),
    "a torn checkpoint is none that is kept": Schedule(
        1,
        Setup(steps=6, checkpoint_every=1),
        (
            Fault(7.0, "tear", "trainer", {"what": "checkpoint", "share": 0.5}),
            Fault(8.6, "tear", "trainer", {"what": "checkpoint", "share": 0.5}),
        ),
    ),
    "a stranger among the weights": Schedule(
        1, Setup(), (Fault(3.0, "foreign", "weights", {"what": "garbage"}),)
    ),
    "a stranger among the commits": Schedule(
        1, Setup(), (Fault(3.0, "foreign", "commits", {"what": "garbage"}),)
    ),
    "a manifest that ends in the middle": Schedule(
        1,
        Setup(archive=True, checkpoint_every=1, group_size=8, steps=6),
        (Fault(6.0, "tear", "trainer", {"what": "manifest:trajectories", "share": 0.5}),),
    ),
    "tickets are lost while they are issued": Schedule(
        843,
        Setup(group_size=2, checkpoint_every=4),
        (Fault(5.2, "restart", "", {"for_s": 1.0, "lose": 64, "before": ["XADD", "prompts"]}),),
    ),
    "Redis is emptied": Schedule(1, Setup(checkpoint_every=1), (Fault(4.0, "empty", "", {"flush": True}),)),
    "Redis is emptied, and everybody dies": Schedule(
        1,
        Setup(checkpoint_every=1),
        (
            Fault(4.0, "empty", "", {"flush": True}),
            Fault(4.1, "kill", "rollout-0"),
            Fault(4.2, "kill", "trainer"),
        ),
    ),
}
