"""Faults: what broke, and did it recover?"""

from infra.grafana.boards.stages import FAULTS_HEADING as HEADING
from infra.grafana.boards.stages import FAULTS_OF_STAGES
from infra.grafana.panels import Board, Panel, Query, Row, increase, per_s, spread, total

PROCESSES = Row(
    "Processes",
    (
        Panel(
            "Alerts",
            "short",
            "Alerts that fire now.",
            "Each has its paragraph in the runbook.",
            HEADING,
            (Query('ALERTS{alertstate="firing", run_id=~"$run_id|"}', "{{alertname}}"),),
            "table",
            8,
        ),
        Panel(
            "Workers",
            "short",
            "Processes by role: alive, or silent since they last spoke.",
            "Silent: its machine or its loop stands still; its work is taken over after one lease.",
            "Worker silent",
            (
                Query("tidemill_workers{$run}", "{{role}} {{state}}"),
                Query("count by (role) (tidemill_run_info{$run})", "{{role}} scraped"),
            ),
        ),
        Panel(
            "Restarts",
            "short",
            "How often each process was started anew within the window.",
            "More than once: read the end of its log.",
            "Restarts",
            (Query("changes(tidemill_worker_start_timestamp_seconds{$run}[$i])", "{{worker}}"),),
        ),
        Panel(
            "Scrapes",
            "short",
            "1 where a process answers Prometheus.",
            "0: it is gone, or its port cannot be reached from here.",
            "Scrape down",
            (Query("up{$run}", "{{service}} {{worker}}"),),
            span=12,
        ),
        Panel(
            "Event loops",
            "s",
            "How late the event loop of a process wakes, 95 %.",
            "Above a second: something blocks it; heartbeats and leases suffer.",
            "Blocked loop",
            (
                Query(
                    "histogram_quantile(0.95, sum by (le, service, worker) "
                    "(rate(tidemill_loop_lag_seconds_bucket{$run}[$i])))",
                    "{{service}} {{worker}}",
                ),
            ),
            span=12,
        ),
    ),
)

DELIVERY = Row(
    "Delivery",
    (
        Panel(
            "Taken over",
            "short",
            "Entries taken over from silent workers, in the window.",
            "A few after a kill are as they should be; steady ones: leases are too short or workers die.",
            "Many takeovers",
            (
                Query(increase("tidemill_reclaimed_total", "stream"), "{{stream}} taken over"),
                Query(increase("tidemill_leases_lost_total", "stream"), "{{stream}} leases lost"),
            ),
        ),
        Panel(
            "Handed back",
            "short",
            "Entries given back unfinished by workers that stop.",
            "Normal when scaling down; otherwise somebody stops workers.",
            HEADING,
            (Query(increase("tidemill_handed_back_total", "stream"), "{{stream}}"),),
        ),
        Panel(
            "Duplicates dropped",
            "short",
            "Entries whose key was there already; none is trained twice.",
            "Many: work is done twice; look at takeovers.",
            "Many takeovers",
            (
                Query(increase("tidemill_duplicates_dropped_total", "stream"), "{{stream}}"),
                Query(increase("tidemill_stray_entries_total", "stream"), "foreign in {{stream}}"),
            ),
        ),
        Panel(
            "Dead letters",
            "short",
            "Messages moved to the dead-letter stream.",
            "`tidemill dead list` says why; requeue or drop them.",
            "Dead letters waiting",
            (
                Query('tidemill_stream_length{$run, stream="dead"}', "kept"),
                Query(increase("tidemill_dead_letters_total", "stream"), "new: {{stream}}"),
            ),
        ),
        Panel(
            "Staleness violations",
            "short",
            "Trajectories refused because a token was too old.",
            "Must be 0: more means an engine that tells a wrong version.",
            "Staleness violations",
            (Query(increase("tidemill_staleness_violations_total"), "refused"),),
            thresholds=(1, 1),
        ),
        Panel(
            "Jobs",
            "s",
            "Time of background jobs by queue and outcome, 95 %.",
            "Failed ones: the workers' log and `rq info`.",
            "Failed jobs",
            spread("tidemill_job_seconds", "queue, outcome"),
        ),
    ),
)

RECOVERY = Row(
    "Recovery",
    (
        Panel(
            "Recovery of the trainer",
            "s",
            "Time from its start until it trained again, replay included.",
            "Long: checkpoint more often (checkpoint_every).",
            "Restarts",
            (Query("tidemill_recovery_seconds{$run}", "recovery"),),
            "stat",
            6,
        ),
        Panel(
            "Replayed steps",
            "short",
            "Committed steps trained again after a restart.",
            "At most checkpoint_every after each restart.",
            "Restarts",
            (Query("tidemill_replayed_steps_total{$run}", "steps"),),
            "stat",
            6,
        ),
        Panel(
            "Redis",
            "short",
            "1 while Redis answers.",
            "0: every service waits for it.",
            "Redis down",
            (Query("tidemill_redis_up{$run}", "up"),),
            "stat",
            6,
        ),
        Panel(
            "Free disk",
            "percentunit",
            "Share of the disk with the run's folder that is free.",
            "Below a tenth: keep fewer checkpoints, or make room.",
            "Disk filling",
            (Query("tidemill_disk_free_share{$run}", "free"),),
            "stat",
            6,
        ),
        Panel(
            "Waiting for Redis",
            "s",
            "Seconds a second that services pause because Redis is away or full.",
            "memory: it is full; redis: it is away.",
            "Redis down",
            (Query(per_s("tidemill_redis_wait_seconds_total", "service, cause"), "{{service}}: {{cause}}"),),
            span=12,
        ),
        Panel(
            "Repeated commands",
            "short",
            "Redis commands repeated after a passing error, a second.",
            "Without a restart of Redis: the network drops connections.",
            "Redis down",
            (Query(per_s("tidemill_redis_retries_total", "service"), "{{service}}"),),
            span=6,
        ),
        Panel(
            "Memory by the trainer",
            "percentunit",
            "Redis memory over maxmemory, as the trainer sees it.",
            "From 0.7 on it checkpoints and trims ahead of time.",
            "Redis memory",
            (Query(total("tidemill_redis_memory_share"), "share"),),
            span=6,
            thresholds=(0.7, 0.9),
            max=1.0,
        ),
    ),
)

FAULTS = Board("faults", "Faults", HEADING, (PROCESSES, DELIVERY, RECOVERY, FAULTS_OF_STAGES))
