"""Answers that nobody reads do not take the memory of the run."""

import socket

import redis

from tests.support.servers import server_version
from tests.support.waiting import wait_until

VALUE_BYTES = 1 << 20
NUM_ASKED = 600


async def test_who_asks_and_does_not_read_is_disconnected(own_redis):
    client = redis.Redis(unix_socket_path=str(own_redis.socket), decode_responses=True)
    limits = client.config_get("client-output-buffer-limit")["client-output-buffer-limit"]
    assert "normal 1073741824 268435456 60" in limits
    if server_version(own_redis.executable) < (7, 0):
        assert client.config_get("maxmemory-clients") == {}
        return
    assert client.config_get("maxmemory-clients") == {"maxmemory-clients": str(1 << 30)}
    client.config_set("maxmemory-clients", NUM_ASKED * VALUE_BYTES // 4)  # sooner, for the test's sake
    client.set("large", b"x" * VALUE_BYTES)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(own_redis.socket))
        silent.sendall(b"GET large\r\n" * NUM_ASKED)
        await wait_until(lambda: client.info("stats")["evicted_clients"] == 1)
    assert client.ping()
