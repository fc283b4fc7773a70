"""Answers that nobody reads do not take the memory of the run."""

import socket
from pathlib import Path

import pytest
import redis

from tests.conftest import SERVERS
from tests.support.servers import server_version
from tests.support.waiting import wait_until
from tidemill.common.redis.embedded import EmbeddedRedis

VALUE_BYTES = 1 << 20
NUM_ASKED = 600


@pytest.mark.parametrize("executable", SERVERS.values(), ids=SERVERS.keys())
async def test_who_asks_and_does_not_read_is_disconnected(executable: str, tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path, "no-aof", executable)
    server.start()
    try:
        client = redis.Redis(unix_socket_path=str(server.socket), decode_responses=True)
        limits = client.config_get("client-output-buffer-limit")["client-output-buffer-limit"]
        assert "normal 1073741824 268435456 60" in limits
        if server_version(executable) < (7, 0):
            return
        client.config_set("maxmemory-clients", NUM_ASKED * VALUE_BYTES // 4)  # sooner, for the test's sake
        client.set("large", b"x" * VALUE_BYTES)
        with socket.socket(socket.AF_UNIX) as silent:
            silent.connect(str(server.socket))
            silent.sendall(b"GET large\r\n" * NUM_ASKED)
            await wait_until(lambda: client.info("stats")["evicted_clients"] == 1)
        assert client.ping()
    finally:
        server.kill()


@pytest.mark.parametrize("executable", SERVERS.values(), ids=SERVERS.keys())
def test_an_embedded_server_bounds_what_its_clients_take_where_it_can(
    executable: str, tmp_path: Path
) -> None:
    server = EmbeddedRedis(tmp_path, "no-aof", executable)
    server.start()
    try:
        found = redis.Redis(unix_socket_path=str(server.socket), decode_responses=True).config_get(
            "maxmemory-clients"
        )
        wanted = {} if server_version(executable) < (7, 0) else {"maxmemory-clients": str(1 << 30)}
        assert found == wanted
    finally:
        server.kill()
