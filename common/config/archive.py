"""The `streams.archive` section: what a run keeps of its streams beyond Redis."""

from pydantic import Field

from common.config.section import Section


class ArchiveConfig(Section):
    """Entries are written to Parquet files in the run's folder before they are trimmed from Redis."""

    enabled: bool = True
    """Trim only what is archived, and archive the rest at the end; needs `python -m services.jobs RUN_ID`,
    which `tidemill up` starts. Off, trimmed entries are gone."""
    segment_mb: float = Field(32.0, ge=0.001, le=1024.0)
    """Payload of one file, in MiB. Redis keeps as much of each stream beyond what the run needs."""
    keep_gb: float | None = Field(None, ge=0.001, le=1e6)
    """Most GiB of the archive's files: the oldest entries beyond it are removed. Null keeps all."""
    keep_days: float | None = Field(None, ge=0.001, le=1e5)
    """Files whose newest entry is older are removed. Null keeps all."""
