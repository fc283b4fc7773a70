"""TLS: the server proves who it is, and what is wrong is said without a password."""

from pathlib import Path

import pytest

from tests.support.servers import RedisServer, has_tls, make_certificate, tls_options
from tests.support.trajectories import make_trajectory
from tidemill.common.errors import BrokerError
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import append, length

SECRET = "correct-horse"

pytestmark = pytest.mark.skipif(not has_tls(), reason="no TLS in this redis-server, or no openssl")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    options = tls_options(*make_certificate(folder))
    with RedisServer(folder / "redis", "--requirepass", SECRET, *options) as server:
        yield server


@pytest.fixture(autouse=True)
def _password(monkeypatch):
    monkeypatch.setenv("TIDEMILL_REDIS_PASSWORD", SECRET)


def authority_of(server: RedisServer) -> Path:
    return server.folder.parent / "redis.crt"


async def test_streams_work_over_tls(server, keys, monkeypatch):
    monkeypatch.setenv("TIDEMILL_REDIS_CA", str(authority_of(server)))
    broker = await Broker.connect(server.url)
    await append(broker, keys.trajectories(), make_trajectory(1))
    assert await length(broker, keys.trajectories()) == 1
    await broker.close()


async def test_what_is_wrong_is_refused_with_what_to_do_and_without_the_password(
    server, tmp_path, monkeypatch
):
    right_authority = authority_of(server)
    (stranger, _) = make_certificate(tmp_path)
    port = server.port
    cases = {
        "no authority is known": (None, server.url, "Set TIDEMILL_REDIS_CA"),
        "another authority": (stranger, server.url, "cannot be trusted"),
        "a certificate for another host": (
            right_authority,
            f"rediss://localhost:{port}",
            "cannot be trusted",
        ),
        "no such file": ("/nowhere/ca.pem", server.url, "TIDEMILL_REDIS_CA is /nowhere/ca.pem: no such file"),
        "a plain client": (None, f"redis://127.0.0.1:{port}", "cannot reach Redis"),
    }
    for case, (authority, url, said) in cases.items():
        with monkeypatch.context() as patch:
            if authority:
                patch.setenv("TIDEMILL_REDIS_CA", str(authority))
            with pytest.raises(BrokerError) as caught:
                await Broker.connect(url)
        assert said in str(caught.value) and SECRET not in str(caught.value), case
