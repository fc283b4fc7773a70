"""What users' code gets of a service: the variables that describe the machine, and nothing that is secret."""

from tidemill.common.process.children import PASS_VARIABLE, variables_for_users

OF_THE_MACHINE = ("PATH", "HOME", "LC_ALL", "https_proxy", "CUDA_VISIBLE_DEVICES", "HF_HOME", "JAVA_HOME")
OF_THE_MACHINE += ("LD_LIBRARY_PATH", "TIDEMILL_RUNS_DIR", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS")
OF_THE_MACHINE += ("DOCKER_HOST", "CONTAINER_HOST", "CONTAINERS_CONF", "CONTAINERS_STORAGE_CONF")
SECRET = ("HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "DATABASE_URL", "WANDB_API_KEY")
SECRET += ("DOCKER_AUTH_CONFIG", "TIDEMILL_MODEL_TOKEN", "TIDEMILL_REDIS_URL", "TIDEMILL_REDIS_PASSWORD")
SECRET += ("TIDEMILL_WEIGHTS_TOKEN", "CONTAINER_SSHKEY")


def test_what_describes_the_machine_is_handed_on_and_what_may_be_secret_is_not(monkeypatch):
    for name in OF_THE_MACHINE + SECRET:
        monkeypatch.setenv(name, "x")
    variables = variables_for_users()
    assert set(OF_THE_MACHINE) <= variables.keys() and not set(SECRET) & variables.keys()


def test_a_key_that_the_machine_names_is_handed_on_but_never_what_leads_to_redis(monkeypatch):
    for name in ("SERPER_API_KEY", "MY_URL", "HF_TOKEN", "TIDEMILL_REDIS_URL"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv(PASS_VARIABLE, "SERPER_API_KEY, MY_*,TIDEMILL_*")
    variables = variables_for_users()
    assert {"SERPER_API_KEY", "MY_URL"} <= variables.keys()
    assert not {"HF_TOKEN", "TIDEMILL_REDIS_URL"} & variables.keys()
