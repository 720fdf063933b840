"""Run `trainyard` commands in forks of one process that has already imported torch and the package.

Importing torch takes seconds, a fork takes milliseconds. Each command gets its own working directory, environment,
session and standard streams, and exits with the code of the real command; only the interpreter start is shared. Tests
of start-up itself (import time, `python -m trainyard`) must use `subprocess`.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]


class ForkedProcess:
    """A running command, with the part of subprocess.Popen's interface that tests use."""

    def __init__(self, args: Sequence[str], pid: int, connection: socket.socket, streams: dict[str, IO[str]]) -> None:
        self.args, self.pid = list(args), pid
        self.returncode: int | None = None
        self.stdin, self.stdout, self.stderr = (streams.get(name) for name in ("stdin", "stdout", "stderr"))
        self._connection = connection

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._connection.settimeout(max(timeout, 1e-3) if timeout is not None else None)
            try:
                reply = self._connection.recv(64)
            except TimeoutError:
                raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
            if not reply:
                raise RuntimeError("the fork server died")
            self.returncode = json.loads(reply)
            self._connection.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end and return stdout and stderr. Both are files, so a full pipe cannot block the command."""
        self.wait(timeout)
        return tuple(stream.read() if stream else "" for stream in (self.stdout, self.stderr))  # type: ignore[return-value]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._directory = tempfile.TemporaryDirectory(prefix="forkserver-")
        self._address = os.path.join(self._directory.name, "socket")

    def start(
        self,
        args: Sequence[str | Path],
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        terminal: str | None = None,
        memory_bytes: int | None = None,
    ) -> ForkedProcess:
        """Start `trainyard *args`. stdout and stderr are files that can be read while the command runs, or `terminal`,
        the path of a terminal device, which is then also stdin. `memory_bytes` limits the data of the process."""
        if not self._process or self._process.poll() is not None:
            self._start_server()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(self._address)
        files = {name: tempfile.NamedTemporaryFile("r", dir=self._directory.name) for name in ("stdout", "stderr")}  # noqa: SIM115
        request = {
            "args": [str(arg) for arg in args],
            "cwd": str(cwd or Path.cwd()),
            "env": {**(os.environ if env is None else env)},
            "stdin": terminal or os.devnull,
            "stdout": terminal or files["stdout"].name,
            "stderr": terminal or files["stderr"].name,
            "memory_bytes": memory_bytes,
        }
        body = json.dumps(request).encode()
        connection.sendall(len(body).to_bytes(4, "little") + body)
        pid = int.from_bytes(_read_exactly(connection, 4), "little")
        return ForkedProcess(request["args"], pid, connection, files)  # type: ignore[arg-type]

    def run(
        self,
        args: Sequence[str | Path],
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 300,
        memory_bytes: int | None = None,
    ) -> subprocess.CompletedProcess[str]:
        process = self.start(args, cwd, env, memory_bytes=memory_bytes)
        try:
            stdout, stderr = process.communicate(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return subprocess.CompletedProcess(process.args, process.wait(), stdout, stderr)

    def close(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
        self._directory.cleanup()

    def _start_server(self) -> None:
        command = [sys.executable, "-m", "tests.support.forkserver", self._address]
        self._process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
        deadline = time.monotonic() + 120
        while not os.path.exists(self._address):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the fork server did not start")
            time.sleep(0.05)


def _read_exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _serve(address: str) -> None:
    import torch

    import trainyard.cli.main
    import trainyard.launch.launcher
    import trainyard.preflight.plan.report
    import trainyard.run.trainer  # noqa: F401
    from trainyard.devices.cpu import CpuDevice

    CpuDevice().peak_throughput(torch.float32)  # measured once, not by every command

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address + ".new")
    listener.listen()
    os.rename(address + ".new", address)
    children: dict[int, socket.socket] = {}
    parent = os.getppid()
    listener.settimeout(0.02)
    while os.getppid() == parent:
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
            connection.settimeout(None)
            request = json.loads(_read_exactly(connection, int.from_bytes(_read_exactly(connection, 4), "little")))
            pid = os.fork()
            if not pid:
                listener.close()
                connection.close()
                for other in children.values():
                    other.close()
                _command(request)
            children[pid] = connection
            connection.sendall(pid.to_bytes(4, "little"))
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            with contextlib.suppress(OSError):
                children[pid].sendall(json.dumps(os.waitstatus_to_exitcode(status)).encode())
            children.pop(pid).close()


def _command(request: dict[str, Any]) -> None:
    """Become the command: this fork never returns."""
    code = 1
    try:
        os.setsid()
        if request.get("memory_bytes"):
            resource.setrlimit(resource.RLIMIT_DATA, (request["memory_bytes"],) * 2)
        for name, number, flags in (
            (request.get("stdin", os.devnull), 0, os.O_RDONLY),
            (request["stdout"], 1, os.O_WRONLY | os.O_APPEND),
            (request["stderr"], 2, os.O_WRONLY | os.O_APPEND),
        ):
            opened = os.open(name, flags)
            os.dup2(opened, number)
            os.close(opened)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        sys.argv = ["trainyard", *request["args"]]
        sys.path[0] = ""
        from trainyard.cli.main import main

        try:
            main()
            code = 0
        except SystemExit as stopped:
            code = stopped.code if isinstance(stopped.code, int) else 0 if stopped.code is None else 1
            if isinstance(stopped.code, str):
                print(stopped.code, file=sys.stderr)
        except KeyboardInterrupt:
            code = 130
        except BaseException:
            import traceback

            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        import atexit

        atexit._run_exitfuncs()
    finally:
        os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1])
