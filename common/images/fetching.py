"""Fetches a picture of a URL: bounded in size and time, and never from the inside of our own network.

A data set is written by others, and its URLs are followed by a machine that may reach what they may not:
metadata services, Redis, the console. Each host name is resolved once, all its addresses are checked, and the
connection goes to a checked address: a second look-up might give another one. Redirects are followed by the
same rules. Proxies of the environment are not used, as they would resolve names again.
"""

import errno
import http.client
import ipaddress
import socket
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass
from threading import Timer
from urllib.parse import SplitResult, urljoin, urlsplit

from tidemill.common.config.images import ImagesConfig
from tidemill.common.errors import BrokenImageError, StoreError
from tidemill.common.images.no_pictures import WEB
from tidemill.common.images.sources import MEDIA_TYPES

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

MAX_REDIRECTS = 5
REDIRECTS = (301, 302, 303, 307, 308)
BUSY = (408, 429, 500, 502, 503, 504)
"""Answers after which the same request may succeed."""
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, socket.EAI_MEMORY)
"""Errors of this machine: no descriptor or memory is left."""
NUM_TRIES = 3
FIRST_PAUSE_S = 0.5
CHUNK_BYTES = 1 << 16
HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "tidemill"}
BINARY = ("application/octet-stream", "binary/octet-stream")
"""Content types that say nothing."""
NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""IPv6 addresses that lead to the IPv4 address in their last 32 bits."""


class _BusyError(Exception):
    """The server, or the way to it, failed for now."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """Content of a URL, and the format that its server says (`FORMATS`); empty where it says none."""

    content: bytes
    label: str


def fetch(url: str, config: ImagesConfig) -> Fetched:
    """The content of a URL; a server that is busy is asked again.

    Raises:
        BrokenImageError: it is too large, too slow, not there, no picture, or at an address that is not
            public.
        StoreError: this machine is short of descriptors or memory, which says nothing about the picture.
    """
    deadline = time.monotonic() + config.fetch_timeout_s
    pause_s = FIRST_PAUSE_S
    for attempt in range(NUM_TRIES):
        try:
            return _follow(url, config, deadline)
        except _BusyError as error:
            if attempt == NUM_TRIES - 1 or time.monotonic() + pause_s >= deadline:
                raise BrokenImageError(f"it cannot be fetched: {error}") from None
        time.sleep(pause_s)
        pause_s *= 2
    raise AssertionError("the last attempt returns or raises")


def _follow(url: str, config: ImagesConfig, deadline: float) -> Fetched:
    """Raises BrokenImageError, or _BusyError: it may be tried again."""
    for _ in range(MAX_REDIRECTS + 1):
        answer = _get(url, config, deadline)
        if isinstance(answer, Fetched):
            return answer
        url = answer
    raise BrokenImageError(f"it is redirected more than {MAX_REDIRECTS} times")


def _get(url: str, config: ImagesConfig, deadline: float) -> Fetched | str:
    """The content, or the URL that it is redirected to."""
    too_slow = f"it took longer than {config.fetch_timeout_s:g} s"
    target = _split(url)
    connection = _connect(target, config, deadline)
    remaining_s = max(0.0, deadline - time.monotonic())
    # Each operation of a socket has its own time-out: only this bounds a server that sends byte after byte.
    # The socket itself: the connection forgets it where the answer ends with it.
    watchdog = Timer(remaining_s, _shut_down, [connection.sock])
    watchdog.daemon = True
    watchdog.start()
    try:
        path = target.path or "/"
        resource = f"{path}?{target.query}" if target.query else path
        connection.request("GET", resource, headers=HEADERS)
        response = connection.getresponse()
        if response.status in REDIRECTS:
            return urljoin(url, response.getheader("Location", ""))
        if response.status in BUSY:
            raise _BusyError(f"its server answers with status {response.status}")
        if response.status != http.client.OK:
            raise BrokenImageError(f"its server answers with status {response.status}")
        label = _label_of(response)
        content = _read(response, config)
        if time.monotonic() >= deadline:
            # The watchdog has cut it: without a length that looks like the end.
            raise BrokenImageError(too_slow)
        return Fetched(content, label)
    except (OSError, http.client.HTTPException, ValueError) as error:
        if time.monotonic() >= deadline:
            raise BrokenImageError(too_slow) from None
        raise _failure(error, str(error) or type(error).__name__) from None
    finally:
        watchdog.cancel()
        connection.close()


def _split(url: str) -> SplitResult:
    try:
        target = urlsplit(url)
        host = target.hostname
        _ = target.port  # raises where it is no number
    except ValueError as error:
        raise BrokenImageError(f"its URL cannot be read: {error}") from None
    if target.scheme.lower() not in WEB or not host:
        raise BrokenImageError(f"its URL leads to {url[:80]!r}; expected http or https")
    if any(not "!" <= character <= "~" for character in url):
        raise BrokenImageError("its URL has spaces or characters beyond ASCII; percent-encode them")
    if target.username is not None:
        raise BrokenImageError("its URL has a name and a password, which are not sent")
    return target


def _connect(target: SplitResult, config: ImagesConfig, deadline: float) -> http.client.HTTPConnection:
    host = target.hostname or ""
    is_secure = target.scheme.lower() == "https"
    port = target.port or (443 if is_secure else 80)
    address = _checked_address(host, port, config)
    timeout_s = deadline - time.monotonic()
    if timeout_s <= 0:
        raise BrokenImageError(f"it took longer than {config.fetch_timeout_s:g} s")
    # Names the host in the request; the socket is connected here, to the address that was checked.
    connection = http.client.HTTPConnection(host, target.port, timeout=timeout_s)
    try:
        plain = socket.create_connection((str(address), port), timeout=timeout_s)
    except OSError as error:
        raise _failure(error, f"no connection to {host}: {error.strerror or error}") from None
    connection.sock = plain
    if is_secure:
        try:
            connection.sock = ssl.create_default_context().wrap_socket(plain, server_hostname=host)
        except ssl.SSLCertVerificationError as error:
            plain.close()
            raise BrokenImageError(f"the certificate of {host} is refused: {error.verify_message}") from None
        except OSError as error:
            plain.close()
            raise _failure(error, f"no secure connection to {host}: {error}") from None
    return connection


def _checked_address(host: str, port: int, config: ImagesConfig) -> Address:
    """The first address of a host, if all of them may be reached."""
    try:
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise _failure(error, f"the name {host} is not resolved: {error}") from None
    addresses = [ipaddress.ip_address(str(answer[4][0]).partition("%")[0]) for answer in answers]
    for address in addresses:
        if not config.private_addresses and not is_public(address):
            raise BrokenImageError(
                f"{host} is at {address}, which is not a public address (images.private_addresses allows it)"
            )
    return addresses[0]


def is_public(address: Address) -> bool:
    """Whether an address is one of the internet, and not of this machine or its networks."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        # Python counts site-local addresses (fec0::/10) as global: networks may still route them inside.
        if address.teredo is not None or address.is_site_local:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


def _failure(error: Exception, reason: str) -> _BusyError | StoreError:
    """What to raise for an error of a connection: no picture is left out for a shortage of this machine."""
    if getattr(error, "errno", None) in SHORTAGES:
        return StoreError(f"no picture can be fetched: this machine is short of something ({reason})")
    return _BusyError(reason)


def _label_of(response: http.client.HTTPResponse) -> str:
    if response.getheader("Content-Encoding", "identity").lower() != "identity":
        raise BrokenImageError("its server compresses it, which was not asked for")
    content_type = response.getheader("Content-Type", "").partition(";")[0].strip().lower()
    if content_type and content_type not in BINARY and not content_type.startswith("image/"):
        raise BrokenImageError(f"its server says that it is {content_type}, which is no picture")
    return MEDIA_TYPES.get(content_type, "")


def _read(response: http.client.HTTPResponse, config: ImagesConfig) -> bytes:
    max_bytes = int(config.max_file_mb * (1 << 20))
    content = bytearray()
    while chunk := response.read(CHUNK_BYTES):
        content += chunk
        if len(content) > max_bytes:
            raise BrokenImageError(f"it has more than {config.max_file_mb:g} MB (images.max_file_mb)")
    if response.length:
        raise _BusyError(f"its answer ends {response.length} bytes before its end")
    return bytes(content)


def _shut_down(connected: socket.socket) -> None:
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
