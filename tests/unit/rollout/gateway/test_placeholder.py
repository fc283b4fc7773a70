"""The placeholder's address and key, as the process of a session rewrites requests."""

from tidemill.services.rollout.gateway.placeholder import _Router

HEAD = (
    b"POST /v1/messages HTTP/1.1\r\nHost: 127.0.0.1:9\r\nX-Api-Key: %s\r\nConnection: keep-alive\r\n"
    b"Content-Length: 3"
)


def test_a_request_goes_to_the_sessions_path_with_its_key_on_a_connection_of_its_own() -> None:
    router = _Router("http://127.0.0.1:8000/s/token", "session-key", "host-key")
    rewritten = router._rewritten(HEAD % b"host-key")
    assert rewritten is not None
    first, *headers = rewritten.decode().split("\r\n")
    assert first == "POST /s/token/v1/messages HTTP/1.1"
    assert sorted(headers) == [
        "authorization: Bearer session-key",
        "connection: close",
        "content-length: 3",
        "host: 127.0.0.1:8000",
    ]


def test_who_does_not_know_the_hosts_key_is_not_handed_on() -> None:
    router = _Router("http://127.0.0.1:8000/s/token", "session-key", "host-key")
    assert router._rewritten(HEAD % b"another") is None
    assert router._rewritten(b"GET / HTTP/1.1") is None
