"""What is wrong with a ground truth, and not with the code."""

from tidemill.common.errors import RewardError


class TestsError(RewardError):
    """The ground truth holds no tests that can be run."""

    __test__ = False
