"""Preparing and loading data: ours against the reference's algorithms, in one run on this machine.

    python bench/data.py                 everything
    python bench/data.py tokenize load   some of it

tokenize: GPT-2's encoding of JSON lines to token files by one worker and by two, and the reference's algorithm (a
Python encoder with a cache of words, a pool of processes, 25 documents at a time) with as many; how much two workers
bring, also where the input is long enough for their start not to count; memory for one input and for four times that.
load: tokens per second and core through the loader to batches. index: opening a set of a billion tokens in our order
and in the reference's. resume: the time to the first batch of a late step.
"""

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from reference import Gpt2
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from trainyard.config.load import parse
from trainyard.config.schema import Config
from trainyard.data.formats.megatron_bin import HEADER, MAGIC, Indexed, Writer
from trainyard.data.loading import megatron_order
from trainyard.data.loading.build import open_sources
from trainyard.data.loading.loader import Loader

VOCAB = 50257
BILLION = 10**9


def text(characters: int) -> list[str]:
    """Documents of about 3,000 characters: the words of Python's own library, which every machine has."""
    found, length = [], 0
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        source = file.read_text(errors="ignore")
        prose = " ".join(source.split('"""')[1::2])
        found += [prose[at : at + 3000] for at in range(0, len(prose), 3000)]
        length += len(prose)
        if length > characters:
            break
    return found


def gpt2_files(directory: Path, documents: list[str]) -> None:
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
            for number in rng.permutation(len(documents)):
                file.write(json.dumps({"text": documents[number]}) + "\n")


def ours(directory: Path, file: Path, workers: int, watch: bool = False) -> dict[str, float]:
    """The command itself. To watch its memory takes time from it."""
    words = ["--input", str(file), "--output-prefix", str(directory / "ours"), "--append-eod", "--overwrite"]
    words += ["--vocab-file", str(directory / "vocab.json"), "--merge-file", str(directory / "merges.txt")]
    start = time.perf_counter()
    command = [sys.executable, "-m", "trainyard", "data", "tokenize", *words, "--workers", str(workers)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    most = _watch(process) if watch else 0
    told = process.communicate()[0]
    assert process.returncode == 0
    tokens = len(Indexed(directory / "ours_text_document").tokens)
    own = float(told.split(" tokens in ")[1].split(" s")[0])
    return {"tokens": tokens, "seconds": own, "with_start": time.perf_counter() - start, "memory_bytes": most}


def at_once(directory: Path, file: Path) -> float:
    """Tokens per second of two runs that know nothing of each other: all that two cores of this machine can do."""
    places = [directory / name for name in ("one", "other")]
    for place in places:
        place.mkdir()
        for name in ("vocab.json", "merges.txt"):
            shutil.copy(directory / name, place)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda place: ours(place, file, 1), places))
    return sum(each["tokens"] for each in found) / max(each["seconds"] for each in found)


def _watch(process: subprocess.Popen[str]) -> int:
    """The most memory that a process and its children had at once."""
    import psutil

    most = 0
    while process.poll() is None:
        try:
            parent = psutil.Process(process.pid)
            each = [parent, *parent.children(recursive=True)]
            most = max(most, sum(one.memory_full_info().pss for one in each))
        except psutil.Error:
            pass
        time.sleep(0.05)
    return most


def theirs(directory: Path, file: Path, workers: int) -> dict[str, float]:
    start = time.perf_counter()
    tokens = 0
    with (
        multiprocessing.Pool(workers, _begin, (directory,)) as pool,
        file.open() as lines,
        Writer(directory / "theirs", "uint16") as writer,
    ):
        for row in pool.imap(_encode, lines, 25):
            array = np.array(row, "uint16")
            writer.add(array, np.array([len(array)], np.int32), np.ones(1, np.int64))
            tokens += len(array)
    return {"tokens": tokens, "seconds": time.perf_counter() - start}


def _begin(directory: Path) -> None:
    global encoder
    encoder = Gpt2(directory / "vocab.json", directory / "merges.txt")


encoder: Gpt2


def _encode(line: str) -> list[int]:
    return [*encoder.encode(json.loads(line)["text"]), encoder.numbers["<|endoftext|>"]]


def tokenize(directory: Path) -> dict[str, Any]:
    documents = text(6_000_000)
    gpt2_files(directory, documents)
    small, large = directory / "small.jsonl", directory / "large.jsonl"
    write_lines(small, documents, 2)
    write_lines(large, documents, 8)
    out: dict[str, Any] = {"megabytes": large.stat().st_size / 1e6}
    rates: dict[str, list[float]] = {"reference": [], "ours": []}
    for workers in (1, 2):
        for name, run in (("reference", theirs), ("ours", ours)):
            found = run(directory, large, workers)
            rates[name].append(found["tokens"] / found["seconds"])
        same = all(
            (directory / f"theirs{suffix}").read_bytes() == (directory / f"ours_text_document{suffix}").read_bytes()
            for suffix in (".bin", ".idx")
        )
        reference, own = rates["reference"][-1], rates["ours"][-1]
        out[f"{workers} workers"] = {"reference": reference, "ours": own, "ratio": own / reference, "same": same}
        print(
            f"tokenize, {workers} workers: reference {reference:,.0f} tokens/s, ours {own:,.0f}: "
            f"{own / reference:.1f}x; same bytes: {same}",
            flush=True,
        )
    scaling = {name: pair[1] / pair[0] for name, pair in rates.items()}
    scaling["two runs at once"] = at_once(directory, large) / rates["ours"][0]
    huge = directory / "huge.jsonl"
    write_lines(huge, documents, 32)
    alone, both = (ours(directory, huge, workers)["seconds"] for workers in (1, 2))
    scaling["ours, four times the input"] = alone / both
    memory = [ours(directory, file, 2, watch=True)["memory_bytes"] for file in (small, large)]
    print(
        f"  two workers over one: reference {scaling['reference']:.2f}x, ours {scaling['ours']:.2f}x; "
        f"two runs at once, each of all the input, over one: {scaling['two runs at once']:.2f}x; "
        f"four times the input, ours {scaling['ours, four times the input']:.2f}x ({alone:.1f} s, {both:.1f} s)"
    )
    print(
        f"  memory for {out['megabytes'] / 4:.0f} MB {memory[0] / 2**20:.0f} MiB, for four times that "
        f"{memory[1] / 2**20:.0f} MiB"
    )
    return out | {"scaling": scaling, "memory_bytes": memory}


def configuration(prefix: Path, **data: Any) -> Config:
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
            "data": {"source": "tokens", "paths": [str(prefix)], "sequence": 2048, **data},
            "train": {"steps": 1000, "global_batch": 256, "micro_batch": 1},
        }
    )


def load(directory: Path) -> dict[str, Any]:
    """A set of 100 million tokens, read once before so that it is in memory; one thread."""
    rng = np.random.RandomState(0)
    with Writer(directory / "set", "uint16") as writer:
        for _ in range(50):
            sizes = rng.randint(10, 1200, 3300).astype(np.int32)
            tokens = rng.randint(0, 32000, int(sizes.sum())).astype("uint16")
            writer.add(tokens, sizes, np.ones(len(sizes), np.int64))
    out = {}
    for label, data in {
        "our order": {},
        "our order, documents apart": {"separate": True, "mask_ends": True},
        "the reference's order": {"order": "megatron"},
        "a blend of two": {"paths": [str(directory / "set")] * 2, "weights": [0.7, 0.3]},
    }.items():
        config = configuration(directory / "set", **data)
        source, _, shuffle = open_sources(config)
        loader = Loader(source, 256, 0, shuffle)
        loader.batch(0)
        steps = 60
        start = time.process_time()
        for step in range(1, steps + 1):
            loader.batch(step)
        rate = steps * 256 * 2048 / (time.process_time() - start)
        out[label] = rate
        print(f"load, {label}: {rate / 1e6:,.0f} million tokens/s and core", flush=True)
    return out


def billion(directory: Path) -> Path:
    """An index of two million documents with a billion tokens, which are a hole in a file."""
    sizes = np.random.RandomState(0).randint(1, 1000, 2_000_000).astype(np.int32)
    sizes[-1] += BILLION - int(sizes.sum(dtype=np.int64))
    if sizes[-1] < 0:
        sizes = (sizes * 0.9).astype(np.int32)
        sizes[-1] += BILLION - int(sizes.sum(dtype=np.int64))
    ends = np.cumsum(sizes, dtype=np.int64)
    with (directory / "billion.idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, len(sizes), len(sizes) + 1))
        for array in (sizes, (ends - sizes) * 2, np.arange(len(sizes) + 1)):
            file.write(array.astype("<i4" if array is sizes else "<i8").tobytes())
    with (directory / "billion.bin").open("wb") as file:
        file.truncate(2 * BILLION)
    return directory / "billion"


def index(directory: Path) -> dict[str, Any]:
    prefix = billion(directory)
    out = {}
    for label, work in {
        "our order": partial(_ours, prefix),
        "the reference's order": partial(_megatron, prefix),
    }.items():
        seconds, memory = _apart(work)
        out[label] = {"seconds": seconds, "memory_bytes": memory}
        print(f"index of a billion tokens, {label}: {seconds:.2f} s, {memory / 2**20:.0f} MiB more memory", flush=True)
    return out


def _ours(prefix: Path) -> None:
    source, _, _ = open_sources(configuration(prefix))
    source.samples(np.array([len(source) - 1]))


def _megatron(prefix: Path) -> None:
    data = Indexed(prefix)
    source = megatron_order.MegatronOrder(data, range(len(data)), BILLION // 2048 - 1, 2048, 1234, 32000)
    source.samples(np.array([len(source) - 1]))


def _apart(work: Callable[[], None]) -> tuple[float, int]:
    """Seconds, and memory beyond what the process had before, in a process of its own."""
    reader, writer = os.pipe()
    if not os.fork():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        work()
        took = time.perf_counter() - start
        more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        os.write(writer, json.dumps([took, more * 1024]).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        seconds, memory = json.loads(pipe.read())
    os.wait()
    return seconds, memory


def resume(directory: Path) -> dict[str, float]:
    prefix = directory / "billion"
    if not prefix.with_suffix(".idx").exists():
        billion(directory)
    out = {}
    for step in (0, 1_000, 1_000_000):
        start = time.perf_counter()
        source, _, shuffle = open_sources(configuration(prefix))
        Loader(source, 256, 0, shuffle).batch(step)
        out[str(step)] = time.perf_counter() - start
        print(f"resume: first batch of step {step:,} after {out[str(step)] * 1000:.0f} ms", flush=True)
    return out


PARTS: dict[str, Callable[[Path], Any]] = {"tokenize": tokenize, "load": load, "index": index, "resume": resume}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"cores": os.cpu_count(), "python": sys.version.split()[0]}
    with tempfile.TemporaryDirectory() as name:
        for part in arguments.parts or PARTS:
            results[part] = PARTS[part](Path(name))
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
