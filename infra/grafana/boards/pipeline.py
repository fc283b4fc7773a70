"""Pipeline: where is the bottleneck?"""

from infra.grafana.boards.stages import PIPELINE_HEADING as HEADING
from infra.grafana.boards.stages import REWARD, ROLLOUT
from infra.grafana.panels import (
    Board,
    Panel,
    Query,
    Row,
    increase,
    mean,
    per_s,
    quantile,
    spread,
    total,
)

BOTTLENECK = Row(
    "Bottleneck",
    (
        Panel(
            "Bottleneck",
            "percentunit",
            "The stage that is most to blame for the length of a step, and its part of it.",
            "Give that stage more: workers, GPUs, or less work.",
            HEADING,
            (Query("tidemill:bottleneck{$run}", "{{stage}}"),),
            "stat",
            5,
        ),
        Panel(
            "Blame",
            "percentunit",
            "A step's time by the stage it is due to; waiting counts for the stage that is waited for.",
            "One stage has most of it: make it faster. Shared: stages take turns; raise max_staleness.",
            HEADING,
            (Query("tidemill:blame_share{$run}", "{{stage}}"),),
            "stacked",
            10,
            max=1.0,
        ),
        Panel(
            "Busy share of each stage",
            "percentunit",
            "How much of its time each stage works.",
            "Near 1: it has no room left. Low: its workers or GPUs would be of more use elsewhere.",
            HEADING,
            (Query("tidemill:stage_busy_share{$run}", "{{stage}}"),),
            span=9,
            max=1.0,
        ),
        Panel(
            "Trainer's time",
            "percentunit",
            "What the trainer does, and what it waits for.",
            "Much waiting: its cause names the stage to make faster.",
            "Trainer idle",
            (Query('tidemill:activity_share{$run, role="trainer"}', "{{state}}"),),
            "stacked",
            8,
            max=1.0,
        ),
        Panel(
            "Idle share by cause",
            "percentunit",
            "Share of its time that each role waits, and for what.",
            "Rollout waits for tickets while the trainer is busy: fine. Everybody waits: look at Redis.",
            HEADING,
            (Query("tidemill:idle_share{$run}", "{{role}}: {{cause}}"),),
            "stacked",
            8,
        ),
        Panel(
            "Idle share of each process",
            "percentunit",
            "Share of the last minute that a process has waited.",
            "One far from its peers: look at its machine.",
            HEADING,
            (Query("tidemill_worker_idle_share{$run}", "{{worker}}: {{cause}}"),),
            max=1.0,
        ),
    ),
)

STAGES = Row(
    "Stages",
    (
        Panel(
            "Way of a trajectory",
            "s",
            "Mean time a trained trajectory spent in each stage, queues included.",
            "A long queue before a stage: that stage is too small.",
            HEADING,
            (Query(mean("tidemill_stage_seconds", "stage"), "{{stage}}"),),
            "stacked",
        ),
        Panel(
            "Step time",
            "s",
            "Time from commit to commit.",
            "Growing: see which stage grew.",
            "No progress",
            spread("tidemill_step_seconds"),
        ),
        Panel(
            "Trained tokens",
            "short",
            "Completion tokens trained on a second, by their staleness in steps.",
            "Falling while prompts are the same: see which stage is busy.",
            HEADING,
            (Query(per_s("tidemill_trained_tokens_total", "staleness"), "{{staleness}} steps old"),),
            "stacked",
        ),
        Panel(
            "Commit, checkpoint, weights",
            "s",
            "Time to make a step durable and to write its weights, 95 %.",
            "Slow: a faster disk, checkpoint_every, or fewer ranks on one disk.",
            "Disk filling",
            (
                Query(quantile(0.95, "tidemill_commit_seconds"), "commit"),
                Query(quantile(0.95, "tidemill_checkpoint_seconds"), "checkpoint"),
                Query(quantile(0.95, "tidemill_checkpoint_copy_seconds"), "copy of a checkpoint"),
                Query(quantile(0.95, "tidemill_checkpoint_wait_seconds"), "wait for the checkpoint before"),
                Query(quantile(0.95, "tidemill_weights_write_seconds"), "weights"),
                Query(quantile(0.95, "tidemill_weights_compare_seconds"), "comparison of weights"),
                Query(quantile(0.95, "tidemill_evaluation_seconds"), "evaluation"),
            ),
        ),
        Panel(
            "Groups of the trainer",
            "short",
            "Groups under way: in generation, waiting for scores, ready.",
            "Many ready: the trainer is the bottleneck. Many waiting for scores: reward is.",
            HEADING,
            (Query(total("tidemill_trainer_groups", "state"), "{{state}}"),),
            "stacked",
        ),
        Panel(
            "Tickets and groups",
            "short",
            "Tickets issued, and groups that ended, in the window.",
            "Many replacements or other ends than trained: the outcome says why.",
            "Unhealthy numbers",
            (
                Query(increase("tidemill_tickets_issued_total", "kind"), "tickets: {{kind}}"),
                Query(increase("tidemill_groups_settled_total", "outcome"), "groups: {{outcome}}"),
            ),
        ),
    ),
)

STREAMS = Row(
    "Streams",
    (
        Panel(
            "Waiting",
            "short",
            "Entries that no worker has taken.",
            "Growing on trajectories: scale the reward service.",
            "Lag growing",
            (Query("tidemill_stream_lag{$run}", "{{stream}}"),),
        ),
        Panel(
            "In hand",
            "short",
            "Entries that workers hold under a lease.",
            "Never falls while nothing is published: a worker hangs.",
            "Worker silent",
            (Query("tidemill_stream_pending{$run}", "{{stream}}"),),
        ),
        Panel(
            "Age of the oldest",
            "s",
            "How long the oldest entry has waited, or has been held.",
            "Far above the stage's own time: it cannot keep up.",
            "Lag growing",
            (Query("tidemill_stream_oldest_age_seconds{$run}", "{{stream}} {{state}}"),),
        ),
        Panel(
            "Length",
            "short",
            "Entries kept in each stream.",
            "Growing without end: trimming stands still, or commits and dead letters pile up.",
            "Redis memory",
            (Query("tidemill_stream_length{$run}", "{{stream}}"),),
        ),
    ),
)

STALENESS = Row(
    "Staleness",
    (
        Panel(
            "Staleness of trajectories",
            "short",
            "Age in steps of the oldest token of a trained trajectory.",
            "Always at the bound with max_staleness above 1: generation is slow.",
            "Staleness at its bound",
            (*spread("tidemill_trained_staleness"), Query("tidemill_run_max_staleness{$run}", "bound")),
        ),
        Panel(
            "Staleness of tokens",
            "short",
            "Mean age of the tokens of each step.",
            "Lower max_staleness if KL or importance weights suffer.",
            "Staleness at its bound",
            (Query('tidemill_step_metric{$run, metric=~"staleness/(mean|max)"}', "{{metric}}"),),
        ),
    ),
)

REDIS = Row(
    "Redis",
    (
        Panel(
            "Command time",
            "s",
            "Time until Redis had answered.",
            "Above a few milliseconds: its machine, its disk, or the network is busy.",
            "Redis slow",
            spread("tidemill_redis_seconds", "service"),
        ),
        Panel(
            "Memory",
            "bytes",
            "Memory in use, and its limit (0: none).",
            "Beyond 70 % the trainer makes room; beyond 90 % raise maxmemory.",
            "Redis memory",
            (
                Query("tidemill_redis_memory_bytes{$run}", "in use"),
                Query("tidemill_redis_max_memory_bytes{$run}", "maxmemory"),
                Query("redis_memory_used_rss_bytes", "with fragmentation"),
            ),
        ),
        Panel(
            "Processor and clients",
            "short",
            "Cores that the server takes, and its connections.",
            "Near 1 core: it is saturated; raise batch sizes or use a faster machine.",
            "Redis slow",
            (
                Query(
                    "rate(redis_cpu_sys_seconds_total[$i]) + rate(redis_cpu_user_seconds_total[$i])", "cores"
                ),
                Query("redis_connected_clients", "clients"),
            ),
        ),
    ),
)

PIPELINE = Board(
    "pipeline", "Pipeline", HEADING, (BOTTLENECK, STAGES, ROLLOUT, REWARD, STREAMS, STALENESS, REDIS)
)
