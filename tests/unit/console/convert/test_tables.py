"""The tables of options: every field in them exists, and the page says what they say."""

import pytest

from tidemill.services.console.__main__ import main
from tidemill.services.console.check.explain import read_sections
from tidemill.services.console.convert.table import FILES, OptionRow, OptionTable, names_elsewhere, table_of

TABLES = [table_of(project) for project in FILES]
ROWS = [(table, row) for table in TABLES for row in table.rows]
SECTIONS = {section.name: section.fields for section in read_sections()}
KINDS = {field.name: field.kind for fields in SECTIONS.values() for field in fields}


def is_field(target: str) -> bool:
    """Whether our config has a field or section; below a field that takes any mapping all is allowed."""
    above = [
        name for name, kind in KINDS.items() if target.startswith(f"{name}.") and kind.startswith("dict")
    ]
    return target in KINDS or target in SECTIONS or bool(above)


@pytest.mark.parametrize("table, row", ROWS, ids=[f"{table.project} {row.options[0]}" for table, row in ROWS])
def test_a_row_leads_to_fields_that_exist_or_says_why_to_none(table: OptionTable, row: OptionRow) -> None:
    assert [target for target in row.targets if not is_field(target)] == []
    assert row.targets or row.note
    written = [field for ours in row.values.values() if isinstance(ours, dict) for field in ours]
    assert [field for field in written if not is_field(field)] == []
    assert row.computed or row.by or len(row.targets) < 2 or written


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.project)
def test_an_option_has_one_row_for_a_condition(table: OptionTable) -> None:
    names = [(option, row.when) for row in table.rows for option in row.options]
    assert sorted(names) == sorted(set(names))


def test_a_row_with_the_name_goes_before_one_with_a_pattern() -> None:
    verl = TABLES[0]
    for name in ("async_training.partial_rollout", "async_training.other"):
        row = verl.find(name)
        assert row is not None and row.is_automatic, name
    assert verl.find("nothing.like.it") is None


def test_an_unknown_field_in_a_list_of_sources_is_translated_too(tmp_path, monkeypatch, capsys):
    (tmp_path / "c.yaml").write_text("model: {path: m}\ndata: {train: [{name: a, path: p, prompt_key: q}]}\n")
    monkeypatch.setattr("sys.argv", ["tidemill", "check", str(tmp_path / "c.yaml")])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().err
    assert "  data.train.0.prompt_key is data.columns.prompt" in said
    assert "data.train.0.prompt_key: no such field\n" in said


def test_an_unknown_field_that_is_an_option_elsewhere_is_translated(tmp_path, monkeypatch, capsys):
    (tmp_path / "c.yaml").write_text(
        "model: {path: m}\ndata: {train: t, prompt_key: q}\ntrainer: {num_generations: 4, zzz: 1}\n"
        "rollout: {temperature: 0.5}\n"
    )
    monkeypatch.setattr("sys.argv", ["tidemill", "check", str(tmp_path / "c.yaml")])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert "  data.prompt_key is data.columns.prompt (verl's data.prompt_key)" in said
    assert "  trainer.num_generations is trainer.group_size (TRL's num_generations)" in said
    assert "  rollout.temperature is rollout.sampling.temperature (" in said
    assert "rollout.temperature: no such field; did you mean" in said, "a field of this name is no guess"
    assert "zzz is" not in said and "tidemill convert" in said
    assert "trainer.num_generations: no such field\n" in said, "no guess beside the right name"
    assert "trainer.zzz: no such field; fields here: " in said


def test_names_that_nobody_knows_have_no_hint() -> None:
    assert names_elsewhere(["trainer.zzz"]) == names_elsewhere([]) == ""
