"""The tables of answers, scored by `tidemill serve-rewards` and by the graders of others.

    python -m benchmarks.graders [--verl PYTHON] [--livecodebench PYTHON] [--table NAME]

PYTHON is the interpreter of a virtual environment that has the package (`verl==0.9.1` or
`nvidia-livecodebench==26.3`, installed by `pip install --no-deps`, and `numpy`). This process imports
neither.

Prints one table, and one line of JSON: how many answers earn the score that they must. Ends with 1 where one
does not.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.graders.outside import NOT_INSTALLED, OutsideGrader
from benchmarks.graders.service import score_answers
from benchmarks.graders.table import TABLES, read_tables
from benchmarks.report import machine, print_result, print_table

SIDES = ("verl", "livecodebench")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.graders")
    parser.add_argument("--verl", type=Path, help="interpreter of an environment with verl")
    parser.add_argument("--livecodebench", type=Path, help="interpreter of an environment with LiveCodeBench")
    parser.add_argument("--table", choices=[Path(name).stem for name in TABLES], help="only this table")
    options = parser.parse_args()
    names = [f"{options.table}.jsonl"] if options.table else TABLES
    answers = [answer for table in read_tables(names).values() for answer in table]
    scores = score_answers(answers)
    graders = [OutsideGrader(name, getattr(options, name)) for name in SIDES]
    others = {grader.name: grader.score(answers) for grader in graders}
    rows = []
    wrong = []
    for number, answer in enumerate(answers):
        score, error = scores[number]
        is_right = score == answer.expected
        if not is_right:
            wrong.append({"name": answer.name, "expected": answer.expected, "got": score, "error": error})
        beside = [others[name][number] for name in SIDES]
        rows.append(
            [answer.name, answer.kind, answer.expected, score, *beside, "" if is_right else "differs"]
        )
    columns = f"answer,kind,expected,tidemill,{','.join(SIDES)},"
    print_table("Scores of answers", columns, rows, machine())
    result: dict[str, object] = {"answers": len(answers), "as_expected": len(answers) - len(wrong)}
    for name in SIDES:
        values = others[name]
        judged = [number for number, value in enumerate(values) if isinstance(value, float)]
        same = [number for number in judged if values[number] == answers[number].expected]
        result[name] = {"judged": len(judged), "as_expected": len(same)} if judged else NOT_INSTALLED
    print_result(result | {"wrong": wrong})
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
