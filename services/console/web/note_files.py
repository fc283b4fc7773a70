"""Notes and bookmarks of a run, each in a file of its own in the run's folder.

Guarantees: a note is whole or absent, whoever writes beside us; it goes where the folder goes (copies,
archives, backups). What others may have put into the folder is checked when it is read: a place that is no
page of the run is not shown.
"""

import contextlib
import json
import os
import re
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tidemill.common.files import storage_errors, write_atomically

NOTES_FOLDER = "notes"
"""Below a run's folder."""
MAX_NOTES = 1000
"""Of one run that are read, the newest."""
MAX_NOTE_CHARACTERS = 4000
MAX_FILE_BYTES = 64 << 10
NOTE_ID = re.compile(r"\d{13,16}-[0-9a-f]{8}")
PLACE = re.compile(
    r"(?:|(?:eval-)?groups(?:/\d{1,12})?|steps(?:/\d{1,12})?|dead(?:/[\d-]{1,40})?|config|logs(?:/[\w.-]{1,100})?|notes)"
    r"(?:\?[\w.~%+=&:,-]{0,600})?(?:#[\w.-]{0,60})?"
)
"""Pages of a run, with their selection: relative to the run's own address, never elsewhere."""


@dataclass(frozen=True, slots=True)
class Note:
    """What somebody wants to find again."""

    note_id: str
    place: str
    """The page, such as `groups/12?colour=advantage#c3`."""
    text: str
    """Empty for a bookmark."""
    at: float

    @property
    def path(self) -> str:
        """The page without its selection."""
        return re.split(r"[?#]", self.place, maxsplit=1)[0]

    @property
    def title(self) -> str:
        """The page in words, with the completion that is meant."""
        kind, _, rest = self.path.partition("/")
        names = {"": "Overview", "groups": "Group", "eval-groups": "Evaluation group", "steps": "Step"}
        name = names.get(kind, "Log" if kind == "logs" and rest else kind.capitalize())
        sample = re.search(r"#c(\d+)$", self.place)
        return f"{name}{'s' if name in ('Group', 'Step') and not rest else ''} {rest}".strip() + (
            f", completion {sample[1]}" if sample else ""
        )


def place_of(path: str, run_id: str) -> str:
    """The place of an address's path."""
    return path.removeprefix(f"/run/{run_id}").strip("/")


def can_write(run_dir: Path) -> bool:
    """Whether notes can be kept there."""
    folder = run_dir / NOTES_FOLDER
    return os.access(folder if folder.is_dir() else run_dir, os.W_OK)


def read_notes(run_dir: Path) -> list[Note]:
    """All notes, the newest first; what is none is passed over."""
    try:
        names = [
            name
            for name in os.listdir(run_dir / NOTES_FOLDER)
            if NOTE_ID.fullmatch(name.removesuffix(".json"))
        ]
    except OSError:
        return []
    found = (_read(run_dir / NOTES_FOLDER / name) for name in sorted(names, reverse=True)[:MAX_NOTES])
    return [note for note in found if note is not None]


def _read(path: Path) -> Note | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        if path.is_symlink() or path.stat().st_size > MAX_FILE_BYTES:
            return None
        tree = json.loads(path.read_bytes())
        note = Note(path.stem, str(tree["place"]), str(tree["text"])[:MAX_NOTE_CHARACTERS], float(tree["at"]))
        return note if PLACE.fullmatch(note.place) else None
    return None


def add_note(run_dir: Path, place: str, text: str) -> Note:
    """Write one.

    Raises:
        ValueError: the place is no page of a run, or the text is too long.
        StorageError: it cannot be written.
    """
    text = text.replace("\r\n", "\n").strip()
    if not PLACE.fullmatch(place):
        raise ValueError("A note belongs to a page of the run, such as groups/12 or steps/3.")
    if len(text) > MAX_NOTE_CHARACTERS:
        raise ValueError(f"A note has at most {MAX_NOTE_CHARACTERS} characters; this one has {len(text)}.")
    at = time.time()
    note = Note(f"{int(at * 1000)}-{secrets.token_hex(4)}", place, text, at)
    folder = run_dir / NOTES_FOLDER
    with storage_errors("a note", folder):
        folder.mkdir(exist_ok=True)
    write_atomically(folder / f"{note.note_id}.json", json.dumps(asdict(note), ensure_ascii=False))
    return note


def remove_note(run_dir: Path, note_id: str) -> None:
    """Remove one; nothing where it is gone already.

    Raises:
        ValueError: that is no note's id.
        StorageError: it cannot be removed.
    """
    if not NOTE_ID.fullmatch(note_id):
        raise ValueError("There is no note of this id.")
    path = run_dir / NOTES_FOLDER / f"{note_id}.json"
    with storage_errors("a note", path):
        path.unlink(missing_ok=True)
