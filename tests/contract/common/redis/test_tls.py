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


async def refusal(url: str) -> str:
    with pytest.raises(BrokerError) as caught:
        await Broker.connect(url)
    assert SECRET not in str(caught.value)
    return str(caught.value)


async def test_a_server_that_no_known_authority_vouches_for_is_refused(server, tmp_path, monkeypatch):
    said = await refusal(server.url)
    assert "cannot be trusted" in said
    assert "TIDEMILL_REDIS_CA" in said
    stranger, _ = make_certificate(tmp_path)
    monkeypatch.setenv("TIDEMILL_REDIS_CA", str(stranger))
    assert "cannot be trusted" in await refusal(server.url)


async def test_a_certificate_for_another_host_is_refused(server, monkeypatch):
    monkeypatch.setenv("TIDEMILL_REDIS_CA", str(authority_of(server)))
    assert "cannot be trusted" in await refusal(f"rediss://localhost:{server.port}")


async def test_an_authority_file_that_is_not_there_is_named(server, monkeypatch):
    monkeypatch.setenv("TIDEMILL_REDIS_CA", "/nowhere/ca.pem")
    assert "TIDEMILL_REDIS_CA is /nowhere/ca.pem: no such file" in await refusal(server.url)


async def test_a_plain_client_is_not_served(server):
    assert "cannot reach Redis" in await refusal(f"redis://127.0.0.1:{server.port}")
