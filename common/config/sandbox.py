"""Code that is run to be scored: `reward.rewards.<name>.sandbox`."""

from typing import Literal

from pydantic import Field

from common.config.section import Section


class SandboxConfig(Section):
    """Runs the Python code of a completion against the tests in its ground truth, apart from everything else.

    The ground truth is a map or its JSON: `inputs` and `outputs` (standard input and expected output of each
    case; with `fn_name`, arguments and result of that function), `assert_case` (statements), or `test` (code,
    with `entry_point` a function `check`).
    """

    workers: int = Field(1, ge=0, le=1024)
    """RQ workers that `tidemill up` starts on this machine; each runs one completion at a time."""
    score: Literal["all", "fraction"] = "all"
    """1 only where every test passes, or the share of tests that pass."""
    max_cases: int = Field(64, ge=1, le=10_000)
    """Only the first so many tests count."""
    time_s: float = Field(6.0, gt=0.0, le=3600.0)
    """Longest time for one test, in seconds."""
    cpu_s: float = Field(4.0, gt=0.0, le=3600.0)
    """Processor time of one test, in seconds; rounded up to whole ones."""
    total_s: float = Field(30.0, gt=0.0, le=3600.0)
    """Longest time for all tests of a completion together, in seconds."""
    memory_mb: int = Field(512, ge=32, le=1 << 20)
    """Memory of one test, its child processes included, in MiB."""
    file_mb: int = Field(16, ge=1, le=1 << 16)
    """Largest file, and where the kernel allows it all files together, in MiB."""
    max_processes: int = Field(16, ge=1, le=4096)
    """Processes and threads of one test at once."""
    output_kb: int = Field(256, ge=1, le=1 << 16)
    """Longest output of one test, in KiB."""
    isolation: Literal["prefer", "require"] = "require"
    """`require` runs nothing where the kernel allows no world of its own; `prefer` has only limits there."""
    packages: bool = False
    """Let the code import the packages that are installed beside this project, such as numpy."""
    queue_s: float = Field(300.0, gt=0.0, le=86_400.0)
    """How long a completion may wait for a free worker, in seconds."""
    result_ttl_s: int = Field(3600, ge=60, le=1_000_000)
    """How long results are kept in Redis, in seconds."""
