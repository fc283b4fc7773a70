"""Schedules that once found a bug, by what they found."""

from tests.simulation.schedule import Fault, Schedule, Setup

# fmt: off
KNOWN = {
    "a trajectory gets the id of one that a worker scores": Schedule(
        1, Setup(steps=3, groups_per_step=1, group_size=4, rollouts=1, rewards=1, sample_s=5.0), (
        Fault(0.0, "server_clock", "trainer", {"by_s": -600, "of": "rollout-0",
            "before": ["publish_sample", "prompts ", 2]}),  # from here on ids do not follow the time
        Fault(0.0, "restart", "", {"for_s": 0.3, "of": "rollout-0",
            "lose_from": ["publish_sample", "prompts "], "before": ["publish_sample", "prompts ", 4]}),
    )),
    "a worker renews what it has lost": Schedule(
        1, Setup(steps=3, groups_per_step=1, group_size=2, max_staleness=0, rollouts=1, rewards=1), (
        Fault(0.0, "restart", "", {"for_s": 0.3, "of": "rollout-0",
            "lose_from": ["publish_sample", "prompts "], "before": ["publish_sample", "prompts ", 2]}),
    )),
    "a version beyond its step": Schedule(
        1, Setup(steps=4, groups_per_step=1, group_size=4, max_staleness=0, checkpoint_every=4, rollouts=1,
        rewards=1), (
        Fault(0.0, "kill", "trainer", {"before": ["append_after", "weights", 4]}),
        Fault(0.0, "restart", "", {"for_s": 0.3, "lose_from": ["append_after", "commits", 2],
            "follows": True}),
        Fault(0.0, "kill", "trainer", {"follows": True, "before": ["INFO", "server"]}),
    )),
    "two commits are lost at once": Schedule(
        1, Setup(steps=4, groups_per_step=1, group_size=2, checkpoint_every=4, rollouts=1, rewards=1), (
        Fault(0.0, "restart", "", {"for_s": 0.3, "lose_from": ["append_after", "commits", 2],
            "before": ["mark", "committing", 4]}),
    )),
    "a curriculum's tickets outlive the commits that they were drawn from": Schedule(
        990017, Setup(steps=3, groups_per_step=3, group_size=2, checkpoint_every=3, rollouts=1, rewards=1,
        reward_slots=2, mixed=True), (
        Fault(5.2, "restart", "", {"for_s": 0.79, "lose_commits": 4}),
        Fault(8.8, "kill", "trainer", {"step": "unsent", "count": 8}),
    )),
    "versions of a future that is lost": Schedule(
        1, Setup(steps=6, groups_per_step=1, group_size=2, max_staleness=0, checkpoint_every=6, rollouts=1,
        rewards=1), (
        Fault(0.0, "config", "trainer", {"set": {"weights.base_every": 1}}),  # no version needs another one
        Fault(0.0, "kill", "trainer", {"before": ["append_after", "commits", 4]}),
        Fault(0.0, "restart", "", {"for_s": 0.3, "lose_from": ["append_after", "commits", 4],
            "follows": True}),
    )),
    "a sleeper wakes up after two failovers": Schedule(
        293040, Setup(steps=3, group_size=8, checkpoint_every=1, keep_checkpoints=1, trim=False, rewards=1), (
        Fault(0.442, "kill", "rollout-0", {"step": "applied", "count": 4}),
        Fault(0.769, "failover", "", {"for_s": 1.53, "lose_commits": 2, "clock_s": -25.5}),
        Fault(0.787, "freeze", "reward-0", {"for_s": 10.84}),
        Fault(1.017, "restart", "", {"for_s": 1.84, "lose": 9}),
        Fault(13.618, "failover", "", {"for_s": 1.58, "lose_commits": 4, "clock_s": 0.3}),
        Fault(13.725, "freeze", "rollout-1", {"for_s": 11.39}),
    )),
    "a torn checkpoint is none that is kept": Schedule(
        1, Setup(steps=6, groups_per_step=1, group_size=2, checkpoint_every=1, rollouts=1, rewards=1), (
        Fault(0.0, "tear", "trainer", {"what": "checkpoint", "share": 0.4,
            "before": ["append_after", "commits", 3]}),
        Fault(0.0, "tear", "trainer", {"what": "checkpoint", "share": 0.5, "follows": True,
            "before": ["append_after", "commits", 2]}),
    )),
    "a stranger among the weights": Schedule(1, Setup(), (
        Fault(0.0, "foreign", "weights", {"what": "garbage", "of": "trainer",
            "before": ["append_after", "commits", 2]}),
    )),
    "a stranger among the commits": Schedule(1, Setup(), (
        Fault(0.0, "foreign", "commits", {"what": "garbage", "of": "trainer",
            "before": ["append_after", "weights", 2]}),
    )),
    "tickets are lost while they are issued": Schedule(
        1, Setup(steps=4, group_size=2, checkpoint_every=4, rollouts=1, rewards=1), (
        Fault(0.0, "restart", "", {"for_s": 0.3, "lose_from": ["append_after", "prompts ", 2],
            "before": ["append_after", "prompts ", 2]}),
    )),
    "entries of other tokens come under keys of the run": Schedule(
        2, Setup(steps=4, groups_per_step=1, max_staleness=3, rollouts=1, rewards=1), (
        Fault(0.0, "foreign", "trajectories", {"what": "old", "of": "rollout-0",
            "before": ["publish_sample", "prompts ", 3]}),
        Fault(0.0, "foreign", "trajectories", {"what": "old", "follows": True}),
        Fault(0.0, "foreign", "trajectories", {"what": "old", "follows": True}),
    )),
    "a version is trained again while a worker sleeps": Schedule(
        332, Setup(steps=3, groups_per_step=3, group_size=2, max_staleness=0, checkpoint_every=4, trim=False,
        rewards=1, sample_s=3.0, shares_lines=True), (
        Fault(14.3, "freeze", "rollout-0", {"for_s": 30.0, "until": ["append_after", "weights", 3]}),
        Fault(14.4, "kill", "trainer"),
        Fault(14.4, "restart", "", {"for_s": 0.78, "lose_commits": 2}),
    )),
    "Redis is emptied": Schedule(1, Setup(checkpoint_every=1), (
        Fault(0.0, "empty", "", {"flush": True, "before": ["append_after", "commits", 2]}),
    )),
    "Redis is emptied, and everybody dies": Schedule(1, Setup(checkpoint_every=1), (
        Fault(0.0, "empty", "", {"flush": True, "before": ["append_after", "commits", 2]}),
        Fault(0.1, "kill", "rollout-0", {"follows": True}),
        Fault(0.1, "kill", "trainer", {"follows": True}),
    )),
    "Redis is emptied before there is a checkpoint": Schedule(
        1, Setup(groups_per_step=1, group_size=2, checkpoint_every=4, rollouts=1, rewards=1), (
        Fault(0.0, "empty", "", {"flush": True, "before": ["append_after", "weights", 3]}),
        Fault(0.0, "kill", "trainer", {"step": "file", "follows": True,
            "before": ["append_after", "weights"]}),
    )),
    "Redis is emptied, and then a worker starts": Schedule(
        1, Setup(groups_per_step=1, group_size=2, checkpoint_every=1, rollouts=1, rewards=1), (
        Fault(0.0, "empty", "", {"flush": True, "of": "trainer", "before": ["append_after", "weights", 2]}),
        Fault(0.5, "kill", "rollout-0", {"follows": True}),
    )),
    "a commit of what Redis has lost": Schedule(
        1, Setup(steps=4, groups_per_step=1, group_size=2, checkpoint_every=4, rollouts=1, rewards=1), (
        Fault(0.0, "restart", "", {"for_s": 0.3, "lose_from": ["publish_sample", "prompts ", 2],
            "before": ["append_after", "commits"]}),
        Fault(0.0, "kill", "trainer", {"follows": True, "before": ["INFO", "server"]}),
    )),
    "a run is finished on a server that lacks its last commit": Schedule(
        1, Setup(steps=3, groups_per_step=1, group_size=2, rollouts=1, rewards=1), (
        Fault(0.0, "failover", "", {"for_s": 2.0, "clock_s": 3.3, "lose_from": ["append_after", "commits"],
            "before": ["finish", "commits"]}),
    )),
    "a run is finished right after a failover": Schedule(
        1, Setup(steps=3, groups_per_step=1, group_size=2, rollouts=1, rewards=1), (
        Fault(0.0, "restart", "", {"for_s": 0.3, "lose_from": ["append_after", "commits"],
            "before": ["finish", "commits"]}),
    )),
    "the trainer is stopped while the disk is full": Schedule(
        3234, Setup(group_size=2, max_staleness=3, checkpoint_every=1, evaluation=True, rollouts=3,
        rewards=1), (
        Fault(1.703, "failover", "", {"for_s": 0.91, "lose_commits": 2, "before": ["XADD", "weights"]}),
        Fault(10.07, "config", "trainer", {"set": {"trainer.keep_weights": 3}}),
        Fault(10.377, "disk_full", "", {"for_s": 3.0}),
        Fault(10.383, "kill", "rollout-1"),
        Fault(10.433, "server_clock", "rollout-2", {"by_s": 3.3}),
        Fault(10.913, "term", "trainer"),
    )),
    "a reader goes on before the failover is noticed": Schedule(
        1, Setup(steps=6, groups_per_step=1, group_size=4, max_staleness=3, batch_order="as_ready",
        checkpoint_every=4, rollouts=1, rewards=1, per_group=True), (
        # The scores of the next groups get ids below those that are lost, which the trainer has read.
        Fault(0.0, "failover", "", {"for_s": 0.1, "clock_s": -1.5, "of": "reward-0",
            "before": ["publish_group", "scores", 2], "lose_from": ["publish_group", "scores"]}),
    )),
    "a trim is decided on one server and done on another": Schedule(
        1, Setup(steps=6, groups_per_step=1, group_size=4, checkpoint_every=1, keep_checkpoints=1,
        rewards=1), (
        Fault(0.0, "failover", "", {"for_s": 0.5, "clock_s": -60.0, "hold_s": 4.0,
            "lose_from": ["publish_sample", "prompts ", 6], "before": ["trim", "trajectories", 2]}),
    )),
    "a server takes over before a trim has its mark": Schedule(
        1, Setup(steps=6, groups_per_step=1, group_size=4, checkpoint_every=1, keep_checkpoints=1,
        rewards=1), (
        Fault(0.0, "failover", "", {"for_s": 0.5, "clock_s": -60.0, "hold_s": 4.0,
            "lose_from": ["publish_sample", "prompts ", 6], "before": ["mark", "trimming", 3]}),
    )),
    "Redis is emptied while it is looked for strays": Schedule(
        1, Setup(steps=3, groups_per_step=1, group_size=2, rollouts=1, rewards=1), (
        Fault(0.0, "foreign", "weights", {"what": "garbage", "of": "trainer",
            "before": ["append_after", "weights", 2]}),
        Fault(0.0, "empty", "", {"flush": True, "before": ["move_aside", "weights"], "follows": True}),
    )),
    "Redis is emptied during an evaluation, and a worker starts": Schedule(
        1, Setup(steps=3, groups_per_step=1, group_size=2, evaluation=True, rollouts=1, rewards=1), (
        # During the last evaluation, with which the trainer has nothing else to do.
        Fault(0.0, "empty", "", {"flush": True, "of": "reward-0", "before": ["complete", "scores:eval", 8]}),
        Fault(0.1, "kill", "reward-0", {"follows": True}),
    )),
    "Redis loses the config and keeps the mark": Schedule(
        1, Setup(steps=3, groups_per_step=1, group_size=2, rollouts=1, rewards=1), (
        Fault(0.0, "empty", "", {"flush": True, "before": ["HSET", "state trainer"]}),
        Fault(0.5, "kill", "rollout-0", {"follows": True}),
    )),
    "a ticket that the stream has passed over": Schedule(
        1, Setup(groups_per_step=1, group_size=2, rollouts=1, rewards=1), (
        Fault(0.0, "restart", "", {"for_s": 0.3, "of": "rollout-0",
            "lose_from": ["append_after", "prompts ", 3],
            "before": ["start_group", "prompts ", 6]}),
        Fault(0.0, "kill", "trainer", {"follows": True, "before": ["append_after", "prompts "]}),
    )),
    "a stranger's copy comes while its step waits for another group": Schedule(
        3, Setup(steps=4, group_size=2, max_staleness=0, checkpoint_every=4, rollouts=1, rewards=1), (
        Fault(0.0, "foreign", "trajectories", {"what": "twin", "of": "rollout-0",
            "before": ["publish_sample", "prompts ", 3]}),
        Fault(0.0, "foreign", "trajectories", {"what": "twin", "follows": True}),
        Fault(0.0, "kill", "trainer", {"follows": True, "before": ["append_after", "weights"]}),
    )),
    "a score is published under the id of another trajectory": Schedule(
        4, Setup(steps=4, group_size=8, rollouts=3, rewards=1), (
        Fault(0.0, "server_clock", "trainer", {"by_s": -600, "of": "rollout-0",
            "before": ["publish_sample", "prompts ", 2]}),  # from here on ids do not follow the time
        Fault(0.0, "restart", "", {"for_s": 0.3, "of": "reward-0",
            "lose_from": ["publish_sample", "prompts ", 2], "before": ["complete", "scores", 3]}),
    )),
    "a second SIGTERM while the first is worked on": Schedule(
        9014, Setup(steps=3, group_size=2, checkpoint_every=1, rewards=1), (
        Fault(2.919, "freeze", "trainer", {"for_s": 11.56}),
        Fault(3.069, "term", "reward-0"),
        Fault(3.237, "kill", "trainer", {"step": "unsent", "count": 7}),
        Fault(3.749, "term", "reward-0"),
        Fault(11.191, "restart", "", {"for_s": 1.39, "lose": 4}),
    )),
    "an evaluation is trimmed whose version goes back": Schedule(
        1, Setup(steps=4, groups_per_step=1, group_size=2, checkpoint_every=4, evaluation=True, rollouts=1,
        rewards=1), (
        Fault(0.0, "restart", "", {"for_s": 0.3, "of": "reward-0",
            "lose_from": ["append_after", "commits", 2],
            "before": ["complete", "scores:eval", 4]}),
        Fault(0.0, "kill", "trainer", {"follows": True, "before": ["trim", "prompts:eval"]}),
    )),
    "Redis loses the config before anybody has read it": Schedule(
        8794, Setup(steps=3, groups_per_step=1, group_size=2, rollouts=1, rewards=1), (
        Fault(0.0, "restart", "", {"for_s": 2.28, "lose": 1}),
    )),
    "deliveries from the future come back": Schedule(
        1, Setup(steps=3, groups_per_step=1, group_size=8, rollouts=1, rewards=1), (
        Fault(0.0, "kill", "reward-0", {"before": ["complete", "scores", 2]}),
        Fault(0.0, "server_clock", "trainer", {"by_s": -600, "follows": True}),
        # What the next worker has taken over is lost: it is pending again for the one that is dead.
        Fault(0.0, "restart", "", {"for_s": 0.3, "of": "reward-0", "follows": True,
            "lose_from": ["complete", "scores", 2], "before": ["complete", "scores", 2]}),
    )),
    "a ticket is trimmed whose acknowledgement was lost": Schedule(
        1, Setup(steps=4, groups_per_step=1, group_size=2, max_staleness=0, checkpoint_every=1,
        keep_checkpoints=1, rollouts=1, rewards=1), (
        Fault(0.0, "restart", "", {"for_s": 0.3, "lose_from": ["publish_sample", "prompts "],
            "before": ["mark", "committing", 2]}),
        Fault(0.0, "kill", "rollout-0", {"follows": True}),
    )),
    "a lost delivery is completed under the id of another one": Schedule(
        29, Setup(steps=3, group_size=8, rollouts=3, rewards=1, reward_slots=2), (
        Fault(0.0, "server_clock", "trainer", {"by_s": -600, "of": "rollout-0",
            "before": ["publish_sample", "prompts ", 2]}),  # from here on ids do not follow the time
        Fault(0.0, "restart", "", {"for_s": 0.5, "of": "reward-0",
            "lose_from": ["publish_sample", "prompts ", 3], "before": ["complete", "scores", 4]}),
    )),
    "a step is replayed with samples that were generated after it": Schedule(
        1, Setup(steps=4, groups_per_step=1, group_size=2, rollouts=1, rewards=1), (
        Fault(0.0, "restart", "", {"for_s": 0.3, "lose_from": ["publish_sample", "prompts ", 2],
            "before": ["mark", "committing", 3]}),
        Fault(0.0, "tear", "trainer", {"what": "checkpoint", "share": 0.5, "follows": True,
            "before": ["append_after", "commits", 2]}),
    )),
    "a stranger hides that the last commit is lost": Schedule(
        1, Setup(steps=3, groups_per_step=1, group_size=2, rollouts=1, rewards=1), (
        Fault(0.0, "restart", "", {"for_s": 0.3, "lose_from": ["append_after", "commits"],
            "before": ["finish", "commits"]}),
        Fault(0.0, "foreign", "commits", {"what": "copied", "of": "trainer", "follows": True,
            "before": ["finish", "commits"]}),
    )),
    "an evaluation is trimmed while a worker holds a ticket of it": Schedule(
        1, Setup(steps=4, groups_per_step=1, group_size=2, checkpoint_every=1, keep_checkpoints=1,
        evaluation=True, rollouts=1, rewards=1), (
        Fault(0.0, "restart", "", {"for_s": 0.3, "of": "reward-0", "before": ["complete", "scores:eval", 3],
            "later_s": 0.3, "lose_from": ["publish_sample", "prompts:eval"]}),
        Fault(0.0, "kill", "rollout-0", {"follows": True}),
    )),
    "a worker that starts after an outage takes what others could not renew yet": Schedule(
        4, Setup(steps=3, groups_per_step=1, group_size=8, max_staleness=0, rewards=1), (
        Fault(0.0, "restart", "", {"for_s": 5.0, "of": "rollout-0",
            "before": ["publish_sample", "prompts ", 6]}),
        Fault(0.5, "add", "rollout-9", {"follows": True}),
    )),
    "a trainer comes to versions again whose evaluations are there": Schedule(
        1, Setup(steps=3, groups_per_step=1, group_size=2, checkpoint_every=4, evaluation=True, rollouts=1,
        rewards=1), (
        Fault(0.0, "restart", "", {"for_s": 0.3, "lose_from": ["append_after", "commits", 2],
            "before": ["append_after", "prompts:eval", 3]}),
        Fault(0.0, "kill", "trainer", {"follows": True, "of": "reward-0",
            "before": ["complete", "scores:eval", 3]}),
    )),
    "a question to a restarted server has no answer, and another one is asked": Schedule(
        2, Setup(steps=2, groups_per_step=18, group_size=2, max_staleness=0, rollouts=4), (
        # The trainer trains a long step, and asks nothing but what the watch asks, 5 s after its start.
        Fault(4.9, "restart", "", {"for_s": 0.05, "of": "trainer", "before": ["INFO", "server"],
            "lose_from": ["publish_sample", "prompts "]}),
        Fault(0.0, "unreliable", "trainer", {"follows": True, "for_s": 0.0, "share": 1.0, "hang": 1.0,
            "fate": "unanswered", "sending": ["HGET", "state trainer"]}),
    )),
    "the score of a lost trajectory acknowledges another one": Schedule(
        1, Setup(steps=3, groups_per_step=1, group_size=4, rollouts=1, rewards=1, sample_s=5.0), (
        Fault(0.0, "server_clock", "trainer", {"by_s": -600, "of": "rollout-0",
            "before": ["publish_sample", "prompts ", 2]}),  # from here on ids do not follow the time
        Fault(0.0, "restart", "", {"for_s": 0.3, "of": "rollout-0",
            "lose_from": ["publish_sample", "prompts "], "before": ["publish_sample", "prompts ", 4]}),
        Fault(0.35, "unreliable", "reward-0", {"for_s": 0.0, "share": 1.0, "fate": "unanswered",
            "follows": True, "sending": ["XREADGROUP", "trajectories "]}),
    )),
    "an answer with a ticket is lost, and who reads the ticket again dies": Schedule(
        1, Setup(steps=3, group_size=2, rollouts=1, rewards=1, max_attempts=2), (
        Fault(0.0, "unreliable", "rollout-0", {"for_s": 0.0, "share": 1.0, "fate": "unanswered",
            "sending": ["XREADGROUP", "prompts "]}),
        Fault(0.0, "kill", "rollout-0", {"follows": True, "before": ["start_group", "prompts ", 2]}),
    )),
    "a worker wakes up, and the answer with two trajectories is lost while others fill its slots": Schedule(
        1, Setup(steps=3, group_size=8, rollouts=1, reward_slots=2, sample_s=5.0), (
        Fault(0.0, "freeze", "reward-0", {"for_s": 30.0, "sending": ["reclaim", "trajectories "],
            "until": ["publish_sample", "prompts ", 8], "until_of": "rollout-0"}),
        Fault(0.0, "unreliable", "reward-0", {"for_s": 0.0, "share": 1.0, "fate": "unanswered",
            "sending": ["XREADGROUP", "trajectories "]}),
    )),
    "what cannot be read came ahead of what fills the slots": Schedule(
        2912, Setup(steps=3, groups_per_step=3, group_size=8, batch_order="as_ready", checkpoint_every=1,
        keep_checkpoints=1, reward_slots=2, sample_s=5.0, mixed=True), (
        Fault(0.05, "kill", "rollout-0", {"step": "unsent", "count": 5}),
        Fault(5.952, "damage", "publish_sample"),
        Fault(5.952, "operate"),
        Fault(7.452, "operate"),
        Fault(8.952, "operate"),
    )),
    "a reward worker sleeps while it scores, and others take its samples": Schedule(
        1, Setup(steps=3, groups_per_step=1, group_size=8, rollouts=1, sample_s=5.0), (
        Fault(0.0, "freeze", "reward-0", {"for_s": 8.0, "sending": ["renew", "trajectories ", 2]}),
    )),
    "dead letters of an older release are put back before the trainer reads them": Schedule(
        1, Setup(steps=4, group_size=8, rollouts=1, reward_slots=2, claims=True), (
        Fault(0.0, "older", "reward-9", {"for_s": 3.4, "of": "rollout-0",
            "before": ["publish_sample", "prompts "]}),
        Fault(0.0, "freeze", "trainer", {"for_s": 6.0, "follows": True}),
        Fault(1.0, "operate", "", {"follows": True}),
        Fault(1.0, "operate", "", {"follows": True}),
        Fault(1.0, "operate", "", {"follows": True}),
        Fault(1.0, "operate", "", {"follows": True}),
        Fault(1.0, "operate", "", {"follows": True}),
    )),
    "the payload of a part is gone, and those after it are still there": Schedule(
        336, Setup(steps=3, groups_per_step=1, group_size=4, segment_mb=0.001, rollouts=1, rewards=1,
        parts="repeat", shares_lines=True, choices=True), (
        Fault(0.5, "kill", "rollout-0", {"step": "file", "count": 6}),
        Fault(2.0, "kill", "rollout-0", {"step": "file", "count": 11}),
        Fault(5.7, "vanish", "", {"count": 4}),
    )),
    "a second trainer is started in the same folder": Schedule(
        137, Setup(steps=3, groups_per_step=1, group_size=2, rollouts=1, rewards=1), (
        Fault(0.0, "second", "", {"before": ["append_after", "commits"]}),
    )),
    "tickets are lost when none is left to be issued": Schedule(
        1, Setup(steps=3, groups_per_step=1, group_size=2, max_staleness=3, rollouts=1, rewards=1), (
        Fault(0.0, "restart", "", {"for_s": 0.3, "of": "rollout-0", "before": ["start_group", "prompts "],
            "lose_from": ["append_after", "prompts "]}),
    )),
    "a score arrives cut off": Schedule(
        1, Setup(steps=3, groups_per_step=1, group_size=2, rollouts=1, rewards=1), (
        Fault(0.0, "damage", "complete"),
    )),
    "a payload is changed before its entry is published": Schedule(
        1, Setup(steps=3, groups_per_step=1, group_size=4, rollouts=1, rewards=1, claims=True), (
        Fault(0.0, "vanish", "", {"count": 1, "share": 0.5, "of": "rollout-0",
            "before": ["publish_sample", "prompts ", 2]}),
    )),
    "a trainer goes on with a curriculum": Schedule(
        2, Setup(steps=6, group_size=2, max_staleness=0, checkpoint_every=1, rollouts=1, rewards=1,
        mixed=True), (
        Fault(0.0, "kill", "trainer", {"before": ["append_after", "weights", 2]}),
    )),
    "strangers have versions that come before their steps": Schedule(
        2, Setup(groups_per_step=1, group_size=2, max_staleness=3, rollouts=1, rewards=1), (
        Fault(0.0, "foreign", "trajectories", {"what": "ahead", "of": "rollout-0",
            "before": ["publish_sample", "prompts ", 3]}),
        Fault(0.0, "foreign", "trajectories", {"what": "ahead", "of": "rollout-0",
            "before": ["publish_sample", "prompts ", 5]}),
    )),
    "Redis loses a part, and its worker dies two parts later": Schedule(
        1, Setup(steps=3, groups_per_step=1, group_size=2, rollouts=1, rewards=1, sample_s=3.6,
        parts="restore"), (
        Fault(0.0, "restart", "", {"for_s": 0.1, "of": "rollout-0", "lose_from": ["append_part", "prompts "],
            "before": ["append_part", "prompts ", 2]}),
        Fault(0.0, "kill", "rollout-0", {"follows": True, "before": ["append_part", "prompts ", 2]}),
    )),
    "reward workers die before the last result of a group is kept": Schedule(
        1, Setup(steps=3, groups_per_step=1, group_size=2, rollouts=1, per_group=True), (
        Fault(0.0, "kill", "reward-0", {"step": "unsent", "before": ["store_result", "trajectories", 2]}),
        Fault(0.0, "kill", "reward-1", {"step": "unsent", "before": ["store_result", "trajectories", 2]}),
    )),
    "strangers have versions that are too old": Schedule(
        2, Setup(groups_per_step=1, group_size=2, rollouts=1, rewards=1), (
        Fault(0.0, "foreign", "trajectories", {"what": "old", "of": "rollout-0",
            "before": ["publish_sample", "prompts ", 5]}),
        Fault(0.0, "foreign", "trajectories", {"what": "old", "follows": True}),
        Fault(0.0, "foreign", "trajectories", {"what": "old", "follows": True}),
    )),
    "the clock of Redis jumps while a worker renews its leases": Schedule(
        2, Setup(steps=3, group_size=2, rewards=1, sample_s=5.0), (
        Fault(0.0, "server_clock", "trainer", {"by_s": 600, "of": "rollout-0",
            "before": ["renew", "prompts ", 3]}),
    )),
    "a worker leaves when it has begun a group": Schedule(
        1, Setup(steps=3, group_size=2, rewards=1, sample_s=5.0), (
        Fault(0.0, "term", "rollout-0", {"before": ["start_group", "prompts "]}),
    )),
    "a trainer replays steps of a curriculum": Schedule(
        1, Setup(steps=6, group_size=2, max_staleness=0, checkpoint_every=4, rollouts=1, rewards=1,
        mixed=True), (
        Fault(0.0, "kill", "trainer", {"before": ["append_after", "weights", 3]}),
    )),
    "a worker goes on with weights that its trainer has lost, and dies": Schedule(
        1, Setup(steps=4, groups_per_step=1, max_staleness=3, checkpoint_every=4, rewards=1, sample_s=3.6,
        parts="turns"), (
        Fault(0.0, "restart", "", {"for_s": 0.3, "later_s": 0.4, "before": ["append_after", "weights", 2],
            "lose_from": ["publish_sample", "prompts ", 5]}),
        Fault(0.0, "kill", "trainer", {"follows": True}),
        Fault(0.4, "kill", "rollout-0", {"follows": True, "before": ["append_part", "prompts ", 2]}),
    )),
    "an outage ends, and workers that were full are back before each other": Schedule(
        1, Setup(steps=3, group_size=8, rewards=4, reward_slots=2, sample_s=5.0), (
        Fault(0.0, "restart", "", {"for_s": 7.0, "of": "reward-0", "before": ["complete", "scores", 2]}),
    )),
    "groups of earlier steps are replaced when a worker wakes up": Schedule(
        1, Setup(groups_per_step=3, group_size=2, max_staleness=3, batch_order="as_ready", rewards=1,
        mixed=True), (
        Fault(0.0, "freeze", "rollout-0", {"for_s": 30.0, "sending": ["publish_sample", "prompts "],
            "until": ["append_after", "commits", 2]}),
    )),
    "a reward worker of an older release reads what it does not understand": Schedule(
        1, Setup(steps=3, groups_per_step=1, group_size=4, rollouts=1, rewards=1, claims=True), (
        Fault(0.0, "older", "reward-9", {"for_s": 6.0, "of": "rollout-0",
            "before": ["start_group", "prompts "]}),
    )),
}
# fmt: on
