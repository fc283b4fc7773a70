"""Memory of a run in Redis, with numbers worked out by hand."""

from typing import Any

from tests.support.trajectories import make_config
from tidemill.services.console.check.redis_size import longest_record, records_held, redis_bytes


def config_of(staleness: int = 1, **sections: Any) -> Any:
    trainer = {"groups_per_step": 4, "group_size": 5, "max_staleness": staleness, "steps": 100}
    return make_config(trainer=trainer | sections.pop("trainer", {}), **sections)


def test_redis_holds_what_is_under_way_and_what_the_oldest_checkpoint_needs() -> None:
    no_archive = {"archive": {"enabled": False}}

    def held(streams: Any = no_archive, **trainer: Any) -> int:
        trainer = {"checkpoint_every": 3, "keep_checkpoints": 2} | trainer
        return records_held(config_of(trainer=trainer, streams=streams))

    assert held({}) == (1 + 1) * 20, "the archive has the rest"
    assert held() == (1 + 1 + 3 * 2) * 20
    assert held(max_staleness=0) == (1 + 6) * 20
    assert held(steps=4) == (2 + 4) * 20
    assert records_held(config_of(streams={"trim": False})) == 102 * 20
    assert held(checkpoint_every=0) == 102 * 20
    plain = config_of(streams=no_archive)
    assert redis_bytes(plain) == records_held(plain) * longest_record(plain) + (20 + 32) * (2000 + 16 * 20)


def test_redis_holds_what_waits_for_the_archive_as_far_as_there_is_so_much() -> None:
    # Two steps of 20 samples are under way, and of the commits 32 stay.
    record = longest_record(config_of())
    least = 2 * 20 * record + 32 * (2000 + 16 * 20)
    assert redis_bytes(config_of()) - least == 100 * 20 * record, "102 steps in all"
    small = config_of(streams={"archive": {"segment_mb": 0.25}})
    assert redis_bytes(small) - least == 1.5 * 2**18
