"""Eight processes that stay, and run functions as ranks of process groups made for each job: starting Python and torch
for every layout would take most of the time."""

import atexit
import importlib
import multiprocessing
import os
import socket
import traceback
from multiprocessing.connection import Connection
from typing import Any

RANKS = 8
LIMIT = 240.0
"""Seconds for one job."""


class RankFailed(Exception):
    """What the first rank that failed said."""


class Pool:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for _ in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        atexit.register(self.close)

    def run(self, function: str, arguments: tuple[Any, ...], ranks: int) -> list[Any]:
        """Call `module:name` with `arguments` on the first `ranks` processes as one world; what each gave."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank, pipe in enumerate(self.pipes[:ranks]):
            pipe.send((function, arguments, rank, ranks, port))
        out: list[Any] = []
        errors: list[str] = []
        for rank, pipe in enumerate(self.pipes[:ranks]):
            if not pipe.poll(LIMIT):
                self.close()
                raise RankFailed(f"rank {rank} gave nothing in {LIMIT} s; " + "; ".join(errors))
            ok, result = pipe.recv()
            out.append(result)
            if not ok:
                errors.append(f"rank {rank}: {result}")
        if errors:
            # Peers of a failed rank fail with a lost connection: the longest story is the cause.
            raise RankFailed(min(errors, key=lambda text: "Connection" in text or "closed by peer" in text))
        return out

    def close(self) -> None:
        for process in self.processes:
            process.kill()


def _serve(pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
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
