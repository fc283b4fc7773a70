"""Run by the interpreter of another grader's environment: answers as JSON from stdin, scores to stdout.

    PYTHON outside_side.py verl|livecodebench

Standard library only, besides the grader. A grader that does not read the form of a ground truth, or that
raises, gives a word in place of a number. Each answer is graded by a process of its own: both graders change
the process that they run in.
"""

import importlib
import importlib.util
import json
import multiprocessing
import re
import sys
from pathlib import Path
from typing import Any

UNREAD = "not read"
FAILED = "failed"
ANSWER_TIMEOUT_S = 120.0
FENCE = re.compile(r"```(?:python|py)?\s*\n(.*?)(?:```|\Z)", re.S)


def code_of(completion: str) -> str:
    blocks = FENCE.findall(completion)
    return str(blocks[-1]) if blocks else completion


def grade_by_verl(answer: "dict[str, Any]") -> Any:
    """verl's `default_compute_score`, as far as it knows the kind of reward."""
    # The folder of its graders by itself: the package imports torch and much else.
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.origin is not None
    sys.path.insert(0, str(Path(spec.origin).parent / "utils" / "reward_score"))
    reward = answer["reward"]
    if "sandbox" in reward:
        truth = answer["inputs_and_outputs"]
        if truth is None:
            return UNREAD
        grader = importlib.import_module("prime_code")
        # `continuous`: without it, a wrong answer ends in an UnboundLocalError.
        success, _ = grader.compute_score(answer["completion"], truth, continuous=True)
        return float(success == 1.0)
    if reward.get("function") == "gsm8k":
        grader = importlib.import_module("gsm8k")
        return float(grader.compute_score(answer["completion"], answer["ground_truth"]))
    if reward.get("function") == "math":
        grader = importlib.import_module("math_reward")
        return float(grader.compute_score(answer["completion"], answer["ground_truth"]))
    return UNREAD


def load_testing_util() -> Any:
    """LiveCodeBench's grader by its file: its package imports data sets and models."""
    spec = importlib.util.find_spec("livecodebench")
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).parent / "evaluation" / "testing_util.py"
    module_spec = importlib.util.spec_from_file_location("testing_util", path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


def grade_by_livecodebench(answer: "dict[str, Any]") -> Any:
    """LiveCodeBench's `run_test`, for inputs and outputs in its form."""
    truth = answer["inputs_and_outputs"]
    if truth is None:
        return UNREAD
    grader = load_testing_util()
    results, _ = grader.run_test(
        {"input_output": json.dumps(truth)}, test=code_of(answer["completion"]), debug=False, timeout=6
    )
    return float(all(result is True for result in results))


GRADERS = {"verl": grade_by_verl, "livecodebench": grade_by_livecodebench}


def grade_into(name: str, answer: "dict[str, Any]", pipe: Any) -> None:
    try:
        score = GRADERS[name](answer)
    except ImportError:
        raise
    except Exception:
        score = FAILED
    pipe.send(score)


def graded(name: str, answer: "dict[str, Any]") -> Any:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=grade_into, args=(name, answer, theirs))
    process.start()
    theirs.close()
    try:
        score = ours.recv() if ours.poll(ANSWER_TIMEOUT_S) else FAILED
    except EOFError:
        score = FAILED
    if process.is_alive():
        process.kill()
    process.join()
    return score


def main() -> int:
    name = sys.argv[1]
    package = "verl" if name == "verl" else "livecodebench"
    if importlib.util.find_spec(package) is None:
        print(f"the package {package} is not installed", file=sys.stderr)
        return 2
    answers = json.load(sys.stdin)
    print(json.dumps([graded(name, answer) for answer in answers]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
