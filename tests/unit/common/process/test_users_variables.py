"""What users' code gets of a service: the variables that describe the machine, and nothing that is secret."""

import os
import subprocess
import sys
import tomllib

import pytest

from tests.support.preloaded import REPO
from tidemill.common.process.children import PASS_VARIABLE, variables_for_users
from tidemill.services.rollout.engines.vllm_launch import OWNER_VARIABLE

DUMPABLE = "import ctypes; print(ctypes.CDLL(None).prctl(3))"
"""PR_GET_DUMPABLE: 1 where other processes of the user may read this one."""
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems have other means for that")
OF_THE_MACHINE = ("PATH", "HOME", "LC_ALL", "https_proxy", "CUDA_VISIBLE_DEVICES", "HF_HOME", "JAVA_HOME")
OF_THE_MACHINE += ("LD_LIBRARY_PATH", "TIDEMILL_RUNS_DIR", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS")
SECRET = ("HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "DATABASE_URL", "WANDB_API_KEY")
SECRET += ("DOCKER_AUTH_CONFIG", "TIDEMILL_MODEL_TOKEN", "TIDEMILL_REDIS_URL", "TIDEMILL_REDIS_PASSWORD")
SECRET += ("TIDEMILL_WEIGHTS_TOKEN",)


def test_what_describes_the_machine_is_handed_on_and_what_may_be_secret_is_not(monkeypatch):
    for name in OF_THE_MACHINE + SECRET:
        monkeypatch.setenv(name, "x")
    given = variables_for_users()
    assert set(OF_THE_MACHINE) <= given.keys() and not set(SECRET) & given.keys()


def test_a_key_that_the_machine_names_is_handed_on_but_never_what_leads_to_redis(monkeypatch):
    for name in ("SERPER_API_KEY", "MY_URL", "HF_TOKEN", "TIDEMILL_REDIS_URL"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv(PASS_VARIABLE, "SERPER_API_KEY, MY_*,TIDEMILL_*")
    given = variables_for_users()
    assert {"SERPER_API_KEY", "MY_URL"} <= given.keys()
    assert not {"HF_TOKEN", "TIDEMILL_REDIS_URL"} & given.keys()


@on_linux
def test_a_service_is_hidden_from_other_processes_of_its_user_before_it_does_anything():
    program = (
        "import sys; from tidemill.common.process import service; sys.argv[1:] = ['--run', 'x']\n"
        f"async def serve(*_):\n    {DUMPABLE}\n    return 0\n"
        "service._serve = serve\n"
        "sys.exit(service.run_service('reward', ''))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"


@on_linux
@pytest.mark.parametrize(
    ("module", "first", "arguments"),
    [
        ("tidemill.services.jobs.sandbox.rq_worker", "redis_url", "'x', '[]'"),
        ("tidemill.services.console.exporter.__main__", "configure_logs", "'x'"),
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
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"


@on_linux
@pytest.mark.parametrize(("owner", "is_dumpable"), [("1", "0\n"), (None, "1\n")])
def test_vllms_processes_are_hidden_by_its_plugin_and_no_other_vllm(owner, is_dumpable):
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    module, _, function = project["entry-points"]["vllm.general_plugins"]["tidemill"].partition(":")
    program = f"from {module} import {function}; {function}(); {DUMPABLE}"
    # A test beside this one may have started vLLM, which sets it.
    variables = {name: value for name, value in os.environ.items() if name != OWNER_VARIABLE}
    variables |= {OWNER_VARIABLE: owner} if owner else {}
    done = subprocess.run(
        [sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True
    )
    assert done.stdout == is_dumpable
