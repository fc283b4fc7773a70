"""Notes and bookmarks: in the run's folder, whole or absent, written by who has the token, shown as text."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.support.web_runs import SCRIPT, write_folder
from tidemill.common.wire.keys import Keys
from tidemill.services.console.web.access import Access
from tidemill.services.console.web.catalog import Catalog
from tidemill.services.console.web.note_files import NOTES_FOLDER, add_note, place_of, read_notes, remove_note
from tidemill.services.console.web.server import create_app

TOKEN = "a fixed token of a test"


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TestClient, Access]]:
    """A client that holds the cookie, and a run `r` of which only the folder is there."""
    monkeypatch.delenv("TIDEMILL_REDIS_URL", raising=False)
    write_folder(tmp_path, Keys("r"))
    access = Access.of("127.0.0.1", 80, fixed_token=TOKEN)
    app = create_app(Catalog(tmp_path), access)
    with TestClient(app, base_url="http://127.0.0.1", follow_redirects=False) as client:
        client.cookies.set(access.cookie_name, access.cookie_value)
        yield client, access


def test_notes_are_files_of_the_run_and_come_back_newest_first(tmp_path: Path) -> None:
    first = add_note(tmp_path, "groups/12?colour=advantage&at=3#c4", "look\r\nhere ")
    second = add_note(tmp_path, "", "")
    found = read_notes(tmp_path)
    assert {note.note_id for note in found} == {first.note_id, second.note_id}
    kept = next(note for note in found if note.text)
    assert kept == first and kept.text == "look\nhere" and kept.path == "groups/12"
    assert kept.title == "Group 12, completion 4" and second.title == "Overview"
    assert not list((tmp_path / NOTES_FOLDER).glob(".*")), "nothing half-written is left"
    remove_note(tmp_path, first.note_id)
    remove_note(tmp_path, first.note_id)
    assert [note.note_id for note in read_notes(tmp_path)] == [second.note_id]
    assert place_of("/run/r/groups/12", "r") == "groups/12" and place_of("/run/r", "r") == ""


@pytest.mark.parametrize(
    "place",
    [
        "//evil.example",
        "javascript:alert(1)",
        "../other",
        "groups/1#<b>",
        "groups/1\n",
        "weights/3",
        "x" * 900,
    ],
)
def test_a_note_belongs_to_a_page_of_its_run(tmp_path: Path, place: str) -> None:
    with pytest.raises(ValueError, match="belongs to a page"):
        add_note(tmp_path, place, "")


def test_what_others_put_into_the_folder_is_checked(tmp_path: Path) -> None:
    good = add_note(tmp_path, "steps/3", "kept")
    folder = tmp_path / NOTES_FOLDER
    bad = {"place": "//evil.example", "text": "", "at": 1}
    for number, content in enumerate(
        (json.dumps(bad), "[]", "{", json.dumps({**bad, "place": "", "at": "x"}))
    ):
        (folder / f"170000000000{number}-0123456{number}.json").write_text(content)
    (folder / "1700000000009-01234567.json").symlink_to("/etc/passwd")
    (folder / "readme.json").write_text(json.dumps({**bad, "place": ""}))
    assert read_notes(tmp_path) == [good]
    for name in ("../../config.yaml", "readme", ""):
        with pytest.raises(ValueError, match="no note of this id"):
            remove_note(tmp_path, name)


def test_who_has_the_token_writes_and_hostile_text_stays_text(pages: tuple[TestClient, Access]) -> None:
    client, access = pages
    form = {"key": access.form_key, "place": "notes?text=a#c1", "text": f"{SCRIPT} \u202e"}
    answer = client.post("/run/r/notes", data=form, headers={"origin": "null"})
    assert answer.status_code == 303 and answer.headers["location"] == "/run/r/notes?text=a#c1"
    page = client.get("/run/r/notes").text
    assert "<script>" not in page and "<img src=x" not in page and "&lt;script&gt;window.hacked" in page
    assert "\u202e" not in page and '<span class="ctl">U+202E</span>' in page
    (note,) = client.get("/run/r/notes.json").json()
    assert note["text"].startswith(SCRIPT)
    gone = client.post("/run/r/notes/remove", data={"key": access.form_key, "id": note["id"]})
    assert gone.headers["location"] == "/run/r/notes" and client.get("/run/r/notes.json").json() == []


def test_a_program_writes_with_the_token_alone(pages: tuple[TestClient, Access]) -> None:
    client, _ = pages
    client.cookies.clear()
    named = {"authorization": f"Bearer {TOKEN}"}
    assert client.post("/run/r/notes", data={"place": "steps/1"}, headers=named).status_code == 303
    assert client.get("/run/r/notes.json", headers=named).json()[0]["place"] == "steps/1"
    assert client.get("/run/r/notes.json", headers={"authorization": "Bearer other"}).status_code == 401


def test_nobody_else_writes(pages: tuple[TestClient, Access], tmp_path: Path) -> None:
    client, access = pages
    good = {"key": access.form_key, "place": "", "text": "x"}
    elsewhere = [
        {"origin": "http://evil.example"},
        {"sec-fetch-site": "same-site"},
        {"origin": "http://127.0.0.1:3"},
    ]
    for headers in elsewhere:
        assert client.post("/run/r/notes", data=good, headers=headers).status_code == 403, headers
    assert client.post("/run/r/notes", data={**good, "key": "guessed"}).status_code == 403
    assert client.post("/run/r/notes", data={**good, "place": "//evil.example"}).status_code == 400
    assert client.post("/run/r/notes", data={**good, "text": "x" * 70_000}).status_code == 413
    assert client.post("/run/none/notes", data=good).status_code == 404
    assert client.post("/run/r/groups", data=good).status_code == 405
    client.cookies.clear()
    assert client.post(f"/run/r/notes?token={TOKEN}", data=good).status_code == 401
    assert not (tmp_path / "r" / NOTES_FOLDER).exists()
    with TestClient(
        create_app(Catalog(tmp_path), Access.of("127.0.0.1", 80)), base_url="http://127.0.0.1"
    ) as open_one:
        assert open_one.post("/run/r/notes", data={**good, "key": ""}).status_code == 405
        assert "<textarea" not in open_one.get("/run/r/notes").text
