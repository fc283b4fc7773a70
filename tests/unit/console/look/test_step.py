"""A step, as `tidemill step` shows it."""

from tests.support.histories import BEGIN, commits, manifests
from tests.support.trajectories import make_trajectory
from tidemill.common.streams import Entry
from tidemill.common.wire.messages import FIRST_DEMONSTRATION, Commit, Lane
from tidemill.services.console.look.joins import GroupRecord, SampleFacts, SampleRecord, StepRecord
from tidemill.services.console.look.step import step_tree
from tidemill.services.console.look.streams import row_of
from tidemill.services.console.look.trace import group_tree
from tidemill.services.console.text.formats import NOTHING
from tidemill.services.console.text.tree import Node, table


def facts(ticket: int, index: int, scored_at: float) -> SampleFacts:
    worker = "rollout-0" if scored_at else "trainer"
    return SampleFacts((ticket, index), 4, 3, (1, 1), worker, 0.0, 0.0, BEGIN + 10, scored_at=scored_at)


def one_group_without_scores() -> StepRecord:
    """The second step of the small run, of whose ticket 3 no score is there, as of a demonstration."""
    samples = [facts(3, 0, 0.0), facts(4, 0, BEGIN + 8), facts(4, 1, BEGIN + 12)]
    return StepRecord(commits()[1], {sample.key: sample for sample in samples}, manifests()[2])


def child(tree: Node, label: str) -> Node:
    return next(node for node in tree.children if node.label.startswith(label))


def time_lines(record: StepRecord) -> dict[str, str]:
    return {node.label: str(node.value) for node in child(step_tree(record), "where the time went").children}


def group_rows(record: StepRecord) -> list[Node]:
    return [row for node in child(step_tree(record), "what went in").children for row in node.children]


def complete_times(record: StepRecord) -> list[str]:
    cells = [cell for row in group_rows(record) for cell in row.children]
    return [str(cell.value) for cell in cells if cell.label == "complete"]


def test_what_has_no_score_has_no_time_at_which_it_was_complete() -> None:
    record = one_group_without_scores()
    assert complete_times(record) == [NOTHING, "2.0 s after"]
    lines = time_lines(record)
    assert lines["ready"] == "0 of 1 groups with scores were complete when the step began"
    assert lines["last to come"].startswith("4.1, 2.0 s after the step began")


def test_a_step_without_scores_says_nothing_of_them_and_still_when_its_weights_came() -> None:
    record = one_group_without_scores()
    record.samples = {(3, 0): record.samples[3, 0]}
    assert complete_times(record) == [NOTHING, NOTHING]
    lines = time_lines(record)
    assert not lines.keys() & {"ready", "last to come"}
    assert lines["weights"] == "announced 300 ms after the commit"


def test_no_version_is_said_to_have_generated_a_demonstration() -> None:
    """Its trajectory has spans, whose version is a placeholder, and no times."""
    ticket = FIRST_DEMONSTRATION + 7
    trajectory = make_trajectory(ticket, 0, worker="trainer", spans=((1, 0),))
    record = one_group_without_scores()
    record.samples |= {(ticket, 0): facts(ticket, 0, 0.0)}
    record.commit = record.commit.model_copy(update={"groups": (ticket, 4)})
    group = GroupRecord(ticket, Lane.TRAIN, samples=[SampleRecord(0, trajectory)])
    tables = {
        "step": group_rows(record),
        "trace": group_tree(group).children[-1].children,
        "streams": table([row_of(Entry("1-0", trajectory))]).children,
    }
    for name, rows in tables.items():
        cells = {cell.label: cell.value for cell in rows[0].children}
        assert not cells.get("versions") and not cells.get("version"), name
        assert cells.get("took") is None, name


def test_a_commit_without_times_has_no_times_relative_to_its_beginning() -> None:
    """As an older release wrote it."""
    record = one_group_without_scores()
    untimed: Commit = record.commit.model_copy(update={"started_at": 0.0, "finished_at": 0.0})
    record.commit = untimed
    assert complete_times(record) == [NOTHING, NOTHING]
    assert not time_lines(record).keys() & {"ready", "last to come", "weights"}
