"""The Python API without a run: tables, configs, callbacks, and what an import costs."""

import asyncio
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

import tidemill
from infra.docs.api_page import ORDER, as_markdown
from tests.support.runs import simulated_config
from tidemill.services.console.api.history import Records, wait_for
from tidemill.services.console.api.running import CallbackView
from tidemill.services.console.look.snapshot import RunSnapshot, StepPoint
from tidemill.services.console.up.local_run import LocalRun


def test_an_import_imports_nothing_and_every_name_can_be_had() -> None:
    program = "import sys; n = len(sys.modules); import tidemill; print(len(sys.modules) - n)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 10
    assert all(getattr(tidemill, name) is not None for name in dir(tidemill))
    with pytest.raises(AttributeError, match="no attribute 'runn'"):
        _ = tidemill.runn  # type: ignore[attr-defined]


def test_records_are_a_list_rows_and_tables() -> None:
    records = Records(
        [1, 2, 3], lambda n: {"n": n, "mixed": "a" if n == 1 else n} | ({"late": 1.5} if n == 3 else {})
    )
    assert (len(records), records[1], list(records[1:])) == (3, 2, [2, 3])
    assert records.rows()[2] == {"n": 3, "mixed": 3, "late": 1.5}
    table = records.to_arrow()
    assert table.column("late").to_pylist() == [None, None, 1.5]
    assert table.column("mixed").to_pylist() == ['"a"', "2", "3"]
    assert Records([], dict[str, Any]).to_arrow().num_rows == 0
    pandas = pytest.importorskip("pandas")
    assert isinstance(records.to_pandas(), pandas.DataFrame) and list(records.to_pandas()["n"]) == [1, 2, 3]


def test_a_config_is_a_file_a_tree_or_itself_and_overrides_are_words_or_values(tmp_path: Path) -> None:
    config = simulated_config(tmp_path)
    tree = config.model_dump(mode="json")
    (tmp_path / "run.yaml").write_text(json.dumps(tree))
    for source in (tmp_path / "run.yaml", str(tmp_path / "run.yaml"), tree, config):
        for overrides in ({"trainer.steps": 7, "model.dtype": "float32"}, ["trainer.steps=7"]):
            assert tidemill.load_config(source, overrides).trainer.steps == 7
    with pytest.raises(tidemill.ConfigError, match="stepps"):
        tidemill.load_config(tree, {"trainer.stepps": 7})


def test_a_coroutine_is_waited_for_also_where_a_loop_runs() -> None:
    async def answer() -> int:
        return 42

    async def inside() -> int:
        return wait_for(answer)

    assert wait_for(answer) == asyncio.run(inside()) == 42


def test_callbacks_get_each_record_once_and_false_stops_the_run_once() -> None:
    seen: list[tuple[str, int]] = []
    stops: list[bool] = []

    def on_step(record: dict[str, Any]) -> bool:
        seen.append((record["kind"], record["step"]))
        assert (record["loss"], record["reward"]) == (None, record["step"] / 10), "as JSON has it"
        return bool(record["step"] < 3)

    def on_evaluation(record: dict[str, Any]) -> None:
        seen.append((record["kind"], record["version"]))

    view = CallbackView(Console(quiet=True), {"step": on_step, "evaluation": on_evaluation})
    view.run = cast(LocalRun, SimpleNamespace(stop=lambda: stops.append(True)))
    evaluation = {"kind": "evaluation", "version": 2, "set": "a", "score": 1.0}

    def show(num_steps: int, *evaluations: dict[str, Any]) -> None:
        points = [StepPoint(step, {"reward": step / 10, "loss": math.nan}) for step in range(num_steps)]
        state = {"evaluations": list(evaluations)}
        view.show(RunSnapshot("r", 9, 1, state=state, points=points), {}, 0.0)

    show(1)  # step 0 was done before it was resumed
    show(2)
    show(3, evaluation)
    show(5, evaluation)
    show(6, evaluation)
    assert seen == [("step", 1), ("evaluation", 2), ("step", 2), ("step", 3)] and stops == [True]


def test_every_name_is_on_the_page() -> None:
    page = as_markdown()
    assert set(tidemill.__all__) - set(ORDER) == {"ConfigError", "TidemillError", "RunConfig"}
    assert all(f"`{name}`" in page or f"## {name}" in page for name in tidemill.__all__)
