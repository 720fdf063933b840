"""Data preparation and loading against Megatron's algorithms, in one run on this machine.

    python bench/data.py                 all benchmarks
    python bench/data.py tokenize load   some of them

tokenize: GPT-2 encoding of JSON lines to token files with one and two workers, against Megatron's algorithm (a Python
encoder with a word cache, a process pool, 25 documents at a time); the speedup of two workers, also for an input long
enough that their start-up does not matter; memory for one input and for four times that.
load: tokens per second and core from the loader. index: opening a billion tokens in shuffled and in Megatron order.
resume: time to the first batch of a late step. store: the loader on token files behind an S3 server with 5 ms latency,
against local files: the first pass, and later passes in alternation with local ones (medians).
"""

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from reference import ReferenceGpt2Encoder
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tests.support.s3_server import s3_server
from tests.support.store_proxy import store_proxy
from trainyard.config.load import parse
from trainyard.config.schema import Config
from trainyard.data.formats.megatron_bin import INDEX_HEADER, INDEX_MAGIC, MegatronTokens, MegatronTokensWriter
from trainyard.data.loading.build import build_datasets
from trainyard.data.loading.loader import BatchLoader
from trainyard.data.loading.megatron_order import MegatronOrderDataset

VOCAB = 50257
LATENCY_S = 0.005
STORE_ROUNDS = 15
BILLION = 10**9


def stdlib_documents(characters: int) -> list[str]:
    """Documents of about 3,000 characters from the docstrings of Python's standard library."""
    documents: list[str] = []
    length = 0
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        source = file.read_text(errors="ignore")
        prose = " ".join(source.split('"""')[1::2])
        documents += [prose[start : start + 3000] for start in range(0, len(prose), 3000)]
        length += len(prose)
        if length > characters:
            break
    return documents


def train_gpt2_files(directory: Path, documents: list[str]) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.model.save(str(directory))


def write_lines(path: Path, documents: list[str], times: int) -> None:
    rng = np.random.RandomState(0)
    with path.open("w") as file:
        for _ in range(times):
            for index in rng.permutation(len(documents)):
                file.write(json.dumps({"text": documents[index]}) + "\n")


def run_trainyard(directory: Path, file: Path, workers: int, measure_memory: bool = False) -> dict[str, float]:
    """Run the command. Measuring its memory slows it down."""
    flags = ["--input", str(file), "--output-prefix", str(directory / "ours"), "--append-eod", "--overwrite"]
    flags += ["--vocab-file", str(directory / "vocab.json"), "--merge-file", str(directory / "merges.txt")]
    start = time.perf_counter()
    command = [sys.executable, "-m", "trainyard", "data", "tokenize", *flags, "--workers", str(workers)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    memory = _peak_tree_memory(process) if measure_memory else 0
    output = process.communicate()[0]
    assert process.returncode == 0
    tokens = len(MegatronTokens(directory / "ours_text_document").tokens)
    seconds = float(output.split(" tokens in ")[1].split(" s")[0])
    return {"tokens": tokens, "seconds": seconds, "with_start": time.perf_counter() - start, "memory_bytes": memory}


def two_independent_runs_rate(directory: Path, file: Path) -> float:
    """Tokens per second of two independent runs: an upper bound for two cores of this machine."""
    directories = [directory / name for name in ("one", "other")]
    for run_directory in directories:
        run_directory.mkdir()
        for name in ("vocab.json", "merges.txt"):
            shutil.copy(directory / name, run_directory)
    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(lambda run_directory: run_trainyard(run_directory, file, 1), directories))
    return sum(result["tokens"] for result in results) / max(result["seconds"] for result in results)


def _peak_tree_memory(process: subprocess.Popen[str]) -> int:
    """Peak memory (PSS) of a process and its children together."""
    import psutil

    peak = 0
    while process.poll() is None:
        try:
            parent = psutil.Process(process.pid)
            processes = [parent, *parent.children(recursive=True)]
            peak = max(peak, sum(member.memory_full_info().pss for member in processes))
        except psutil.Error:
            pass
        time.sleep(0.05)
    return peak


def run_reference(directory: Path, file: Path, workers: int) -> dict[str, float]:
    start = time.perf_counter()
    tokens = 0
    with (
        multiprocessing.Pool(workers, _init_worker, (directory,)) as pool,
        file.open() as lines,
        MegatronTokensWriter(directory / "reference", "uint16") as writer,
    ):
        for tokens_of_document in pool.imap(_encode, lines, 25):
            array = np.array(tokens_of_document, "uint16")
            writer.add(array, np.array([len(array)], np.int32), np.ones(1, np.int64))
            tokens += len(array)
    return {"tokens": tokens, "seconds": time.perf_counter() - start}


def _init_worker(directory: Path) -> None:
    global encoder
    encoder = ReferenceGpt2Encoder(directory / "vocab.json", directory / "merges.txt")


encoder: ReferenceGpt2Encoder


def _encode(line: str) -> list[int]:
    return [*encoder.encode(json.loads(line)["text"]), encoder.token_ids["<|endoftext|>"]]


def bench_tokenize(directory: Path) -> dict[str, Any]:
    documents = stdlib_documents(6_000_000)
    train_gpt2_files(directory, documents)
    small, large = directory / "small.jsonl", directory / "large.jsonl"
    write_lines(small, documents, 2)
    write_lines(large, documents, 8)
    out: dict[str, Any] = {"megabytes": large.stat().st_size / 1e6}
    rates: dict[str, list[float]] = {"reference": [], "ours": []}
    for workers in (1, 2):
        for name, run in (("reference", run_reference), ("ours", run_trainyard)):
            result = run(directory, large, workers)
            rates[name].append(result["tokens"] / result["seconds"])
        same = all(
            (directory / f"reference{suffix}").read_bytes() == (directory / f"ours_text_document{suffix}").read_bytes()
            for suffix in (".bin", ".idx")
        )
        reference, ours = rates["reference"][-1], rates["ours"][-1]
        out[f"{workers} workers"] = {"reference": reference, "ours": ours, "ratio": ours / reference, "same": same}
        print(
            f"tokenize, {workers} workers: reference {reference:,.0f} tokens/s, trainyard {ours:,.0f}: "
            f"{ours / reference:.1f}x; same bytes: {same}",
            flush=True,
        )
    scaling = {name: pair[1] / pair[0] for name, pair in rates.items()}
    scaling["two runs at once"] = two_independent_runs_rate(directory, large) / rates["ours"][0]
    huge = directory / "huge.jsonl"
    write_lines(huge, documents, 32)
    one_worker, two_workers = (run_trainyard(directory, huge, workers)["seconds"] for workers in (1, 2))
    scaling["ours, four times the input"] = one_worker / two_workers
    memory = [run_trainyard(directory, file, 2, measure_memory=True)["memory_bytes"] for file in (small, large)]
    print(
        f"  speedup of two workers: reference {scaling['reference']:.2f}x, trainyard {scaling['ours']:.2f}x; "
        f"two independent runs: {scaling['two runs at once']:.2f}x; four times the input: "
        f"{scaling['ours, four times the input']:.2f}x ({one_worker:.1f} s, {two_workers:.1f} s)"
    )
    print(
        f"  memory for {out['megabytes'] / 4:.0f} MB {memory[0] / 2**20:.0f} MiB, for four times that "
        f"{memory[1] / 2**20:.0f} MiB"
    )
    return out | {"scaling": scaling, "memory_bytes": memory}


def make_config(prefix: Path | str, **data: Any) -> Config:
    return parse(
        {
            "model": {
                "family": "llama",
                "vocab": 32000,
                "hidden": 64,
                "layers": 1,
                "heads": 1,
                "ffn": 64,
                "max_positions": 2048,
            },
            "data": {"source": "tokens", "paths": [str(prefix)], "seq_len": 2048, **data},
            "train": {"steps": 1000, "global_batch": 256, "micro_batch": 1},
        }
    )


def write_set(prefix: Path) -> None:
    """100 million tokens."""
    rng = np.random.RandomState(0)
    with MegatronTokensWriter(prefix, "uint16") as writer:
        for _ in range(50):
            lengths = rng.randint(10, 1200, 3300).astype(np.int32)
            tokens = rng.randint(0, 32000, int(lengths.sum())).astype("uint16")
            writer.add(tokens, lengths, np.ones(len(lengths), np.int64))


def load_cases(prefix: str) -> dict[str, dict[str, Any]]:
    return {
        "shuffled": {},
        "shuffled, document mask": {"document_mask": True, "mask_eod_loss": True},
        "Megatron order": {"order": "megatron"},
        "blend of two": {"paths": [prefix] * 2, "weights": [0.7, 0.3]},
    }


def open_loader(prefix: str, **data: Any) -> BatchLoader:
    dataset, _, shuffle = build_datasets(make_config(prefix, **data))
    return BatchLoader(dataset, 256, 0, shuffle)


def bench_load(directory: Path) -> dict[str, Any]:
    """Load 100 million tokens that are in the page cache, in one thread."""
    write_set(directory / "set")
    out = {}
    for label, data in load_cases(str(directory / "set")).items():
        loader = open_loader(str(directory / "set"), **data)
        loader.batch(0)
        steps = 60
        start = time.process_time()
        for step in range(1, steps + 1):
            loader.batch(step)
        rate = steps * 256 * 2048 / (time.process_time() - start)
        out[label] = rate
        print(f"load, {label}: {rate / 1e6:,.0f} million tokens/s per core", flush=True)
    return out


def write_billion_token_index(directory: Path) -> Path:
    """An index of two million documents with a billion tokens; the token file is sparse."""
    sizes = np.random.RandomState(0).randint(1, 1000, 2_000_000).astype(np.int32)
    sizes[-1] += BILLION - int(sizes.sum(dtype=np.int64))
    if sizes[-1] < 0:
        sizes = (sizes * 0.9).astype(np.int32)
        sizes[-1] += BILLION - int(sizes.sum(dtype=np.int64))
    ends = np.cumsum(sizes, dtype=np.int64)
    with (directory / "billion.idx").open("wb") as file:
        file.write(INDEX_HEADER.pack(INDEX_MAGIC, 1, 8, len(sizes), len(sizes) + 1))
        for array in (sizes, (ends - sizes) * 2, np.arange(len(sizes) + 1)):
            file.write(array.astype("<i4" if array is sizes else "<i8").tobytes())
    with (directory / "billion.bin").open("wb") as file:
        file.truncate(2 * BILLION)
    return directory / "billion"


def bench_index(directory: Path) -> dict[str, Any]:
    prefix = write_billion_token_index(directory)
    out = {}
    for label, work in {
        "shuffled": partial(_open_shuffled, prefix),
        "Megatron order": partial(_open_megatron, prefix),
    }.items():
        seconds, memory = _measure_in_fork(work)
        out[label] = {"seconds": seconds, "memory_bytes": memory}
        print(f"index of a billion tokens, {label}: {seconds:.2f} s, {memory / 2**20:.0f} MiB more memory", flush=True)
    return out


def _open_shuffled(prefix: Path) -> None:
    dataset, _, _ = build_datasets(make_config(prefix))
    dataset.samples(np.array([len(dataset) - 1]))


def _open_megatron(prefix: Path) -> None:
    data = MegatronTokens(prefix)
    dataset = MegatronOrderDataset(data, range(len(data)), BILLION // 2048 - 1, 2048, 1234, 32000)
    dataset.samples(np.array([len(dataset) - 1]))


def _measure_in_fork(work: Callable[[], None]) -> tuple[float, int]:
    """Seconds and additional peak memory of `work` in a forked process."""
    reader, writer = os.pipe()
    if not os.fork():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        work()
        seconds = time.perf_counter() - start
        memory_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        os.write(writer, json.dumps([seconds, memory_kib * 1024]).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        seconds, memory = json.loads(pipe.read())
    os.wait()
    return seconds, memory


def bench_resume(directory: Path) -> dict[str, float]:
    prefix = directory / "billion"
    if not prefix.with_suffix(".idx").exists():
        write_billion_token_index(directory)
    out = {}
    for step in (0, 1_000, 1_000_000):
        start = time.perf_counter()
        dataset, _, shuffle = build_datasets(make_config(prefix))
        BatchLoader(dataset, 256, 0, shuffle).batch(step)
        out[str(step)] = time.perf_counter() - start
        print(f"resume: first batch of step {step:,} after {out[str(step)] * 1000:.0f} ms", flush=True)
    return out


@contextmanager
def slow_store() -> Iterator[str]:
    """The address of an S3 server in another process, which answers each request after LATENCY_S."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    url = ours.recv()
    fsspec.config.conf["s3"] = {"endpoint_url": url, "key": "fake", "secret": "fake"}
    try:
        yield url
    finally:
        ours.send("end")
        process.join()


def _serve(connection: Connection) -> None:
    with s3_server() as server, store_proxy(server, LATENCY_S) as proxy:
        connection.send(proxy.url)
        connection.recv()


def bench_store(directory: Path) -> dict[str, Any]:
    """Batches of 256 x 2048 tokens, through the prefetching iterator of the trainer."""
    write_set(directory / "set")
    local, remote = str(directory / "set"), "s3://yard/set"
    out: dict[str, Any] = {"latency_s": LATENCY_S}
    with slow_store():
        filesystem = fsspec.filesystem("s3")
        for suffix in (".bin", ".idx"):
            filesystem.put_file(f"{local}{suffix}", f"yard/set{suffix}")
        cache = {"directory": str(directory / "cache")}
        start = time.perf_counter()
        loader = open_loader(remote, cache=cache)
        loader.batch(0)
        out["first_batch_s"] = time.perf_counter() - start
        start = time.perf_counter()
        epoch = len(loader.dataset) // 256
        for _ in loader.prefetch(1, epoch, slice(None), dict):
            pass
        out["first_epoch_tokens_per_s"] = (epoch - 1) * 256 * 2048 / (time.perf_counter() - start)
        print(
            f"store, empty cache: first batch after {out['first_batch_s']:.2f} s, then "
            f"{out['first_epoch_tokens_per_s'] / 1e6:,.0f} million tokens/s in the first epoch",
            flush=True,
        )
        start = time.perf_counter()
        open_loader(remote, cache=cache).batch(5)
        out["warm_first_batch_s"] = time.perf_counter() - start
        print(f"store, full cache: first batch after {out['warm_first_batch_s']:.2f} s", flush=True)
        out["warm"] = {}
        for label in load_cases(local):
            pair = [open_loader(local, **load_cases(local)[label])]
            pair.append(open_loader(remote, cache=cache, **load_cases(remote)[label]))
            out["warm"][label] = _alternate(pair)
            print(
                "store, full cache, {}: local {:,.0f}, store {:,.0f} million tokens/s per core: {:.3f} times".format(
                    label, *(rate / 1e6 for rate in out["warm"][label][:2]), out["warm"][label][2]
                ),
                flush=True,
            )
    return out


def _alternate(loaders: list[BatchLoader]) -> list[float]:
    """Median tokens per second and core of two loaders that take turns, and the second over the first: the median of
    the ratios of neighbors."""
    steps, rates = 40, [[0.0] * STORE_ROUNDS for _ in loaders]
    for loader in loaders:
        for step in range(200):  # all pages of the data
            loader.batch(step)
    for turn in range(STORE_ROUNDS):
        for number in (0, 1) if turn % 2 else (1, 0):
            start = time.process_time()
            for step in range(steps):
                loaders[number].batch(200 + turn * steps + step)
            rates[number][turn] = steps * 256 * 2048 / (time.process_time() - start)
    ratios = [remote / local for local, remote in zip(*rates, strict=True)]
    return [*map(statistics.median, rates), statistics.median(ratios)]


BENCHMARKS: dict[str, Callable[[Path], Any]] = {
    "tokenize": bench_tokenize,
    "load": bench_load,
    "index": bench_index,
    "resume": bench_resume,
    "store": bench_store,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmarks", nargs="*", choices=[*BENCHMARKS, []], default=[])
    parser.add_argument("--out", type=Path, help="write the results to this JSON file")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"cores": os.cpu_count(), "python": sys.version.split()[0]}
    with tempfile.TemporaryDirectory() as name:
        for benchmark in arguments.benchmarks or BENCHMARKS:
            results[benchmark] = BENCHMARKS[benchmark](Path(name))
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
