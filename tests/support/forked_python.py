"""Stands in for `python -u -c PROGRAM`, but the program runs in a fork of the fork server, with this process's streams.

pytest-xdist starts its workers with it (tests/conftest.py). Usage: python -S -E forked_python.py ADDRESS -u -c PROGRAM
"""

import json
import os
import socket
import sys


def main() -> int:
    address, program = sys.argv[1], sys.argv[-1]
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(address)
    body = json.dumps({"worker": True, "program": program, "env": dict(os.environ), "fds": [0, 1, 2]}).encode()
    socket.send_fds(connection, [len(body).to_bytes(4, "little")], [0, 1, 2])
    connection.sendall(body)
    os.closerange(0, 3)  # their other ends notice the end of the worker
    data = b""
    while more := connection.recv(64):  # four bytes of its process id, then its exit code
        data += more
    return abs(int(data[4:] or 1))


if __name__ == "__main__":
    os._exit(main())
