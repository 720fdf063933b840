"""Planted faults: after each one, the result of `trainyard get` is whole or absent, and another attempt completes it.

Real servers on the loopback, real processes, a real file system that is full. Nothing of the download is replaced.
"""

import hashlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.conftest import Call, call  # noqa: F401 (a fixture)
from tests.support.logs import captured_log
from tests.support.web_server import ServedFile, WebServer, cut_after, pause, running, status
from trainyard.remote import fetch

SIZE = 3 << 20
CONTENT = random.Random(1).randbytes(SIZE)
OTHER = random.Random(2).randbytes(SIZE)
ROOT = Path(__file__).parents[2]


@dataclass
class Site:
    """A web server, a directory, and the command under test."""

    server: WebServer
    directory: Path
    call: Call

    @property
    def url(self) -> str:
        return f"{self.server.url}/data.bin"

    @property
    def target(self) -> Path:
        return self.directory / "data.bin"

    def get(self, *options: str) -> tuple[int, str, str]:
        return self.call("get", self.url, str(self.target), *options)

    def start(self, *options: str) -> subprocess.Popen[str]:
        """The command in a process of its own."""
        command = [sys.executable, "-c", SMALL_CHUNKS, "get", self.url, str(self.target), *options]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE)

    def serve_archive(self, content: bytes, name: str = "data.tar.gz") -> tuple[int, str, str]:
        self.server.files[f"/{name}"] = ServedFile(content)
        return self.call("get", f"{self.server.url}/{name}", str(self.target), "--unpack", "--max-size", "1M")


SMALL_CHUNKS = (
    "import sys; from trainyard.remote import fetch; from trainyard.remote.sources import retry; "
    "fetch.CHUNK_BYTES = 1 << 18; retry.FIRST_WAIT_S = 0.02; "
    "from trainyard.cli.main import main; main()"
)
Fault = Callable[[Site], tuple[int, str, str] | None]
WHOLE, ABSENT = "whole", "absent"
FAULTS: dict[str, tuple[str, str, Fault]] = {}
"""Expected result, message, and the fault; the message is that of the command under the fault."""


def fault(expected: str, message: str = "") -> Callable[[Fault], Fault]:
    def add(function: Fault) -> Fault:
        FAULTS[function.__name__] = expected, message, function
        return function

    return add


@fault(WHOLE)
def connections_are_cut(site: Site) -> tuple[int, str, str]:
    site.server.faults.extend([lambda handler: False, *[cut_after(100_000)] * 6])
    return site.get()


@fault(ABSENT, "HTTP 500")
def always_500(site: Site) -> tuple[int, str, str]:
    site.server.always = status(500)
    return site.get()


@fault(WHOLE)
def busy_then_fine(site: Site) -> tuple[int, str, str]:
    site.server.faults.extend([status(503), status(502), status(503)])
    return site.get()


@fault(WHOLE)
def too_many_requests_then_fine(site: Site) -> tuple[int, str, str]:
    site.server.faults.extend([status(429, Retry_After="1")])
    begin = time.monotonic()
    result = site.get()
    assert time.monotonic() - begin >= 1
    return result


@fault(ABSENT, "ended early|does not tell|sent more")
def wrong_length(site: Site) -> tuple[int, str, str]:
    site.server.files["/data.bin"] = ServedFile(CONTENT, ranges=False, extra_length=1000)
    return site.get()


@fault(ABSENT, "its sha256 is [0-9a-f]{64} instead of")
def wrong_sha256(site: Site) -> tuple[int, str, str]:
    return site.get("--sha256", hashlib.sha256(OTHER).hexdigest())


@fault(ABSENT, "its md5 is [0-9a-f]{32} instead of")
def wrong_content_md5(site: Site) -> tuple[int, str, str]:
    site.server.files["/data.bin"].headers["Content-MD5"] = "1B2M2Y8AsgTpgAmY7PhCfg=="  # of nothing
    return site.get()


@fault(WHOLE)
def no_ranges_and_cut_once(site: Site) -> tuple[int, str, str]:
    site.server.files["/data.bin"] = ServedFile(CONTENT, ranges=False)
    site.server.faults.extend([lambda handler: False, cut_after(2_000_000)])
    return site.get()


@fault(ABSENT, "the disk is full; free some space, and the same command continues")
def disk_fills_up(site: Site) -> tuple[int, str, str]:
    """The check before the download sees enough space; another process takes it meanwhile."""
    with full_disk(site.directory, "8m") as filler:
        site.server.bytes_per_second = 4_000_000
        site.server.faults.extend([lambda handler: False, lambda handler: filler() or False])
        result = site.get()
        site.server.bytes_per_second = 0
        assert not site.target.exists()
        part = site.directory / ".data.bin.part"
        assert part.exists()
    return result


@fault(ABSENT, r"data.bin: needs 3\.0 MiB, but only 2\.0 MiB are free in ")
def disk_is_too_small(site: Site) -> tuple[int, str, str]:
    with full_disk(site.directory, "2m"):
        return site.get()


@fault(WHOLE)
def two_processes_at_once(site: Site) -> None:
    site.server.bytes_per_second = 8_000_000
    processes = [site.start() for _ in range(2)]
    assert [process.communicate(timeout=240)[1] for process in processes] == ["", ""]
    assert [process.returncode for process in processes] == [0, 0]
    assert site.server.sent["/data.bin"] < SIZE * 1.1


@fault(WHOLE)
def killed_and_resumed(site: Site) -> None:
    site.server.bytes_per_second = 1_000_000  # of each of 8 streams
    process = site.start("--streams", "2")
    deadline = time.monotonic() + 60
    while site.server.sent["/data.bin"] < SIZE // 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not site.target.exists()
    site.server.bytes_per_second = 0
    before = site.server.sent["/data.bin"]
    again = site.start()
    assert again.communicate(timeout=240)[1] == ""
    assert site.server.sent["/data.bin"] - before < SIZE * 0.8  # a part of it was on disk


@fault(WHOLE)
def changed_between_parts(site: Site) -> None:
    """A part of another version must never be joined with the rest of this one."""
    site.server.files["/data.bin"] = ServedFile(OTHER)
    site.server.bytes_per_second = 1_000_000
    process = site.start("--streams", "2")
    while site.server.sent["/data.bin"] < SIZE // 2:
        time.sleep(0.01)
    process.kill()
    process.communicate()
    site.server.bytes_per_second = 0
    site.server.files["/data.bin"] = ServedFile(CONTENT)
    assert site.start().communicate(timeout=240)[1] == ""


@fault(WHOLE)
def changed_during_the_download(site: Site) -> tuple[int, str, str]:
    site.server.files["/data.bin"] = ServedFile(OTHER)

    def change(handler: object) -> bool:
        site.server.files["/data.bin"] = ServedFile(CONTENT)
        return False

    site.server.faults.extend([lambda handler: False, lambda handler: False, change])
    return site.get("--streams", "1")


@fault(WHOLE)
def changed_on_a_server_that_ignores_if_range(site: Site) -> tuple[int, str, str]:
    site.server.files["/data.bin"] = ServedFile(OTHER, honors_if_range=False)

    def change(handler: object) -> bool:
        site.server.files["/data.bin"] = ServedFile(CONTENT, honors_if_range=False)
        return False

    site.server.faults.extend([lambda handler: False, lambda handler: False, change])
    return site.get("--streams", "1")


@fault(WHOLE)
def journal_is_cut(site: Site) -> tuple[int, str, str]:
    """A crash may leave half a line in the journal, and a file shorter than it says."""
    site.server.faults.extend([lambda handler: False] * 5)
    site.server.always = status(500)
    assert site.get("--streams", "1")[0] == 2
    journal = site.directory / ".data.bin.part" / "journal.jsonl"
    assert any("done" in json.loads(line) for line in journal.read_text().splitlines())
    journal.write_text(journal.read_text()[:-9] + '\n{"file": "data.b')
    site.server.always = None
    return site.get()


@fault(ABSENT, "too many redirects")
def redirect_loop(site: Site) -> tuple[int, str, str]:
    site.server.always = status(302, Location="/data.bin")
    return site.get()


@fault(ABSENT, "no answer in 1 s")
def server_hangs(site: Site) -> tuple[int, str, str]:
    site.server.always = pause(1.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainyard.remote.sources.web.TIMEOUT_S", 1.0)
        patch.setattr("trainyard.remote.sources.retry.MAX_ATTEMPTS", 2)
        return site.get()


@fault(ABSENT, "no such file .HTTP 404")
def missing_file(site: Site) -> tuple[int, str, str]:
    del site.server.files["/data.bin"]
    return site.get()


@fault(ABSENT, "access denied .HTTP 403")
def forbidden(site: Site) -> tuple[int, str, str]:
    site.server.always = status(403)
    return site.get()


@fault(ABSENT, "cannot be written: ")
def unwritable_destination(site: Site) -> tuple[int, str, str]:
    (site.directory / "file").write_text("")
    return site.call("get", site.url, str(site.directory / "file" / "data.bin"))


def tar(*members: tuple[tarfile.TarInfo, bytes], mode: str = "w:gz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for info, content in members:
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def archive_fault(name: str, message: str, make: Callable[[Path], bytes], file_name: str = "data.tar.gz") -> None:
    def run(site: Site) -> tuple[int, str, str]:
        outside = site.directory.parent / "outside"
        outside.mkdir(exist_ok=True)
        result = site.serve_archive(make(outside), file_name)
        assert not list(outside.iterdir())
        return result

    FAULTS[name] = ABSENT, message, run


archive_fault(
    "archive_with_dots", "leads out", lambda outside: tar((member("good"), b"1"), (member("../../outside/evil"), b"x"))
)
archive_fault("archive_with_absolute_path", "leads out", lambda outside: tar((member(f"{outside}/evil"), b"x")))
archive_fault(
    "archive_with_symlink",
    "is a link, a device",
    lambda outside: tar((member("out", tarfile.SYMTYPE, "../../outside"), b""), (member("out/evil"), b"x")),
)
archive_fault(
    "archive_with_hardlink",
    "is a link, a device",
    lambda outside: tar((member("h", tarfile.LNKTYPE, "/etc/passwd"), b"")),
)
archive_fault("archive_with_device", "is a link, a device", lambda outside: tar((member("null", tarfile.CHRTYPE), b"")))
archive_fault("archive_bomb", "unpacks to more than", lambda outside: tar((member("zeros"), bytes(64 << 20))))
archive_fault(
    "truncated_archive", "not a complete archive|damaged", lambda outside: tar((member("a"), CONTENT[:900_000]))[:-5000]
)
archive_fault("not_an_archive", "not a complete archive", lambda outside: CONTENT)


def zip_bytes(name: str, content: bytes, announced: int | None = None) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    data = buffer.getvalue()
    if announced is not None:  # both headers say a smaller size than the content has
        data = data.replace(len(content).to_bytes(4, "little"), announced.to_bytes(4, "little"))
    return data


archive_fault("zip_with_dots", "leads out", lambda outside: zip_bytes("../../outside/evil", b"x"), "data.zip")
archive_fault(
    "zip_bomb_with_false_size",
    "unpacks to more than|damaged|not a complete",
    lambda outside: zip_bytes("zeros", bytes(64 << 20), 1000),
    "data.zip",
)


@contextmanager
def full_disk(directory: Path, size: str) -> Iterator[Callable[[], None]]:
    """A small file system at `directory`; the function that it yields fills it up."""
    process = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(directory)], capture_output=True
    )
    if process.returncode:
        pytest.skip("mounting a file system needs root")

    def fill() -> None:
        with (directory / "filler").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 16))

    try:
        yield fill
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


@pytest.fixture
def site(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:  # noqa: F811
    monkeypatch.setattr("trainyard.remote.fetch.CHUNK_BYTES", 1 << 18)
    monkeypatch.setattr("trainyard.remote.sources.retry.FIRST_WAIT_S", 0.02)
    directory = tmp_path / "deep" / "target"
    directory.mkdir(parents=True)
    server = WebServer()
    server.files["/data.bin"] = ServedFile(CONTENT)
    with running(server):
        yield Site(server, directory, call)


@pytest.mark.parametrize("name", FAULTS)
def test_the_result_is_whole_or_absent(site: Site, name: str) -> None:
    expected, message, plant = FAULTS[name]
    result = plant(site)
    if result:
        code, _, error = result
        assert code == (0 if expected is WHOLE else 2), error
        assert error.count("\n") == (0 if expected is WHOLE else 1), error
        assert re.search(message, error), error
        assert "Traceback" not in error
    if expected is WHOLE:
        assert site.target.read_bytes() == CONTENT
        assert [path.name for path in site.directory.iterdir()] == ["data.bin"]
        return
    assert not os.path.lexists(site.target)
    left = {path.name for path in site.directory.iterdir()}
    is_refused = "archive" in name or "zip" in name or "wrong_" in name
    assert left <= ({"file"} if is_refused and name != "wrong_length" else {".data.bin.part", "file"})
    site.server.always = None
    site.server.files["/data.bin"] = ServedFile(CONTENT)
    shutil.rmtree(site.directory / ".data.bin.part" / "unpacked", ignore_errors=True)
    code, _, error = site.get()
    assert (code, error) == (0, "")
    assert site.target.read_bytes() == CONTENT


def test_a_process_that_waited_checks_the_lock_again(tmp_path: Path) -> None:
    """The process that held it has removed it with the staging directory, and a third one holds a new lock."""
    staging = tmp_path / ".target.part"
    waiting, entered = threading.Event(), threading.Event()

    def wait_for_the_lock() -> None:
        with captured_log(lambda message: waiting.set()), fetch._lock(staging):
            entered.set()

    first = ExitStack()
    first.enter_context(fetch._lock(staging))
    thread = threading.Thread(target=wait_for_the_lock)
    thread.start()
    assert waiting.wait(30)
    shutil.rmtree(staging)
    with fetch._lock(staging):
        first.close()
        assert not entered.wait(0.3)
    assert entered.wait(30)
    thread.join()


def test_there_are_enough_faults() -> None:
    assert len(FAULTS) >= 20
