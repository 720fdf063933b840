"""A pool of processes that act as ranks: each job forms a new world of gloo process groups on the first N of them.

Starting Python and importing torch for every layout would take most of the time, so ranks are forked from one process
that has already imported everything, and stay for the next job.
"""

import atexit
import faulthandler
import gc
import importlib
import multiprocessing
import os
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from trainyard.launch.launcher import reserved_port

JOB_TIMEOUT_S = 240.0
ERROR_GRACE_S = 3.0
"""How long to wait for the other ranks after one has failed."""
PRELOAD = ["torch.distributed", "trainyard.run.trainer", "trainyard.parallel.pipeline"]
PRELOAD += ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining"]  # imported on first use


class RankFailed(Exception):
    """The traceback of the first rank that raised."""


class RankDied(RankFailed):
    """A rank's process ended without a result, for example in a segmentation fault."""


class Pool:
    def __init__(self) -> None:
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        self.crash_logs: list[Any] = []
        """One file per rank that receives its Python stack if it crashes."""
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        atexit.register(self.close)

    def run(self, function: str, arguments: tuple[Any, ...], ranks: int) -> list[Any]:
        """Call `module:name` with `arguments` on `ranks` ranks of one world and return each rank's result."""
        while len(self.pipes) < ranks:
            self._start_rank()
        with reserved_port() as port:
            return self._run(function, arguments, ranks, port)

    def _run(self, function: str, arguments: tuple[Any, ...], ranks: int, port: int) -> list[Any]:
        pipes = self.pipes[:ranks]
        for rank, pipe in enumerate(pipes):
            pipe.send((function, arguments, rank, ranks, port))
        results: dict[int, Any] = {}
        errors: list[str] = []
        deadline = time.monotonic() + JOB_TIMEOUT_S
        while len(results) < ranks:
            waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
            ready = wait(waiting, max(deadline - time.monotonic(), 0))
            for pipe in ready:
                rank = pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    ok, results[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    raise self._describe_death(rank, errors) from None
                if not ok:
                    errors.append(f"rank {rank}: {results[rank]}")
                    deadline = min(deadline, time.monotonic() + ERROR_GRACE_S)  # the others fail too, or wait forever
            if not ready:
                break
        if len(results) < ranks:
            self.close()  # the next job starts new processes
            silent = sorted(set(range(ranks)) - set(results))
            errors = errors or [f"ranks {silent} returned nothing in {JOB_TIMEOUT_S:.0f} s"]
        if errors:
            raise RankFailed(errors[0])
        return [results[rank] for rank in range(ranks)]

    def _describe_death(self, rank: int, errors: list[str]) -> RankDied:
        self.processes[rank].join(ERROR_GRACE_S)
        code = self.processes[rank].exitcode
        stack = Path(self.crash_logs[rank].name).read_text()
        self.close()
        return RankDied(f"rank {rank}'s process died with exit code {code}; {errors} {stack}")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for log in self.crash_logs:
            log.close()
        self.pipes, self.processes, self.crash_logs = [], [], []

    def _start_rank(self) -> None:
        ours, theirs = self._context.Pipe()
        self.crash_logs.append(tempfile.NamedTemporaryFile(prefix="rank-"))  # noqa: SIM115
        process = self._context.Process(target=_serve, args=(theirs, self.crash_logs[-1].name), daemon=True)
        process.start()
        theirs.close()
        self.pipes.append(ours)
        self.processes.append(process)


def _serve(pipe: Connection, crash_log: str) -> None:
    faulthandler.enable(open(crash_log, "w"))  # noqa: SIM115
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # collections after jobs look only at what the jobs made
    while True:
        try:
            function, arguments, rank, ranks, port = pipe.recv()
        except EOFError:
            return
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks),
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
        gc.collect()  # groups in reference cycles keep threads that poll
