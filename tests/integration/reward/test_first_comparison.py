"""What a process has to do before it compares its first mathematical answer."""

import subprocess
import sys


def test_the_first_comparison_of_a_process_does_not_pay_for_building_the_parsers() -> None:
    score = "compute_score('', 'so \\\\boxed{1+x}', 'x+1', limit_s=0.2)"
    program = f"from tidemill.services.reward.builtin.math_equivalence import *; print({score})"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.stdout == "1.0\n", ended.stderr
