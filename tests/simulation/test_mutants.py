"""Some of the planted bugs are seen; all of them fit the source (`make mutants` runs the others)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulation.known import KNOWN
from tests.simulation.mutants import ROOT, Mutant, PlantError, copied_tree, edited, examine
from tests.simulation.planted import FEW, PLANTED
from tests.simulation.reverted import REVERTED

NUM_SCHEDULES = 60


@pytest.fixture(scope="module")
def tree() -> Iterator[Path]:
    with copied_tree(ROOT) as folder:
        yield folder


@pytest.mark.parametrize("name", FEW)
def test_a_planted_bug_is_seen(tree: Path, name: str) -> None:
    (mutant,) = [mutant for mutant in PLANTED if mutant.name == name]
    outcome = examine(mutant, tree, NUM_SCHEDULES)
    assert outcome.problem and 0 < outcome.num_schedules <= NUM_SCHEDULES, outcome


def test_every_planted_bug_fits_the_source_and_stands_once() -> None:
    planted = (*PLANTED, *REVERTED)
    assert all(edited(mutant, ROOT) for mutant in planted)
    assert len({mutant.name for mutant in planted}) == len(planted)
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in planted}) == len(planted)
    assert {mutant.kept for mutant in planted} - {""} <= KNOWN.keys()


def test_a_bug_whose_text_is_gone_is_an_error() -> None:
    with pytest.raises(PlantError):
        edited(Mutant("nothing", "common/streams/consumer.py", "this text is nowhere", ""), ROOT)
