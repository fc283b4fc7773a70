"""What a trace shows of a teacher."""

import numpy as np

from tests.support.sessions import make_segment, make_session
from tests.support.training import make_score
from tests.support.trajectories import make_trajectory
from tidemill.services.console.records.trace import teacher_gaps


def test_a_trace_has_the_distance_of_the_models_tokens_from_the_teacher() -> None:
    teacher = np.array([-0.25, -0.5, -1.0], np.float32)
    gaps = teacher_gaps(make_trajectory(), make_score(0, 0, teacher_logprobs=teacher))
    np.testing.assert_allclose(gaps, [-0.25, 0.0, 0.5])
    session = make_session(0, 0, make_segment((3, 4, 5), (6, 7), (8, 9, 10), (11, 12, 13)))
    of_session = teacher_gaps(session, make_score(0, 0, teacher_logprobs=np.full(5, -3.0, np.float32)))
    np.testing.assert_allclose(of_session, [0.0, -0.01, 0.0, -0.01, -0.02], atol=1e-6)
    assert teacher_gaps(make_trajectory(), make_score(0, 0)) is None
    assert teacher_gaps(session, make_score(0, 0, teacher_logprobs=teacher)) is None
