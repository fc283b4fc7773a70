"""The table of families in docs/models.md is what tiny models of them do here."""

from tests import families_table


def test_the_table_of_families_is_current(capsys):
    code = families_table.main(["--check"])
    assert code == 0, capsys.readouterr().out
