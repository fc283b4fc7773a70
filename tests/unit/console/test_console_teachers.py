"""What the console says of teachers: another tokenizer is found before the run; a trace shows distances."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.sessions import make_segment, make_session
from tests.support.training import make_score
from tests.support.trajectories import make_config, make_trajectory
from tidemill.common.config import RunConfig
from tidemill.common.errors import ConfigError
from tidemill.services.console.check.model_folder import check_teachers
from tidemill.services.console.records.trace import teacher_gaps

OWN = {"a": 0, "b": 1}


def folder_of(path: Path, vocabulary: dict[str, int], special: int = 2) -> str:
    path.mkdir()
    tree = {"model": {"vocab": vocabulary}, "added_tokens": [{"content": "<eos>", "id": special}]}
    (path / "tokenizer.json").write_text(json.dumps(tree))
    return str(path)


def config_of(policy: str, teacher: str, **local: Any) -> RunConfig:
    return make_config(
        model={"path": policy},
        reward={"rewards": {"wise": {"teacher": {"servers": "wise"}}}},
        servers={"wise": {"model": teacher, "local": {"count": 2, **local}}},
    )


def test_a_teacher_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    policy = folder_of(tmp_path / "policy", OWN)
    check_teachers(config_of(policy, folder_of(tmp_path / "same", OWN)))
    check_teachers(config_of(policy, folder_of(tmp_path / "more", OWN | {"c": 3})))
    check_teachers(config_of(policy, "owner/on-the-hub"))
    for name, vocabulary, special, said in (
        ("other", {"a": 1, "b": 0}, 2, "token 'a' is 0 in the policy's and is 1"),
        ("fewer", {"a": 0}, 2, "token 'b' is 1 in the policy's and does not exist"),
        ("eos", OWN, 5, "token '<eos>' is 2 in the policy's and is 5"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_teachers(config_of(policy, folder_of(tmp_path / name, vocabulary, special)))


def test_a_trace_has_the_distance_of_the_models_tokens_from_the_teacher() -> None:
    teacher = np.array([-0.25, -0.5, -1.0], np.float32)
    gaps = teacher_gaps(make_trajectory(), make_score(0, 0, teacher_logprobs=teacher))
    np.testing.assert_allclose(gaps, [-0.25, 0.0, 0.5])
    session = make_session(0, 0, make_segment((3, 4, 5), (6, 7), (8, 9, 10), (11, 12, 13)))
    of_session = teacher_gaps(session, make_score(0, 0, teacher_logprobs=np.full(5, -3.0, np.float32)))
    np.testing.assert_allclose(of_session, [0.0, -0.01, 0.0, -0.01, -0.02], atol=1e-6)
    assert teacher_gaps(make_trajectory(), make_score(0, 0)) is None
    assert teacher_gaps(session, make_score(0, 0, teacher_logprobs=teacher)) is None
