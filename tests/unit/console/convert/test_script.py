"""Commands of shell scripts: variables are put in, nothing is run, and what is not known says so."""

import pytest

from tidemill.services.console.convert.reading import Script, Unknown


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ('run a="$HOME/x" \\\n  b=2 # c=3', ["run", "a=~/x", "b=2"]),
        ('n=4\nrun a=$n b=${n} c=\'["x"]\' "$@"', ["run", "a=4", "b=4", 'c=["x"]']),
        ("run a=${N:-8} b=${M:=${N:-2}} c=${HOME:-x}", ["run", "a=8", "b=2", "c=~"]),
        ("D=(a=1 'b=2 3'\n c=4)\nD+=(d=5)\nrun \"${D[@]}\"", ["run", "a=1", "b=2 3", "c=4", "d=5"]),
        ('extra="a=1 b=2"; run $extra', ["run", "a=1", "b=2"]),
        ("n=$((1024 * 2))\nrun a=$n b=$(((n + 1) / 2)) c=$((${n} % 10))", ["run", "a=2048", "b=1024", "c=8"]),
        ("run a='${data.b}' b=$HOME", ["run", "a=${data.b}", "b=~"]),
        ("export n=1\nreadonly m=2\nrun a=$n$m", ["run", "a=12"]),
        ("n=1\nif [ $n = 1 ]; then n=1; fi\nrun a=$n", ["run", "a=1"]),
        ("n+=1; n+=2\nrun a=$n", ["run", "a=12"]),
        (
            '# don\'t "\nn="a # 1" # it\'s\nrun a="#### $n" \\\n  b=\'c # 2\'',
            ["run", "a=#### a # 1", "b=c # 2"],
        ),
        ("cat > x <<'EOF' # it's\ndon't # \"\nEOF\nrun a=1", ["run", "a=1"]),
    ],
)
def test_words_of_the_last_command(script: str, words: list[str]) -> None:
    assert Script({}).read(script)[-1] == words


@pytest.mark.parametrize(
    "script",
    [
        "run a=$N",
        "N=$(nvidia-smi -L | wc -l)\nrun a=$N",
        "N=1\nif [ -e x ]; then\n  N=2\nfi\nrun a=$N",
        'case "$X" in\n  a) N=1 ;;\n  b) N=2 ;;\nesac\nrun a=$N',
        "N=1\n[ -e x ] && N=2\nrun a=$N",
        "if [ -e x ]; then M=2; fi\nN=${M:-1}\nrun a=$N",
        "M=$(date)\nM+=1\nN=$M\nrun a=$N",
        "X=a.b\nN=${X##*.}\nrun a=$N",
        "N=x\nM=$((N * 2))\nN=$M\nrun a=$N",
    ],
)
def test_what_a_condition_or_a_program_sets_is_not_known_unless_it_is_given(script: str) -> None:
    (word,) = Script({}).read(script)[-1][1:]
    assert isinstance(word, Unknown) and word == "a=$N"
    assert Script({"N": "7"}).read(script)[-1] == ["run", "a=7"]


def test_a_quotation_that_does_not_end_is_refused() -> None:
    with pytest.raises(ValueError, match="quotation"):
        Script({}).read("run 'a")
