"""The record of one sample, as `tidemill trace` shows it."""

from collections.abc import Iterable

from tests.support.recorded_sessions import as_session
from tests.support.trajectories import make_trajectory
from tests.support.vision import file_of, image_of, noise
from tidemill.common.wire.messages import Lane
from tidemill.services.console.look.joins import GroupRecord, SampleRecord
from tidemill.services.console.look.trace import group_tree
from tidemill.services.console.text.tree import Node

OF_PROMPT = image_of(file_of(noise(56, 40, 0)), 1, 2)
LATER = image_of(file_of(noise(30, 20, 1)), 10, 2)
AGAIN = OF_PROMPT.model_copy(update={"segment": 1})
"""A fork has the prompt's picture, too, and another one behind it."""
OF_FORK = image_of(file_of(noise(8, 8, 2)), 4, 1).model_copy(update={"segment": 1})


def pictures_in(tree: Node) -> list[tuple[str, str, str]]:
    """Label, text and link of each line about a picture."""

    def walk(nodes: Iterable[Node]) -> Iterable[Node]:
        for node in nodes:
            yield node
            yield from walk(node.children)

    return [
        (node.label, str(node.value), node.link) for node in walk([tree]) if node.label.startswith("picture ")
    ]


def test_a_sessions_pictures_of_later_turns_are_named_once_beside_those_of_its_prompt() -> None:
    images = (OF_PROMPT, LATER, AGAIN, OF_FORK)
    trajectory = as_session(make_trajectory(6, 0)).model_copy(update={"images": images})
    group = GroupRecord(6, Lane.TRAIN, samples=[SampleRecord(0, trajectory)])
    expected = []
    for number, image, text in (
        (1, OF_PROMPT, "56 x 40, tokens 1 to 2"),
        (2, LATER, "30 x 20, tokens 10 to 11"),
        (4, OF_FORK, "8 x 8, fork 1, tokens 4 to 4"),
    ):
        file = f"{image.digest}.png"
        expected.append((f"picture {number}", f"{text}, images/{file}", f"groups/6/pictures/{file}"))
    assert pictures_in(group_tree(group, group.samples[0])) == expected
    assert pictures_in(group_tree(group)) == expected[:1]
