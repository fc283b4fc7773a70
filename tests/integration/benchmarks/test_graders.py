"""The table of code through a real `tidemill serve-rewards`: each earns the score that it must."""

from collections import Counter

import pytest

from benchmarks.graders.service import score_answers
from benchmarks.graders.table import FAILED, KINDS, read_tables


@pytest.mark.usefixtures("isolated")
def test_every_program_of_the_table_of_code_earns_the_score_that_it_must() -> None:
    (answers,) = read_tables(["code_forms.jsonl"]).values()
    scores = score_answers(answers)
    wrong = [
        (answer.name, answer.kind, answer.expected, score, error)
        for answer, (score, error) in zip(answers, scores, strict=True)
        if score != answer.expected
    ]
    assert not wrong, wrong
    for answer, (score, error) in zip(answers, scores, strict=True):
        assert (score == FAILED) == bool(error), (answer.name, error)


def test_the_table_of_code_has_forty_published_forms_with_right_wrong_and_hostile_code() -> None:
    (answers,) = read_tables(["code_forms.jsonl"]).values()
    kinds = Counter(answer.kind for answer in answers)
    assert all(kinds[kind] >= 40 for kind in KINDS), kinds
    forms = {str(answer.ground_truth) for answer in answers}
    assert len(forms) >= 60
    names = [(answer.name, answer.kind) for answer in answers]
    assert len(set(names)) == len(names)
