"""Eight processes that stay, and run functions as ranks of process groups made for each job: starting Python and torch
for every layout would take most of the time."""

import atexit
import faulthandler
import importlib
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from trainyard.launch.launcher import reserved_port

RANKS = 8
LIMIT = 240.0
"""Seconds for one job."""
AFTER = 3.0
"""Seconds to wait for the other ranks when one has failed."""


class RankFailed(Exception):
    """What the first rank that failed said."""


class RankDied(RankFailed):
    """A rank's process ended without a word: a crash in a library's own code."""


class Pool:
    def __init__(self) -> None:
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        self.notes: list[Any] = []
        """Where each process says where it was when it crashed."""
        atexit.register(self.close)

    def run(self, function: str, arguments: tuple[Any, ...], ranks: int) -> list[Any]:
        """Call `module:name` with `arguments` on the first `ranks` processes as one world; what each gave."""
        try:
            return self._meet(function, arguments, ranks)
        except RankDied as died:
            # torch's gloo corrupts memory once in some ten thousand collectives (docs/log.md). Nothing of ours runs in
            # its threads; what it did is told, and the job is done over. A crash of our own would come again.
            warnings.warn(f"{function}: {died}; run again", stacklevel=2)
            return self._meet(function, arguments, ranks)

    def _meet(self, function: str, arguments: tuple[Any, ...], ranks: int) -> list[Any]:
        if not self.pipes:
            self._start()
        with reserved_port() as port:
            return self._run(function, arguments, ranks, port)

    def _run(self, function: str, arguments: tuple[Any, ...], ranks: int, port: int) -> list[Any]:
        pipes = self.pipes[:ranks]
        for rank, pipe in enumerate(pipes):
            pipe.send((function, arguments, rank, ranks, port))
        out: dict[int, Any] = {}
        errors: list[str] = []
        end = time.monotonic() + LIMIT
        while len(out) < ranks:
            ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in out], end - time.monotonic())
            for pipe in ready:
                rank = pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    ok, out[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    self.processes[rank].join(AFTER)
                    code = self.processes[rank].exitcode
                    stack = Path(self.notes[rank].name).read_text()
                    self.close()
                    raise RankDied(f"rank {rank}'s process died with {code}; {errors} {stack}") from None
                if not ok:
                    errors.append(f"rank {rank}: {out[rank]}")
                    end = min(end, time.monotonic() + AFTER)  # the others fail too, or wait for this one for ever
            if not ready:
                break
        if len(out) < ranks:
            self.close()  # the next job starts afresh
            errors = errors or [f"ranks {sorted(set(range(ranks)) - set(out))} gave nothing in {LIMIT:.0f} s"]
        if errors:
            raise RankFailed(errors[0])
        return [out[rank] for rank in range(ranks)]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for note in self.notes:
            note.close()
        self.pipes, self.processes, self.notes = [], [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for _ in range(RANKS):
            ours, theirs = context.Pipe()
            self.notes.append(tempfile.NamedTemporaryFile(prefix="rank-"))  # noqa: SIM115
            process = context.Process(target=_serve, args=(theirs, self.notes[-1].name), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)


def _serve(pipe: Connection, note: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    faulthandler.enable(open(note, "w"))  # noqa: SIM115
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            function, arguments, rank, ranks, port = pipe.recv()
        except EOFError:
            return
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        module, _, name = function.partition(":")
        try:
            result = getattr(importlib.import_module(module), name)(*arguments)
            ok = True
        except BaseException:
            ok, result = False, traceback.format_exc()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send((ok, result))
