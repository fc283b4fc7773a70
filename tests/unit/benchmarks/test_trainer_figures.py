"""The benchmark of the trainer: what its last line is made of."""

import json

from benchmarks import trainer
from benchmarks.trainer_sides import CASES, SHARED


def test_the_result_has_the_ratios_to_trl_and_to_the_bare_loop(monkeypatch, capsys):
    ratios = {case: 1.0 + number / 10 for number, case in enumerate((*CASES, *SHARED))}
    monkeypatch.setattr(trainer, "compare_with_trl", lambda threads, note: {"ratio_equal": 1.5})
    monkeypatch.setattr(
        trainer,
        "measure",
        lambda side, case, steps, threads: {"tokens": 100, "step_s": [2.0, 1.0], "ratio": ratios[case]},
    )
    trainer.main(threads=1)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    of_shared = {f"tree_{case}": ratios[case] for case in SHARED}
    assert result == {"ratio_equal": 1.5, "ratio_to_bare": 1.0, **of_shared}
