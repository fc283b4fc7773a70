"""Reward: is scoring healthy, and what does it cost?"""

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

HEADING = "Reward: is scoring healthy?"

SCORING = Row(
    "Scoring",
    (
        Panel(
            "Scores",
            "short",
            "Scores a second by status, training and evaluation.",
            "Anything but ok is left out of training: see Failures.",
            "Reward failures",
            (Query(per_s("tidemill_scores_published_total", "lane, status"), "{{lane}} {{status}}"),),
            "stacked",
        ),
        Panel(
            "Time of a score",
            "s",
            "From the start of a score to its end, retries included.",
            "Long: more concurrency does not help one score; a faster judge or a timeout does.",
            HEADING,
            spread("tidemill_score_seconds", "lane"),
        ),
        Panel(
            "Slots in use",
            "short",
            "Trajectories in work, and how many the workers can hold.",
            "Full: scale the reward service, or raise reward.max_in_flight.",
            "Lag growing",
            (
                Query(total("tidemill_scores_in_flight", "lane"), "{{lane}} in work"),
                Query(total("tidemill_score_slots", "lane"), "{{lane}} slots"),
            ),
        ),
        Panel(
            "Reward workers",
            "short",
            "Reward processes that are alive or silent.",
            "`docker compose up --scale reward=8` adds some at any time.",
            "No workers",
            (Query('tidemill_workers{$run, role="reward"}', "{{state}}"),),
        ),
        Panel(
            "Cache",
            "short",
            "Rewards looked up in the cache, a second.",
            "Few hits with the same prompts: the reward's inputs differ in something that does not matter.",
            HEADING,
            (Query(per_s("tidemill_reward_cache_total", "result"), "{{result}}"),),
            "stacked",
        ),
        Panel(
            "Groups scored as a whole",
            "short",
            "Groups a second that a group function has scored.",
            "0 while scores wait: a trajectory of each group is missing.",
            HEADING,
            (Query(per_s("tidemill_groups_post_processed_total", "lane"), "{{lane}}"),),
        ),
    ),
)

FAILURES = Row(
    "Failures",
    (
        Panel(
            "Failed for good",
            "short",
            "Rewards without a value in the window, by name and kind.",
            "Timeout: raise it or add replicas. Error: the worker's log has it.",
            "Reward failures",
            (Query(increase("tidemill_reward_failures_total", "reward, kind"), "{{reward}} {{kind}}"),),
        ),
        Panel(
            "Retries",
            "short",
            "Attempts repeated after a failure, a second.",
            "Steady retries cost time and money: find their cause before they become failures.",
            "Judge errors",
            (Query(per_s("tidemill_score_retries_total"), "retries"),),
        ),
        Panel(
            "Errors of judges",
            "short",
            "Requests to servers that failed, by kind.",
            "rate_limited: lower the limit; server or connection: look at the server.",
            "Judge errors",
            (Query(per_s("tidemill_remote_errors_total", "servers, kind"), "{{servers}} {{kind}}"),),
        ),
        Panel(
            "Killed scoring processes",
            "short",
            "Processes of plain functions that were killed or died.",
            "Endless loops or memory: give the function a timeout, or mend it.",
            "Reward failures",
            (Query(increase("tidemill_scoring_processes_killed_total"), "killed"),),
            span=6,
        ),
        Panel(
            "Code sandbox",
            "short",
            "Sandboxed runs in the window by how they ended.",
            "Many refused or timed out: more sandbox workers.",
            "Failed jobs",
            (Query(increase("tidemill_sandbox_jobs_total", "outcome"), "{{outcome}}"),),
            span=6,
        ),
        Panel(
            "Time of a sandboxed run",
            "s",
            "From asking to the verdict.",
            "Much longer than the code's own limit: runs wait for a worker.",
            "Failed jobs",
            spread("tidemill_sandbox_seconds"),
            span=6,
        ),
        Panel(
            "Jobs",
            "short",
            "Jobs in the queues of RQ.",
            "Queued grows: start more workers. Failed: `rq info` and the workers' log.",
            "Failed jobs",
            (Query("tidemill_job_queue_length{$run}", "{{queue}} {{state}}"),),
            span=6,
        ),
    ),
)

REMOTE = Row(
    "Judges and reward models",
    (
        Panel(
            "Time of a request",
            "s",
            "Answered requests to judges and reward models.",
            "95 % far from the median: add a replica.",
            HEADING,
            spread("tidemill_remote_seconds", "servers"),
        ),
        Panel(
            "Waiting for limits",
            "s",
            "Time that requests waited for the run's rate and concurrency limits.",
            "Longer than the requests: raise the limit, if the provider allows.",
            "Limiter saturated",
            (
                Query(
                    quantile(0.95, "tidemill_limiter_wait_seconds", "servers, lane"),
                    "{{servers}} {{lane}} 95 %",
                ),
            ),
        ),
        Panel(
            "Replicas",
            "short",
            "Replicas that the workers know, by state; the largest number any of them sees.",
            "down or resting: that server does not answer, or fails.",
            "Replicas down",
            (Query("max by (servers, state) (tidemill_replicas{$run})", "{{servers}} {{state}}"),),
        ),
        Panel(
            "Requests at each replica",
            "short",
            "Requests under way at each replica.",
            "Uneven: one replica is slow or has just come back.",
            "Replicas down",
            (Query(total("tidemill_replica_in_flight", "servers, replica"), "{{servers}} {{replica}}"),),
            span=12,
        ),
        Panel(
            "Failovers",
            "short",
            "Requests repeated at another replica at once.",
            "Many: a replica is ill.",
            "Replicas down",
            (Query(per_s("tidemill_remote_failovers_total", "servers"), "{{servers}}"),),
            span=12,
        ),
        Panel(
            "Tokens",
            "short",
            "Tokens that judges charged, a second.",
            "Rising with the same prompts: completions got longer; shorten what the judge reads.",
            HEADING,
            (Query(per_s("tidemill_remote_tokens_total", "servers, kind"), "{{servers}} {{kind}}"),),
            "stacked",
            12,
        ),
        Panel(
            "Cost",
            "short",
            "What judges cost an hour, in the currency of the servers' prices.",
            "Too much: a cache, a smaller judge, or fewer samples.",
            HEADING,
            (Query(f"3600 * {per_s('tidemill_remote_cost_total', 'servers')}", "{{servers}} an hour"),),
            span=12,
        ),
    ),
)

MODEL_SERVER = Row(
    "Reward model server",
    (
        Panel(
            "Requests",
            "short",
            "Requests answered a second, by path and status.",
            "503: it is full or asleep; add a replica.",
            "Judge errors",
            (Query(per_s("tidemill_reward_model_requests_total", "path, status"), "{{path}} {{status}}"),),
        ),
        Panel(
            "Queue",
            "s",
            "Time that sequences wait for a batch, and time of a batch, 95 %.",
            "Waiting is longer than computing: add a replica.",
            HEADING,
            (
                Query(quantile(0.95, "tidemill_reward_model_wait_seconds"), "wait"),
                Query(quantile(0.95, "tidemill_reward_model_batch_seconds"), "batch"),
                Query(
                    quantile(0.95, "tidemill_device_turn_wait_seconds", "service"),
                    "turn on the device: {{service}}",
                ),
            ),
        ),
        Panel(
            "Batches",
            "short",
            "Sequences in a batch, waiting ones, and those that failed.",
            "Small batches while many wait: raise the batch size.",
            HEADING,
            (
                Query(mean("tidemill_reward_model_batch_rows"), "in a batch"),
                Query(total("tidemill_reward_model_queued_rows"), "waiting"),
                Query(per_s("tidemill_reward_model_batch_errors_total"), "failed a second"),
            ),
        ),
        Panel(
            "Tokens computed",
            "short",
            "Real tokens and padding, a second.",
            "Much padding: lengths differ widely within a batch.",
            HEADING,
            (Query(per_s("tidemill_reward_model_tokens_total", "kind"), "{{kind}}"),),
            "stacked",
            24,
        ),
    ),
)

REWARD = Board("reward", "Reward", HEADING, (SCORING, FAILURES, REMOTE, MODEL_SERVER))
