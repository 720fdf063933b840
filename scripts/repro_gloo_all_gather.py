"""Reproduce a crash of torch's functional all-gather on gloo, without trainyard.

    python scripts/repro_gloo_all_gather.py                 two functional all-gathers in flight: crashes
    python scripts/repro_gloo_all_gather.py --mode one      one at a time: runs
    python scripts/repro_gloo_all_gather.py --mode async    two in flight through torch.distributed: runs

Two processes start two `_functional_collectives.all_gather_tensor` of random sizes, wait for both and check the sums,
for `--seconds`. With torch 2.13.0 (CPU build) the default mode ends in "malloc(): unaligned tcache chunk detected"
(SIGABRT) or SIGSEGV within 90 seconds; 5 of 5 runs did, on two busy cores. `--mode one` and `--mode async` ran 12,000
to 33,000 pairs without an error. The same operators without the tensor wrapper (`--mode operator`) ran 34,000 pairs in
one run and hung in another. This is why ranks on a CPU gather through all-reduce (trainyard/parallel/process_group.py).
"""

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.multiprocessing as mp

MAX_ELEMENTS = 5000


def gather_pair(mode: str, x: torch.Tensor, y: torch.Tensor, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    group = dist.group.WORLD
    assert group is not None
    if mode == "functional":
        a, b = functional.all_gather_tensor(x, 0, group), functional.all_gather_tensor(y, 0, group)
        return functional.wait_tensor(a), functional.wait_tensor(b)
    if mode == "one":
        a = functional.wait_tensor(functional.all_gather_tensor(x, 0, group))
        return a, functional.wait_tensor(functional.all_gather_tensor(y, 0, group))
    if mode == "operator":
        operators = torch.ops._c10d_functional
        a, b = (operators.all_gather_into_tensor(tensor, ranks, group.group_name) for tensor in (x, y))
        return operators.wait_tensor(a), operators.wait_tensor(b)
    a, b = x.new_empty(ranks * len(x)), y.new_empty(ranks * len(y))
    works = [dist.all_gather_into_tensor(out, tensor, async_op=True) for out, tensor in ((a, x), (b, y))]
    for work in works:
        work.wait()
    return a, b


def run_rank(rank: int, ranks: int, port: int, mode: str, seconds: float) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)  # the same sizes on every rank
    deadline = time.monotonic() + seconds
    expired = torch.zeros(1)
    pairs = 0
    while True:
        if pairs % 200 == 0:
            expired.fill_(float(time.monotonic() > deadline))
            dist.all_reduce(expired)
            if expired.item():
                break
        sizes = torch.randint(1, MAX_ELEMENTS, (2,), generator=generator).tolist()
        x, y = (torch.full((size,), float(rank)) for size in sizes)
        for gathered, size in zip(gather_pair(mode, x, y, ranks), sizes, strict=True):
            assert float(gathered.sum()) == size * ranks * (ranks - 1) / 2, f"wrong sum in pair {pairs}"
        pairs += 1
    if rank == 0:
        print(f"{mode}: {pairs} pairs, no error (torch {torch.__version__})")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--mode", choices=["functional", "one", "operator", "async"], default="functional")
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    port = 20000 + os.getpid() % 10000
    try:
        mp.spawn(run_rank, (options.ranks, port, options.mode, options.seconds), nprocs=options.ranks)
    except mp.ProcessExitedException as error:
        sys.exit(f"{options.mode}: {error}")


if __name__ == "__main__":
    main()
