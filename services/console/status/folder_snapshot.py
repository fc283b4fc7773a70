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
    points = read_points(folder)[-MAX_POINTS:]
    records = read_records(folder.path / METRICS_FILE)
    evaluations = [{**r, "dataset": r.get("set", "")} for r in records if r["kind"] == EVALUATION]
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


def read_points(folder: RunFolder) -> list[StepPoint]:
    """All steps that metrics.jsonl has. A resumed run may have written one twice: the last line stands."""
    found: dict[int, StepPoint] = {}
    for record in read_records(folder.path / METRICS_FILE):
        if record["kind"] == STEP:
            numbers = {name: float(value) for name, value in record.items() if isinstance(value, int | float)}
            found[int(record["step"])] = StepPoint(int(record["step"]), numbers, numbers.get("time", 0.0))
    return [found[step] for step in sorted(found)]
