"""The most memory of a run in Redis: what is in flight, what no archive has yet, and the commits."""

from tidemill.common.config import RunConfig
from tidemill.common.streams.log import KEPT_COMMITS

BYTES_OF_A_SAMPLE, BYTES_OF_A_COMMIT = 16, 2000
"""What a step takes in the commits stream."""
BYTES_OF_A_TOKEN = 4
BYTES_OF_AN_ENTRY = 500
"""Control fields of a trajectory and its score, and Redis's own share."""
BACKLOG = 1.5
"""Files of the archive that Redis holds before they are written: of trajectories, and of others in part."""


def redis_bytes(config: RunConfig) -> int:
    """Memory at the end of the run, where every completion has full length."""
    trainer, archive = config.trainer, config.streams.archive
    samples = trainer.groups_per_step * config.largest_group_size
    record_bytes = longest_record(config)
    records = records_held(config) * record_bytes
    commits = min(trainer.steps, _steps_kept(config) + KEPT_COMMITS)
    backlog = 0.0
    if config.streams.trim and archive.enabled:
        all_records = (1 + trainer.max_staleness + trainer.steps) * samples * record_bytes
        backlog = min(BACKLOG * archive.segment_mb * 2**20, all_records - records)
    return int(records + commits * (BYTES_OF_A_COMMIT + BYTES_OF_A_SAMPLE * samples) + backlog)


def records_held(config: RunConfig) -> int:
    """Trajectories that Redis holds at most: those under way, and those of the steps that are kept."""
    trainer = config.trainer
    steps = 1 + trainer.max_staleness + _steps_kept(config)
    return steps * trainer.groups_per_step * config.largest_group_size


def _steps_kept(config: RunConfig) -> int:
    """Steps whose entries Redis holds though they are trained: those since the oldest kept checkpoint, where
    the archive does not have them."""
    trainer, streams = config.trainer, config.streams
    if streams.trim and streams.archive.enabled:
        return 0
    if not (streams.trim and trainer.checkpoint_every):
        return trainer.steps
    return min(trainer.checkpoint_every * trainer.keep_checkpoints, trainer.steps)


def longest_record(config: RunConfig) -> float:
    """Ids and logprobs (a teacher's too) of 4 bytes a token, and text of about as much."""
    completion = (4 if config.reward.teachers else 3) * config.rollout.sampling.max_tokens
    return BYTES_OF_A_TOKEN * (2 * config.data.max_prompt_tokens + completion) + BYTES_OF_AN_ENTRY
