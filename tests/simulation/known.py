"""Schedules that found something once, by what they found. What each said then stands in the README."""

from tests.simulation.schedule import Fault, Schedule, Setup

KNOWN = {
    "a worker holds a ticket on which it does not work": Schedule(
        7,
        Setup(steps=6, checkpoint_every=4),
        (Fault(3.0, "restart", "", {"for_s": 1.0, "lose": 5, "before": ["XADD", "prompts"]}),),
    ),
    "a worker renews what it has lost": Schedule(
        136,
        Setup(steps=3, group_size=2, rollouts=1, rewards=1),
        (Fault(4.3, "restart", "", {"for_s": 2.94, "lose_commits": 1}),),
    ),
    "a version beyond its step": Schedule(
        46,
        Setup(
            steps=3,
            groups_per_step=1,
            group_size=2,
            max_staleness=0,
            checkpoint_every=4,
            rollouts=1,
            rewards=1,
        ),
        (
            Fault(6.1, "kill", "trainer", {"step": "unsent", "count": 10}),
            Fault(6.3, "restart", "", {"for_s": 1.62, "lose_commits": 2}),
        ),
    ),
    "two commits are lost at once": Schedule(
        25,
        Setup(steps=3, groups_per_step=1, group_size=2, rollouts=1, rewards=1),
        (Fault(4.7, "restart", "", {"for_s": 2.9, "lose_commits": 2}),),
    ),
    "versions of a future that is lost": Schedule(
        1164,
        Setup(steps=6, groups_per_step=1, group_size=2, evaluation=True, rollouts=1, rewards=1),
        (
            Fault(8.272, "failover", "", {"for_s": 0.49, "lose_commits": 2}),
            Fault(9.591, "freeze", "trainer", {"for_s": 4.37}),
            Fault(12.377, "tear", "trainer", {"what": "metrics", "share": 0.568}),
            Fault(12.584, "unreliable", "", {"for_s": 7.7, "share": 0.27}),
            Fault(12.829, "restart", "", {"for_s": 2.17, "before": ["XADD", "weights"]}),
            Fault(12.957, "restart", "", {"for_s": 1.45, "lose_commits": 2}),
        ),
    ),
    "a sleeper wakes up after two failovers": Schedule(
        1089,
        Setup(steps=3, group_size=8, checkpoint_every=1, keep_checkpoints=1, trim=False, rewards=1),
        (
            Fault(0.442, "kill", "rollout-0", {"step": "applied", "count": 4}),
            Fault(0.769, "failover", "", {"for_s": 1.53, "lose_commits": 2, "clock_s": -25.5}),
            Fault(0.787, "freeze", "reward-0", {"for_s": 10.84}),
            Fault(1.017, "restart", "", {"for_s": 1.84, "lose": 9}),
            Fault(13.618, "failover", "", {"for_s": 1.58, "lose_commits": 4, "clock_s": 0.3}),
            Fault(13.725, "freeze", "rollout-1", {"for_s": 11.39}),
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
    "Redis is emptied before there is a checkpoint": Schedule(
        3789,
        Setup(groups_per_step=1, checkpoint_every=4, rollouts=1, rewards=1),
        (
            Fault(4.519, "empty", "", {"flush": True}),
            Fault(4.76, "kill", "trainer", {"step": "file", "count": 2}),
            Fault(4.825, "kill", "rollout-0", {"step": "applied", "count": 4}),
        ),
    ),
    "Redis is emptied, and a server that has not seen it takes over": Schedule(
        980,
        Setup(groups_per_step=3, max_staleness=0, batch_order="as_ready", checkpoint_every=1, archive=True),
        (
            Fault(4.631, "empty", "", {"flush": True}),
            Fault(4.874, "failover", "", {"for_s": 2.35, "lose": 46, "clock_s": -11.5}),
        ),
    ),
}
