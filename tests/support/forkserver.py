"""Run `trainyard` commands in forks of one process that has already imported torch and the package.

Importing torch takes seconds, a fork takes milliseconds. Each command gets its own working directory, environment,
session and standard streams, and exits with the code of the real command; only the interpreter start is shared. So are
the ranks that a command with --nproc starts, unless a test is about their processes. Tests of start-up itself (import
time, `python -m trainyard`) must use `subprocess`.

With pytest-xdist, its workers are forks, too. Their server has also imported the libraries of the tests, and runs the
commands of all workers.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any

ROOT = Path(__file__).parents[2]
ADDRESS_ENV = "TRAINYARD_FORK_SERVER"
"""Environment variable of a forked worker: the address of the server that all workers share."""
LIBRARIES_OF_TESTS = ("tests.support.hf_reference", "datasets", "openai", "torch._dynamo")
LIBRARIES_OF_TESTS += ("torch.distributed.checkpoint", "torch.distributed.tensor", "h5py", "fsspec", "tokenizers")
MAX_FDS = 8
"""File descriptors that a request may carry."""
PARENT_POLL_S = 0.5
"""How often the server looks whether its parent has died."""


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
    """A server that starts with the first command, unless there is one at `shared_address`."""

    def __init__(self, shared_address: str | None = None, imports: Sequence[str] = ()) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._directory = tempfile.TemporaryDirectory(prefix="forkserver-")
        self._shared_address, self._imports = shared_address, imports
        self.address = shared_address or os.path.join(self._directory.name, "socket")

    def start(
        self,
        args: Sequence[str | Path],
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        terminal: str | None = None,
        memory_bytes: int | None = None,
        forks_ranks: bool = True,
    ) -> ForkedProcess:
        """Start `trainyard *args`. stdout and stderr are files that can be read while the command runs, or `terminal`,
        the path of a terminal device, which is then also stdin. `memory_bytes` limits the data of the process. Without
        `forks_ranks`, the ranks that it starts are child processes as outside of tests, and import torch."""
        if not self._shared_address and (not self._process or self._process.poll() is not None):
            self.start_server()
        files = {name: tempfile.NamedTemporaryFile("r", dir=self._directory.name) for name in ("stdout", "stderr")}  # noqa: SIM115
        request = {
            "args": [str(arg) for arg in args],
            "cwd": str(cwd or Path.cwd()),
            "env": {**(os.environ if env is None else env)},
            "stdin": terminal or os.devnull,
            "stdout": terminal or files["stdout"].name,
            "stderr": terminal or files["stderr"].name,
            "memory_bytes": memory_bytes,
            "forks_ranks": forks_ranks,
        }
        pid, connection = _request_fork(self.address, request)
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

    def start_server(self) -> None:
        command = [sys.executable, "-m", "tests.support.forkserver", self.address, *self._imports]
        self._process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
        deadline = time.monotonic() + 120
        while not os.path.exists(self.address):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the fork server did not start")
            time.sleep(0.05)


def _request_fork(address: str, request: dict[str, Any], fds: Mapping[int, int] = {}) -> tuple[int, socket.socket]:
    """Ask the server for a command. It gets the values of `fds`, open in this process, under the numbers that are their
    keys. Returns its pid and the connection that will get its exit code."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(address)
    body = json.dumps({**request, "fds": list(fds)}).encode()
    socket.send_fds(connection, [len(body).to_bytes(4, "little")], list(fds.values()))
    connection.sendall(body)
    return int.from_bytes(_read_exactly(connection, 4), "little"), connection


def _start_rank(
    command: list[str], env: Mapping[str, str], stdout: IO[bytes] | None, stderr: IO[bytes], **options: Any
) -> ForkedProcess | subprocess.Popen[bytes]:
    """What the launcher of a forked command calls instead of subprocess.Popen. A fork of the launcher itself would have
    the modules of the user that the launcher has imported."""
    if command[:3] != [sys.executable, "-m", "trainyard"]:
        return subprocess.Popen(command, env=env, stdout=stdout, stderr=stderr, **options)
    request: dict[str, Any] = {"args": command[3:], "cwd": os.getcwd(), "env": {**env}, "stdin": os.devnull}
    request["memory_bytes"] = resource.getrlimit(resource.RLIMIT_DATA)[0]
    fds = {1: stdout.fileno() if stdout else 1, 2: stderr.fileno(), **{fd: fd for fd in options["pass_fds"]}}
    pid, connection = _request_fork(_address, request, fds)
    return ForkedProcess(command, pid, connection, {})


_address = ""
"""The address of the server that has forked this command."""


def _read_exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _serve(address: str, imports: Sequence[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which end this server
    import torch

    import trainyard.cli.main
    import trainyard.preflight.plan.report
    import trainyard.run.trainer  # noqa: F401
    from trainyard.devices.cpu import CpuDevice
    from trainyard.launch import launcher

    global _address
    _address = address
    for name in imports:
        with contextlib.suppress(ModuleNotFoundError):  # its tests are skipped, or fail, in the worker
            importlib.import_module(name)
    launcher.subprocess = SimpleNamespace(Popen=_start_rank, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]
    CpuDevice().peak_throughput(torch.float32)  # measured once, not by every command
    gc.collect()
    gc.freeze()  # collections in a command look only at what the command made

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address + ".new")
    listener.listen()
    os.rename(address + ".new", address)
    children: dict[int, socket.socket] = {}
    parent = os.getppid()
    listener.settimeout(0)
    woken, wake = os.pipe()  # written to when a command has ended
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake)
    while os.getppid() == parent:
        select.select([listener, woken], [], [], PARENT_POLL_S)
        with contextlib.suppress(BlockingIOError):
            os.read(woken, 4096)
        with contextlib.suppress(BlockingIOError):
            connection, _ = listener.accept()
            connection.settimeout(None)
            length, received, _, _ = socket.recv_fds(connection, 4, MAX_FDS)
            request = json.loads(_read_exactly(connection, int.from_bytes(length, "little")))
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for fd in (woken, wake):
                    os.close(fd)
                listener.close()
                connection.close()
                for other in children.values():
                    other.close()
                (_worker if request.get("worker") else _command)(request, received)
            for fd in received:
                os.close(fd)
            children[pid] = connection
            connection.sendall(pid.to_bytes(4, "little"))
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            with contextlib.suppress(OSError):
                children[pid].sendall(json.dumps(os.waitstatus_to_exitcode(status)).encode())
            children.pop(pid).close()


def _take_fds(request: dict[str, Any], received: Sequence[int]) -> None:
    """Give the received descriptors the numbers that the request wants."""
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in received]  # their numbers may be wanted for others
    for fd in received:
        os.close(fd)
    for number, fd in zip(request.get("fds", ()), copies, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def _worker(request: dict[str, Any], received: Sequence[int]) -> None:
    """Become a worker of pytest-xdist, as Python with the arguments of execnet would. It stays in the process group of
    the tests, so that Ctrl-C reaches it. This fork never returns."""
    code = 1
    try:
        _take_fds(request, received)
        os.environ.clear()
        os.environ.update(request["env"])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.stdin, sys.argv, sys.path[0] = open(0, closefd=False), ["-c"], ""  # noqa: SIM115
        sys.modules["__main__"] = ModuleType("__main__")
        exec(request["program"], vars(sys.modules["__main__"]))
        atexit._run_exitfuncs()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _command(request: dict[str, Any], received: Sequence[int] = ()) -> None:
    """Become the command: this fork never returns."""
    code = 1
    try:
        os.setsid()
        _take_fds(request, received)
        if not request.get("forks_ranks", True):
            sys.modules["trainyard.launch.launcher"].subprocess = subprocess  # type: ignore[attr-defined]
        if request.get("memory_bytes"):
            resource.setrlimit(resource.RLIMIT_DATA, (request["memory_bytes"],) * 2)
        for name, number, flags in (
            (request.get("stdin", os.devnull), 0, os.O_RDONLY),
            (request.get("stdout"), 1, os.O_WRONLY | os.O_APPEND),
            (request.get("stderr"), 2, os.O_WRONLY | os.O_APPEND),
        ):
            if name:
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
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        atexit._run_exitfuncs()
    finally:
        os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2:])
