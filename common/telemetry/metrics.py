"""Every metric of every service, with help and unit; names begin with `tidemill_`. Labels are few and of low
cardinality.

Most belong to the process that exports them. Those in `RUN` describe a whole run as Redis knows it, and are
exported by one process: `python -m tidemill.services.console.exporter`. `weight_*` is what a rollout worker
loads, `weights_*` what the trainer writes.
"""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge

from tidemill.common.telemetry.batched import Histogram

RUN = CollectorRegistry()
"""Registry of the metrics that describe a run, not a process."""

_LATENCY_S = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_AGES = (0, 1, 2, 3, 4, 6, 8, 16, 32)
counter = partial(Counter, namespace="tidemill")
gauge = partial(Gauge, namespace="tidemill")
run_gauge = partial(gauge, registry=RUN)
histogram = partial(Histogram, namespace="tidemill")
latency = partial(histogram, buckets=_LATENCY_S)
short_time = partial(histogram, buckets=_SHORT_S)

# Of every service: how it spends its time, and Redis as it sees it.
ACTIVITY_SECONDS = counter(
    "activity_seconds_total", "Time spent in each state, working or waiting", ["role", "state"]
)
RUN_INFO = gauge("run_info", "1; labels say which run and role this process serves", ["run_id", "role"])

LOOP_LAG_SECONDS = histogram(
    "loop_lag_seconds",
    "How late the event loop woke a sleeping probe",
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10),
)

REDIS_RETRIES = counter("redis_retries_total", "Redis commands repeated after a passing error")
REDIS_WAIT = counter(
    "redis_wait_seconds_total",
    "Pauses because Redis was away (redis) or full (memory)",
    ["cause"],
)
REDIS_SECONDS = short_time("redis_seconds", "Time of one Redis command that does not block")
REDIS_MAY_EVICT = gauge("redis_may_evict", "1 while the maxmemory-policy lets Redis delete keys")
REDIS_EVICTED_KEYS = counter("redis_evicted_keys_total", "Keys that Redis has deleted to make room")
REDIS_MEMORY_SHARE = gauge("redis_memory_share", "Memory in use over maxmemory; 0 without a limit")

# Of workers: messages of streams with consumer groups.
DELIVERIES = counter("deliveries_total", "Messages received through a consumer group", ["stream"])
RECLAIMED = counter("reclaimed_total", "Messages taken over from a silent consumer", ["stream"])
LEASES_LOST = counter("leases_lost_total", "Held messages that another consumer took over", ["stream"])
HANDED_BACK = counter("handed_back_total", "Messages given back unfinished while draining", ["stream"])
DEAD_LETTERS = counter("dead_letters_total", "Messages put into the dead-letter stream", ["stream"])

# Of rollout workers.
ENGINE_VERSION = gauge("engine_version", "Version of the weights this worker generates with")
TRAJECTORIES_PUBLISHED = counter("trajectories_published_total", "Trajectories published", ["lane"])
PROMPT_TOKENS = counter("prompt_tokens_total", "Prompt tokens of published completions", ["lane"])
COMPLETION_TOKENS = counter("completion_tokens_total", "Completion tokens published", ["lane"])
RESUMED_TOKENS = counter("resumed_tokens_total", "Tokens of unfinished samples that were not generated again")
GENERATION_SECONDS = latency("generation_seconds", "Time to generate one completion", ["lane"])
GROUPS_IN_FLIGHT = gauge("groups_in_flight", "Groups this rollout worker holds", ["lane"])
GROUP_SLOTS = gauge("group_slots", "Groups this rollout worker can hold", ["lane"])
REQUESTS_RUNNING = gauge("requests_running", "Completions the engine works on")
SESSIONS_HELD = gauge("sessions_held", "Sessions with an environment that this worker plays")
CONTAINERS_HELD = gauge("containers_held", "Containers of the run's sessions on this worker's node")
CONTAINERS_REMOVED = counter(
    "containers_removed_total", "Containers removed: left by a session, by a lost lease, by a run", ["of"]
)
SESSION_ENDS = counter(
    "session_ends_total", "Sessions, by how they ended, and what was late", ["end", "late"]
)
SESSION_TURNS = histogram(
    "session_turns", "Turns of the model in one session", buckets=(1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128)
)
SESSION_TOKENS = counter(
    "session_tokens_total", "Completion tokens of sessions, by who wrote them", ["origin"]
)
SESSION_SECONDS = latency(
    "session_seconds", "Time of one session in the engine and in the environment", ["where"]
)
LATER_PROMPT_TOKENS = counter(
    "session_later_prompt_tokens_total",
    "Prompt tokens of turns after the first: cached, or computed",
    ["source"],
)
TOOL_CALLS = counter("environment_calls_total", "Calls of tools, right and wrong", ["result"])
AGENT_WISHES = counter(
    "agent_wishes_total",
    "Requests of agents for a form of the answer or a forced call, by field",
    ["field"],
)
UNREAD_TOKENS = counter(
    "agent_unread_tokens_total",
    "Tokens of answers that no agent's program has read, which are not trained, by why",
    ["why"],
)
ENVIRONMENT_FAULTS = counter("environment_faults_total", "Plays of a session that a fault ended", ["kind"])
# Of rollout workers: weights as they are loaded.
WEIGHT_LOAD_SECONDS = latency("weight_load_seconds", "Time of one weight update in the engine")
WEIGHT_PAUSE_SECONDS = latency("weight_pause_seconds", "Time generation stood still for one weight update")
WEIGHT_DELAY_SECONDS = latency(
    "weight_delay_seconds", "Time from the announcement of a version until its use here"
)
WEIGHT_FAILURES = counter("weight_failures_total", "Versions that could not be loaded when tried")
WEIGHT_MISMATCHES = counter(
    "weight_mismatches_total",
    "Updates after which an engine had other weights than committed",
)

# Of reward workers.
SCORES_PUBLISHED = counter("scores_published_total", "Scores published", ["lane", "status"])
SCORE_SECONDS = latency("score_seconds", "Time to score one trajectory", ["lane"])
SCORE_RETRIES = counter("score_retries_total", "Reward attempts repeated after a failure")
REWARD_FAILURES = counter(
    "reward_failures_total", "Rewards that failed for good, by name and kind", ["reward", "kind"]
)
REWARD_CACHE = counter(
    "reward_cache_total",
    "Rewards looked up in the cache: hit, miss or shared",
    ["result"],
)
GROUPS_POST_PROCESSED = counter(
    "groups_post_processed_total", "Groups whose scores were published as a whole", ["lane"]
)
SCORES_IN_FLIGHT = gauge("scores_in_flight", "Trajectories this reward worker is scoring", ["lane"])
SCORE_SLOTS = gauge("score_slots", "Trajectories this reward worker can hold", ["lane"])
SCORING_PROCESSES_KILLED = counter(
    "scoring_processes_killed_total", "Processes of reward functions that were killed or died"
)

# Of whoever asks servers: judges, reward models, teachers.
REMOTE_SECONDS = latency("remote_seconds", "Time of one answered request to a server", ["servers"])
REMOTE_TOKENS = counter("remote_tokens_total", "Tokens that servers charged", ["servers", "kind"])
REMOTE_COST = counter(
    "remote_cost_total",
    "Cost of these tokens, by the servers' `prices`",
    ["servers"],
)
REMOTE_ERRORS = counter("remote_errors_total", "Requests to servers that failed", ["servers", "kind"])
REMOTE_FAILOVERS = counter(
    "remote_failovers_total", "Requests repeated at another replica at once", ["servers"]
)
LIMITER_WAIT_SECONDS = latency(
    "limiter_wait_seconds", "Time that requests waited for the run's limits", ["servers", "lane"]
)
REPLICAS = gauge("replicas", "Replicas that this worker knows, by state", ["servers", "state"])
REPLICA_IN_FLIGHT = gauge(
    "replica_in_flight", "Requests of this worker at one replica", ["servers", "replica"]
)

# Of reward model servers.
REWARD_MODEL_REQUESTS = counter(
    "reward_model_requests_total", "Requests the reward model server answered", ["path", "status"]
)
REWARD_MODEL_QUEUED_ROWS = gauge("reward_model_queued_rows", "Sequences that wait for a batch")
REWARD_MODEL_WAIT_SECONDS = short_time("reward_model_wait_seconds", "Time a sequence waited for its batch")
REWARD_MODEL_BATCH_SECONDS = short_time("reward_model_batch_seconds", "Time to compute one batch")
REWARD_MODEL_BATCH_ROWS = histogram(
    "reward_model_batch_rows", "Sequences in one batch", buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256)
)
REWARD_MODEL_TOKENS = counter("reward_model_tokens_total", "Tokens computed", ["kind"])
REWARD_MODEL_BATCH_ERRORS = counter("reward_model_batch_errors_total", "Sequences that could not be computed")
# Of processes that share a GPU, and of sandboxes.
DEVICE_TURN_WAIT_SECONDS = latency("device_turn_wait_seconds", "Time this process waited for a shared device")
SANDBOX_SECONDS = latency("sandbox_seconds", "Time from request to verdict of a sandboxed run")
SANDBOX_JOBS = counter("sandbox_jobs_total", "Sandboxed runs by how they ended", ["outcome"])

# Of the trainer: groups on their way.
TICKETS_ISSUED = counter("tickets_issued_total", "Tickets issued, regular and replacements", ["kind"])
GROUPS_SETTLED = counter("groups_settled_total", "Groups that reached their end", ["outcome"])
DUPLICATES_DROPPED = counter("duplicates_dropped_total", "Entries whose key was there already", ["stream"])
UNEXPECTED_ENTRIES = counter(
    "unexpected_entries_total", "Unexpected entries moved out of a stream", ["stream"]
)
STALENESS_VIOLATIONS = counter(
    "staleness_violations_total", "Trajectories refused because a token was too old"
)
TRAINER_GROUPS = gauge(
    "trainer_groups",
    "Groups not trained yet: in generation, waiting for scores, or ready",
    ["state"],
)
# Of the trainer: what it trained.
TRAINED_STALENESS = histogram(
    "trained_staleness", "Staleness of each trained trajectory's oldest token, in steps", buckets=_AGES
)
TRAINED_SPANS = histogram("trained_spans", "Versions that produced one trained trajectory", buckets=_AGES[1:])
TRAINED_TOKENS = counter("trained_tokens_total", "Trained completion tokens, by staleness", ["staleness"])
STAGE_SECONDS = latency(
    "stage_seconds",
    "Where a trained trajectory spent its time: ticket (until its group began), generate, reward_queue, "
    "reward, trainer (from its score to the commit)",
    ["stage"],
)
# Of the trainer: steps, checkpoints, the weights that it writes, evaluations.
COMMITTED_VERSION = gauge("committed_version", "Number of committed steps")
STEP_SECONDS = latency("step_seconds", "Time from one commit to the next")
COMMIT_SECONDS = short_time("commit_seconds", "Time to make one commit durable")
CHECKPOINT_SECONDS = latency("checkpoint_seconds", "Time to write a checkpoint")
CHECKPOINT_COPY_SECONDS = latency(
    "checkpoint_copy_seconds",
    "Time that training pauses to copy a checkpoint's state",
)
CHECKPOINT_WAIT_SECONDS = latency(
    "checkpoint_wait_seconds", "Time that training waits for the checkpoint before"
)
WEIGHTS_COMPARE_SECONDS = latency("weights_compare_seconds", "Time that training pauses to compare weights")
WEIGHTS_WRITE_SECONDS = latency("weights_write_seconds", "Time to write one version")
WEIGHTS_BYTES = gauge("weights_bytes", "Size of the last version's files")
WEIGHTS_SHARE_CHANGED = gauge(
    "weights_share_changed", "Share of values that the last step changed; -1 not measured"
)
DISK_FREE_SHARE = gauge("disk_free_share", "Free share of the disk with the run's folder")
RECOVERY_SECONDS = gauge("recovery_seconds", "Time from the trainer's start until it could train")
REPLAYED_STEPS = counter("replayed_steps_total", "Committed steps trained again after a restart")
STEP_METRIC = gauge("step_metric", "Numbers of the last step", ["metric"])
EVALUATION_METRIC = gauge(
    "evaluation_metric", "Numbers of the last evaluation of each dataset", ["dataset", "metric"]
)
EVALUATION_SECONDS = latency("evaluation_seconds", "Time of one evaluation, all datasets together")
UNHEALTHY = gauge("unhealthy", "1 while a number is outside of its healthy range", ["check"])

# Of the run, in the registry `RUN`.
REDIS_UP = run_gauge("redis_up", "1 while Redis answers the exporter")
REDIS_MEMORY_BYTES = run_gauge("redis_memory_bytes", "Memory of Redis in use")
REDIS_MAX_MEMORY_BYTES = run_gauge("redis_max_memory_bytes", "Its maxmemory; 0 without a limit")
RUN_STATUS = run_gauge("run_status", "1 for the state of the run", ["status"])
RUN_VERSION = run_gauge("run_version", "Committed steps of the run")
RUN_STEPS = run_gauge("run_steps", "Steps that the run is to have")
RUN_MAX_STALENESS = run_gauge("run_max_staleness", "The run's bound of staleness, in steps")
LAST_COMMIT_TIMESTAMP = run_gauge(
    "last_commit_timestamp_seconds", "When the last step was committed; 0 before the first"
)
STREAM_LENGTH = run_gauge("stream_length", "Entries in a stream", ["stream"])
STREAM_LAG = run_gauge("stream_lag", "Entries that no worker of the group has taken", ["stream", "group"])
STREAM_PENDING = run_gauge("stream_pending", "Entries that workers of the group hold", ["stream", "group"])
STREAM_OLDEST_AGE_SECONDS = run_gauge(
    "stream_oldest_age_seconds",
    "Age of the oldest entry that is waiting, or held by a worker",
    ["stream", "group", "state"],
)
STREAM_CONSUMERS = run_gauge("stream_consumers", "Consumers that Redis knows in a group", ["stream", "group"])
WORKERS = run_gauge("workers", "Processes of the run by role, alive or silent", ["role", "state"])
WORKER_VERSION = run_gauge("worker_version", "Version of the weights each rollout worker holds", ["worker"])
WORKER_START_TIMESTAMP = run_gauge(
    "worker_start_timestamp_seconds",
    "When each process was started",
    ["role", "worker"],
)
WORKER_IDLE_SHARE = run_gauge(
    "worker_idle_share",
    "Share of the last minute spent waiting, by cause",
    ["role", "worker", "cause"],
)
JOB_QUEUE_LENGTH = run_gauge(
    "job_queue_length", "Jobs in an RQ queue: queued, started or failed", ["queue", "state"]
)
