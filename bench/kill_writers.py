"""The commands that bench/kills.py kills: everything that writes, what each one leaves, and how to read it."""

import contextlib
import gc
import hashlib
import importlib
import json
import os
import pkgutil
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from bench.kill_servers import BUCKET, Servers, State, hub_files, put_object, stored_objects

Outputs = dict[str, frozenset[tuple[str, str]]]
"""Files and digests of every complete output, by its name."""
Run = Callable[[list[str], Path], tuple[int | None, str]]

VOLATILE_KEYS = {"complete.json": ("time", "run", "run_directory", "files"), "run.json": ("id",)}
"""Keys that differ between two undisturbed runs. So does the state of Python's generator in a shard's metadata."""
VOLATILE_FILES = re.compile(r"(^|/)(events\.jsonl|spans/.*|[^/]*lock)$")
PREPARE = tuple(f"trainyard.{name}" for name in ("prepare", "data.formats", "data.text", "cli.commands.data"))
"""What the commands import that prepare data; they need neither torch nor a server."""
SMALL_RUN = (
    *("tiny-llama", "--smoke", "model.hidden=16", "model.layers=1", "model.heads=2", "model.kv_heads=1"),
    *("model.ffn=32", "train.global_batch=2", "train.micro_batch=2", "data.seq_len=16", "data.source=synthetic"),
    *("log.loggers=[]", "log.every=1", "log.name=a", "evaluate.every=0", "checkpoint.resume=auto", "device.name=cpu"),
)


@dataclass
class Writer:
    """A command that writes."""

    name: str
    arguments: tuple[str, ...]
    """Of `trainyard`; `{n}` stands for a new number in each state from before the command."""
    prepare: Callable[[], Path] = field(repr=False)
    """Makes the directory in which it runs, as it is before the command."""
    final: str
    """Pattern of the names of its outputs, files or directories."""
    marker: str = ""
    """The file that makes an output directory complete. Without one, its name does."""
    unless: str = ""
    """The file that makes outputs incomplete: readers refuse them."""
    group: str = ""
    """Pattern of names whose files are one output together, by its first group."""
    reader: tuple[str, ...] = ()
    """The command that reads an output, `{}`, completely."""
    extra: str = "$^"
    """Pattern of other names that may be there."""
    remote: Callable[[int], State] | None = None
    """Asks a server for the state instead."""
    is_exact: bool = True
    """False if outputs with the same digests differ in what only a reader can check, such as their own checksums."""
    modules: tuple[str, ...] = ("trainyard",)
    """Packages that the command imports."""
    weight: int = 2
    """Share of the kills: commands that take half a second get more than those that take several."""
    may_vanish: bool = False
    """An old output may be missing until the command has finished (it has no atomic replacement, and says so)."""

    @cached_property
    def start(self) -> Path:
        return self.prepare()

    def state(self, directory: Path, number: int) -> State:
        if self.remote:
            return self.remote(number)
        found = {str(p.relative_to(directory)): digest(p) for p in sorted(directory.rglob("*")) if not p.is_dir()}
        latest = _latest_run(directory)
        return {_rename(name, latest): value for name, value in found.items()}

    def outputs(self, state: State) -> Outputs:
        found: dict[str, set[tuple[str, str]]] = {}
        for name, value in state.items():
            if match := re.match(self.final, name):
                whole = match.group(1) if self.group else match.group(0)
                found.setdefault(whole, set()).add((name, value))
        return {
            name: frozenset(files)
            for name, files in found.items()
            if self.unless not in state
            and (not self.marker or any(file in (f"{name}/{self.marker}", self.marker) for file, _ in files))
        }

    def is_allowed(self, name: str, found: Any, before: Any, after: Outputs) -> bool:
        """An output is the old one or the new one; a file of lines may be the beginning of the new one."""
        if found is None:
            return before is None or self.may_vanish
        if found in (before, after.get(name)):
            return True
        if name.endswith(".jsonl") and name in after:
            ((_, lines),), ((_, all_lines),) = found, after[name]
            return all_lines.startswith(lines)
        return False

    def misplaced(self, state: State) -> list[str]:
        """Files under a final name that are no output, nor part of one that is known to be incomplete."""
        inputs = {} if self.remote else self.state(self.start, 0)
        return [
            name
            for name, value in state.items()
            if inputs.get(name) != value
            and not re.match(self.final, name)
            and not re.match(self.extra, name)
            and not any(part.startswith(".") for part in name.split("/"))
        ]

    def read_command(self, name: str, directory: Path, number: int) -> list[str]:
        name = name.replace("runs/a/", _latest_run(directory), 1)
        return [word.format(name, n=number) for word in self.reader]


def _latest_run(directory: Path) -> str:
    """A run that was killed before its first checkpoint starts again in NAME-2, which then has its output."""
    numbers = [int(path.name[2:] or 1) for path in directory.glob("runs/a*")]
    return f"runs/a-{max(numbers)}/" if max(numbers, default=1) > 1 else "runs/a/"


def _rename(name: str, latest: str) -> str:
    if name.startswith(latest):
        return "runs/a/" + name.removeprefix(latest)
    return re.sub(r"^runs/(a(-\d+)?)/", r"runs/.\1/", name)


def digest(path: Path) -> str:
    """Of a file's content, without what differs between two undisturbed runs."""
    if path.is_symlink():
        return f"link {os.readlink(path)}"
    if VOLATILE_FILES.search(str(path)):
        return "volatile"
    content = path.read_bytes()
    if path.name == "metrics.jsonl":
        from trainyard.metrics.json_lines import parse_lines

        records = parse_lines(content.rpartition(b"\n")[0])
        return "".join(f"{record['step']} {record['loss']};" for record in records if "loss" in record)
    if path.name in VOLATILE_KEYS:
        try:
            values = json.loads(content.partition(b"\n")[0])  # a checksum may follow
        except ValueError:
            return "not JSON"
        content = json.dumps({key: values[key] for key in values if key not in VOLATILE_KEYS[path.name]}).encode()
    elif re.fullmatch(r"rank_\d+\.safetensors", path.name) and len(content) > 8:
        start = 8 + int.from_bytes(content[:8], "little")
        try:
            tensors = json.loads(content[8:start])
        except ValueError:
            return "not a header"
        content = json.dumps({key: tensors[key] for key in tensors if key != "__metadata__"}).encode() + content[start:]
    elif path.suffix == ".html":
        content = re.sub(rb"Report of [\d: -]+", b"", content)
    return hashlib.sha256(content).hexdigest()


def import_everything(packages: set[str]) -> None:
    """Import what commands import when they need it: a fork then starts in milliseconds."""
    for package in packages:
        path = importlib.import_module(package).__path__
        for module in pkgutil.walk_packages(path, f"{package}."):
            if not module.name.endswith("__main__"):
                with contextlib.suppress(Exception):  # some need a device's own packages
                    importlib.import_module(module.name)
    if "trainyard" in packages:
        for name in ("torch.distributed.checkpoint", "transformers", "s3fs", "huggingface_hub.hf_api"):
            importlib.import_module(name)
        import torch

        from trainyard.devices.cpu import CpuDevice

        CpuDevice().peak_throughput(torch.float32)  # measured once, not by every command
    gc.collect()
    gc.freeze()  # a collection in a fork would take a second, and copy all pages


def make_writers(directory: Path, servers: Servers, run: Run) -> list[Writer]:
    """All writers, with their inputs."""
    rng = random.Random(0)
    words = ["".join(chr(97 + rng.randrange(26)) for _ in range(rng.randint(2, 9))) for _ in range(200)]

    def text(seed: int) -> str:
        rng.seed(seed)
        lines = (". ".join(" ".join(rng.choices(words, k=9)) for _ in range(6)) + "." for _ in range(200))
        return "".join(json.dumps({"text": line}) + "\n" for line in lines)

    @cache
    def start(name: str, *commands: tuple[str, ...], after: str = "") -> Path:
        """A directory with inputs, and the content of the directory `after`, in which commands have run."""
        path = directory / "start" / name
        if after:
            shutil.copytree(starts[after](), path)
        path.mkdir(parents=True, exist_ok=True)
        (path / "text.jsonl").write_text(text(1))
        (path / "old.jsonl").write_text(text(2))
        (path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, "."]) + "\n")
        for command in commands:
            code, output = run(list(command), path)
            if code:
                raise SystemExit(f"trainyard {' '.join(command)}: exit {code}\n{output[-2000:]}")
        return path

    def train(*keys: str) -> tuple[str, ...]:
        return ("train", *SMALL_RUN, *keys)

    saving = ("checkpoint.every=1", "checkpoint.keep=0")
    replacing = ("checkpoint.every=2", "checkpoint.keep=1")
    run_extra = r"runs/a/(events\.jsonl|spans/|run\.json|logs/|\.lock)"
    step = r"runs/a/checkpoints/step_\d+"
    tokenize = ("data", "tokenize", "--tokenizer", "bytes", "--workers", "2", "--output-prefix", "tok", "--input")
    pack = ("data", "pack", "--tokenizer", "bytes", "--seq-len", "64", "--workers", "1", "--output", "packed")
    bert = ("data", "bert", "--vocab-file", "vocab.txt", "--files", "6", "--workers", "1", "--seq-len", "64")
    bert = (*bert, "--max-predictions", "10", "--output", ".", "--input")
    tokenizer = ("data", "train-tokenizer", "--vocab-size", "300", "--output", "tokenizer", "--input")
    stored = f"s3://{BUCKET}"

    def uploads() -> Path:
        push = ("push", "runs/a")
        return start("uploads", (*push, f"{stored}/source"), (*push, "hf://me/source", "--no-plan"), after="trained")

    def tokens() -> Path:
        path = start("tokens", (*tokenize, "text.jsonl"))
        for name in ("bin", "idx"):
            put_object(path / f"tok_text_document.{name}", f"tokens/tok_text_document.{name}")
        return path

    def old_copy() -> Path:
        uploads()
        ((path := start("old copy")) / "old").mkdir(exist_ok=True)
        (path / "old" / "file").write_text("complete")
        return path

    def dumps() -> Path:
        from tests.support.wikipedia_dumps import dump, pages

        ((path := start("dumps")) / "dump.xml").write_bytes(dump(pages(60)))
        return path

    def after_uploads() -> Path:
        uploads()
        return start("plain")

    starts: dict[str, Callable[[], Path]] = {
        "plain": lambda: start("plain"),
        "trained": lambda: start("trained", train(*replacing, "train.steps=2")),
        "converted": lambda: start("converted", ("convert", "runs/a", "hf"), after="trained"),
        "after uploads": after_uploads,
        "uploads": uploads,
        "tokens": tokens,
        "old copy": old_copy,
        "dumps": dumps,
    }

    def writer(name: str, arguments: tuple[str, ...], place: str, final: str, **options: Any) -> Writer:
        return Writer(name, arguments, starts[place], final, **options)

    def again(name: str, command: tuple[str, ...], final: str, **options: Any) -> Writer:
        """The command with --overwrite, where its output from other input exists."""
        prepare = partial(start, f"{name} again", (*command, "old.jsonl"))
        return Writer(f"{name} --overwrite", (*command, "text.jsonl", "--overwrite"), prepare, final, **options)

    inspect, check = ("inspect", "{}", "--check"), ("data", "inspect", "{}", "--check")
    hdf5 = {"group": "set", "unless": ".bert_training.part/unnamed", "reader": ("data", "inspect", "{}_00000.hdf5")}
    hdf5["modules"] = PREPARE
    pair = {"group": "pair", "marker": "tok_text_document.idx", "reader": check, "weight": 4, "modules": PREPARE}
    return [
        writer("save", train(*saving, "train.steps=4", "checkpoint.export_hf=false"), "plain", step,
               marker="complete.json", reader=inspect, is_exact=False, extra=run_extra + "|runs/a/(metrics|config)"),
        writer("save to a store", train(*saving, "train.steps=3", "checkpoint.export_hf=false",
                                        f"checkpoint.directory={stored}/{{n}}/save"), "plain", r"step_\d+",
               marker="complete.json", reader=("inspect", f"{stored}/{{n}}/save/{{}}", "--check"), is_exact=False,
               remote=lambda n: dict.fromkeys(stored_objects(servers, f"{n}/save/"), "has a time"), weight=1),
        writer("metrics and run directory", train("train.steps=6", "checkpoint.export_hf=false"), "plain",
               r"runs/a/(metrics\.jsonl|config\.yaml|run\.json)", extra=run_extra + "|runs/a/checkpoints/"),
        writer("export", train(*replacing, "train.steps=4"), "trained", "runs/a/model", reader=("inspect", "{}"),
               extra=run_extra + "|runs/a/(metrics|config|checkpoints)"),
        *(writer(f"convert to {kind}", ("convert", "hf", "out", "--to", kind, *layout), "converted", "out",
                 reader=() if kind == "dcp" else ("inspect", "{}"), weight=4)
          for kind, layout in (("hf", ()), ("native", ()), ("nxd", ("--layout", "tp=2,kv_multiplier=2")), ("dcp", ()))),
        writer("tokenize", (*tokenize, "text.jsonl"), "plain", r"(tok_text_document)\.(bin|idx)$", **pair),
        again("tokenize", tokenize, r"(tok_text_document)\.(bin|idx)$", **pair, may_vanish=True),
        writer("pack", (*pack, "text.jsonl"), "plain", "packed", reader=check, modules=PREPARE),
        again("pack", pack, "packed", reader=check, modules=PREPARE),
        writer("bert", (*bert, "text.jsonl"), "plain", r"(bert_training)_\d+\.hdf5", **hdf5),
        again("bert", bert, r"(bert_training)_\d+\.hdf5", **hdf5, may_vanish=True),
        writer("train-tokenizer", (*tokenizer, "text.jsonl"), "plain", "tokenizer", weight=4,
               modules=PREPARE),
        again("train-tokenizer", tokenizer, "tokenizer", weight=4, modules=PREPARE),
        writer("extract", ("data", "extract", "dump.xml", "--output", "wiki", "--shard-size", "20K", "--workers", "1"),
               "dumps", r"wiki/wiki_\d+\.jsonl$", extra="wiki/", weight=4),
        writer("get from a store", ("get", f"{stored}/source", "out"), "after uploads", "out"),
        writer("get from the Hub", ("get", "hf://me/source", "out"), "after uploads", "out", reader=("inspect", "{}")),
        writer("get --unpack", ("get", f"{servers.web}/data.tar", "out", "--unpack"), "plain", "out", weight=4),
        writer("get --overwrite", ("get", f"{stored}/source", "old", "--overwrite"), "old copy", "old"),
        writer("Hub cache", ("inspect", "me/source"), "after uploads",
               r"home/hub/models--me--source/(blobs/\w+$|snapshots/\w+/.*)", extra="home/"),
        writer("chunk cache", train("train.steps=2", "checkpoint.export_hf=false", "checkpoint.every=0",
                                    "data.source=tokens", f"data.paths=[{stored}/tokens/tok_text_document]",
                                    "data.cache.directory=cache"), "tokens", r"cache/\w\w/\w+",
               extra=r"runs/|cache/\w+$", weight=1),
        writer("push to a store", ("push", "runs/a", f"{stored}/{{n}}/new"), "uploads", "()", group="all",
               marker="trainyard-manifest.json", remote=lambda n: stored_objects(servers, f"{n}/new/")),
        writer("push to the Hub", ("push", "runs/a", "hf://me/new-{n}", "--no-plan"), "uploads", "()", group="all",
               remote=lambda n: hub_files(servers, f"me/new-{n}")),
        writer("report", ("report", "runs/a", "--no-plan"), "trained", r"runs/a/report\.html"),
    ]  # fmt: skip
