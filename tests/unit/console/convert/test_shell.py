"""Shell scripts are read, not run."""

import pytest

from tidemill.common.errors import ConfigError
from tidemill.services.console.convert.shell import read_commands


def last(text: str, **variables: str) -> list[str]:
    return read_commands(text, variables)[-1]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("$X", ["one", "two"]),
        ('"$X"', ["one two"]),
        ("'$X'", ["$X"]),
        ("${Y:-other}", ["other"]),
        ("${X:+set}", ["set"]),
        ("${Y:+set}", []),
        ("${E-default}", []),
        ("a.b=$((1024 * 2 + N))", ["a.b=2051"]),
        ("a.b=$(((512*100)))", ["a.b=51200"]),
        ("${P##*/}", ["c.txt"]),
        ("${P%.txt}", ["/a/b/c"]),
        ('"${A[@]}"', ["x", "y z"]),
        ("${A[1]}", ["y", "z"]),
        ("${#A[@]}", ["2"]),
        ('a=\'["console","wandb"]\'', ['a=["console","wandb"]']),
        ("a=['console','b']", ["a=[console,b]"]),
        ("$(date +%s)", []),
        ("$(echo hello)", ["hello"]),
        ("$(nvidia-smi && echo gpu || echo cpu)", ["cpu"]),
        ("a\\ b", ["a b"]),
        ("${M:-$HOME/${X%% *}}", ["~/one"]),
    ],
)
def test_words_expand_as_in_a_shell(word: str, expected: list[str]) -> None:
    text = f"X='one two'\nE=\nN=3\nP=/a/b/c.txt\nA=(x 'y z')\nprogram {word} end"
    assert last(text, HOME="~") == ["program", *expected, "end"]


def test_lines_go_on_comments_and_here_documents_do_not() -> None:
    text = "# run a=1\ncat <<EOF\nrun b=2\nEOF\nrun c=3 \\\n  d=4 # e=5\n"
    assert read_commands(text, {}) == [["cat"], ["run", "c=3", "d=4"]]


@pytest.mark.parametrize(("device", "expected"), [("gpu", "2"), ("npu", "8"), ("tpu", "0")])
def test_case_takes_the_first_branch_that_fits(device: str, expected: str) -> None:
    text = 'case "$DEVICE" in gpu) tp=2 ;; n*|other) tp=8;; *) tp=0 ;; esac\nrun $tp'
    assert last(text, DEVICE=device) == ["run", expected]


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ('[ "$A" = one ]', "yes"),
        ('[[ $A == o* && -z "$B" ]]', "yes"),
        ('[ "$A" != one ] || [ -n "$A" ]', "yes"),
        ("[ $N -gt 4 ]", "no"),
        ("! [ $N -gt 4 ]", "yes"),
        ("command -v nvidia-smi", "no"),
    ],
)
def test_if_follows_its_condition(condition: str, expected: str) -> None:
    text = f"if {condition}; then x=yes; elif false; then x=never; else x=no; fi; run $x"
    assert last(text, A="one", N="4") == ["run", expected]


def test_arrays_grow_and_functions_and_loops_are_passed_over() -> None:
    text = 'f() { A=(wrong); }\nA=(a)\nfor i in 1 2; do A=(wrong); done\nA+=(b=$N "c d")\nrun "${A[@]}" $@'
    assert last(text, N="1") == ["run", "a", "b=1", "c d"]


def test_what_a_variable_was_set_to_wins_over_the_default_of_the_script() -> None:
    assert last("B=${B:-1024}\nrun $B", B="8") == ["run", "8"]


@pytest.mark.parametrize("text", ["run 'a", "X=(a b", "if true; then run"])
def test_a_script_that_does_not_end_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        read_commands(text, {})
