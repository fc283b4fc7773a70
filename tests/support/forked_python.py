"""In place of `python -u -c CODE`: a fork server that has imported all files of tests runs the code.

The processes of a parallel run are started so (`tests/conftest.py`). It imports nothing of this project.
"""

import json
import os
import signal
import socket
import sys

signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that runs the code
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect("\0" + os.environ["PYTEST_FORK_SERVER_OF_WORKERS"])
    request = {"module": "", "code": sys.argv[-1], "arguments": [], "folder": os.getcwd()}
    status, its = socket.socketpair()
    with its:
        message = json.dumps(request | {"environment": dict(os.environ)}).encode()
        socket.send_fds(server, [message], [its.fileno(), 0, 1, 2])
    for descriptor in (0, 1):  # only the forked process uses them
        os.close(descriptor)
    words = b""
    while news := status.recv(100):
        words += news
    sys.exit(int(words.split()[1]) & 0xFF)
