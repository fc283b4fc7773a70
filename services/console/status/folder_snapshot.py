"""A run as its folder alone tells it: for runs whose Redis is not there any more."""

from common.config import RunConfig
from common.errors import ConfigError
from common.run.records import EVALUATION, METRICS_FILE, STEP, read_records
from common.run.weight_files import folder_versions
from services.console.run.folder import RunFolder
from services.console.status.report import read_report
from services.console.status.snapshot import MAX_POINTS, RunSnapshot, StepPoint

CHECKPOINTS_FOLDER = "checkpoints"


def read_folder(folder: RunFolder) -> tuple[RunSnapshot, str]:
    """A snapshot from metrics.jsonl and config.yaml, and what else there is, in words.

    Raises:
        ConfigError: the folder does not hold a run.
    """
    config = folder.config()
    if config is None:
        raise ConfigError(
            f"{folder.path} holds no run: it has no config.yaml. Give the folder of runs with --runs-dir."
        )
    records = read_records(folder.path / METRICS_FILE)
    # A run that was resumed may have written a step twice; the last line is what stands.
    steps = {int(record["step"]): record for record in records if record["kind"] == STEP}
    points = [_point(step, steps[step]) for step in sorted(steps)[-MAX_POINTS:]]
    evaluations = [
        {**record, "dataset": record.get("set", "")} for record in records if record["kind"] == EVALUATION
    ]
    state = {"status": "stopped", "evaluations": evaluations}
    snapshot = RunSnapshot(
        folder.run_id,
        config.trainer.steps,
        config.trainer.max_staleness,
        state=state,
        points=points,
        remembered=(read_report(folder) or {}).get("bottleneck") or {},
    )
    return snapshot, _words(folder, config)


def _words(folder: RunFolder, config: RunConfig) -> str:
    versions = folder_versions(folder.path / CHECKPOINTS_FOLDER)
    kept = f"newest checkpoint: version {versions[-1]}" if versions else "no checkpoint yet"
    return f"its Redis is not there: read from {folder.path} ({METRICS_FILE}; {kept})"


def _point(step: int, record: dict[str, object]) -> StepPoint:
    numbers = {name: float(value) for name, value in record.items() if isinstance(value, int | float)}
    at = record.get("time")
    return StepPoint(step, numbers, float(at) if isinstance(at, int | float) else 0.0)
