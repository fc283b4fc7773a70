"""Other processes of a user may not read what a service, a command or a worker holds: passwords, and keys."""

import sys
import tomllib

import pytest

from tests.support.preloaded import ENVIRONMENT, REPO, run_code
from tidemill.services.rollout.engines.vllm_launch import OWNER_VARIABLE

DUMPABLE = "import ctypes; print(ctypes.CDLL(None).prctl(3))"
"""PR_GET_DUMPABLE: 1 where other processes of the user may read this one."""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have other means for that")


def output_of(program: str, **variables: str) -> str:
    """What a program prints."""
    done = run_code(program, ENVIRONMENT | variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_service_is_hidden_from_other_processes_of_its_user_before_it_does_anything():
    program = (
        "import sys; from tidemill.common.process import service; sys.argv[1:] = ['--run', 'x']\n"
        f"async def serve(*_):\n    {DUMPABLE}\n    return 0\n"
        "service._serve = serve\n"
        "sys.exit(service.run_service('reward', ''))"
    )
    assert output_of(program) == "0\n"


@pytest.mark.parametrize(
    ("module", "first", "arguments"),
    [
        ("tidemill.services.reward.sandbox.rq_worker", "redis_url", "'x', '[]'"),
        ("tidemill.services.console.exporter", "configure_logs", "'x'"),
        ("tidemill.services.trainer.policy.fsdp.rank_main", "join_ranks", "os.getppid()"),
        # What any command does first: serve-rewards, rescore and web have the password of Redis.
        ("tidemill.services.console.__main__", "app", ""),
        ("tidemill.services.trainer.weight_server", "argparse.ArgumentParser", ""),
        ("tidemill.services.reward.model_server.__main__", "parse_options", ""),
        ("tidemill.services.trainer.replay.__main__", "argparse.ArgumentParser", ""),
    ],
)
def test_so_are_workers_of_jobs_the_exporter_ranks_commands_and_servers(module, first, arguments):
    program = (
        f"import os, sys; from {module.rpartition('.')[0]} import {module.rpartition('.')[2]} as module\n"
        f"def look(*_, **__):\n    {DUMPABLE}\n    sys.exit(0)\n"
        f"module.{first} = look\nmodule.main({arguments})"
    )
    assert output_of(program) == "0\n"


@pytest.mark.parametrize(("owner", "is_dumpable"), [("1", "0\n"), (None, "1\n")])
def test_vllms_processes_are_hidden_by_its_plugin_and_no_other_vllm(owner, is_dumpable):
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    module, _, function = project["entry-points"]["vllm.general_plugins"]["tidemill"].partition(":")
    program = f"from {module} import {function}; {function}(); {DUMPABLE}"
    variables = {OWNER_VARIABLE: owner} if owner else {}
    assert output_of(program, **variables) == is_dumpable
