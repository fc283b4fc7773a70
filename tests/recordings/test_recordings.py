"""The steps of runs that an earlier commit recorded come out of the present code, bit by bit."""

import sys
from pathlib import Path

import pytest

from tests.recordings import record
from tests.recordings.record import Made, RecordingError, Recordings, full_hash
from tests.recordings.runs import RECORDINGS


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [recording.name for recording in RECORDINGS])
def test_a_recorded_run_is_trained_to_the_same_weights(name: str) -> None:
    """Where this machine has no recording of it yet, the code of that commit makes one first."""
    recordings = Recordings()
    (recording,) = (recording for recording in RECORDINGS if recording.name == name)
    recordings.make(recording)
    replay = recordings.replay(recording)
    assert not replay.differences, "\n".join(replay.differences)


def test_a_clone_without_the_commit_is_said_to_be_one() -> None:
    with pytest.raises(RecordingError, match="does not have commit 0123456789abcdef"):
        full_hash("0123456789abcdef")


ENDINGS = {
    "nothing in time": ("print('begun', flush=True); import time; time.sleep(60)", "within 2 s.*begun"),
    "a failure": ("print('begun'); raise SystemExit(3)", "exit code 3.*begun"),
    "other output": ("print('begun')", "no JSON.*begun"),
    "other output, and a difference": ("print('begun'); raise SystemExit(1)", "no JSON.*begun"),
}
"""What a replay prints and how it ends, and what is said of it."""


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_replay_without_results_is_no_difference(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ending: str
) -> None:
    code, words = ENDINGS[ending]
    monkeypatch.setattr(record, "TIDEMILL", (sys.executable, "-c", code))
    monkeypatch.setattr(record, "LIMIT_S", 2.0)
    recordings = Recordings("HEAD", tmp_path)
    recordings._write_table({"grpo": Made("", [], [], 1.0)})
    with pytest.raises(RecordingError, match=f"(?s)^grpo: .*{words}"):
        recordings.replay(RECORDINGS[0])


def test_a_commit_that_git_does_not_give_is_said_to_be_one(tmp_path: Path) -> None:
    recordings = Recordings("HEAD", tmp_path)
    recordings.commit = "0123456789abcdef"
    with pytest.raises(RecordingError, match=r"exit code 128 .* of git archive"):
        recordings._check_out()
    assert not recordings.source.exists()


def test_a_table_that_is_cut_off_is_named(tmp_path: Path) -> None:
    recordings = Recordings("HEAD", tmp_path)
    recordings._write_table({"grpo": Made("", ["ab"], [], 1.0)})
    assert recordings.table() == {"grpo": Made("", ["ab"], [], 1.0)}
    (table,) = recordings.folder.iterdir()
    table.write_text(table.read_text()[:20])
    with pytest.raises(RecordingError, match=r"digests.json is no JSON"):
        recordings.replay(RECORDINGS[0])


def test_a_model_is_made_from_the_beginning_after_a_script_that_was_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recordings = Recordings("HEAD", tmp_path)
    recordings.source.mkdir(parents=True)
    script = "import os, sys; os.mkdir(sys.argv[-1]); open(sys.argv[-1] + '/config.json', 'w').close()"
    (recordings.source / "make.py").write_text(script)
    (recordings.models / "teacher.unfinished").mkdir(parents=True)
    monkeypatch.setattr(record, "MODEL_SCRIPTS", {"teacher": ("make.py",)})
    (recording,) = (recording for recording in RECORDINGS if recording.name == "teacher")
    recordings._make_models(recording)
    assert [path.name for path in recordings.models.iterdir()] == ["teacher"]
