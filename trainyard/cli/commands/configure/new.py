"""`trainyard new`: Write a configuration file for your data, model size and hardware."""

import re
import sys
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from typer import Argument, Option

from trainyard import devices
from trainyard.config.load import load
from trainyard.config.schema import Config
from trainyard.core.atomic_files import atomic_write_text
from trainyard.core.errors import UserError
from trainyard.data.formats.documents import match_paths
from trainyard.data.formats.megatron_bin import is_token_file
from trainyard.data.loading.build import data_vocab_size
from trainyard.evaluate.data_sets import ARROW_STATE_FILE, HDF5_SUFFIXES
from trainyard.preflight.plan.compare_measured import catalog_hardware
from trainyard.preflight.plan.hardware.microbenchmark import measure_cpu
from trainyard.preflight.plan.hardware.spec import Hardware, parse_hardware
from trainyard.preflight.plan.search import LayoutSearch, override_values
from trainyard.remote.location import is_url

BASE = "tiny-llama"
SHAPE_KEYS = ("hidden", "layers", "heads", "kv_heads", "ffn")
SIZES: dict[str, tuple[int, int, int, int, int, int, float]] = {
    "125m": (768, 12, 12, 4, 2048, 1024, 6e-4),
    "350m": (1024, 24, 16, 8, 2816, 1024, 5e-4),
    "1b": (2048, 16, 32, 8, 8192, 2048, 3e-4),
    "8b": (4096, 32, 32, 8, 14336, 4096, 3e-4),
    "70b": (8192, 80, 64, 8, 28672, 4096, 1.5e-4),
}
"""The values of SHAPE_KEYS, tokens per sample and learning rate of each size. From 1b on, the shapes
are those of Llama 3. The size `tiny` is that of the base."""
SIZE_NAMES = ("tiny", *SIZES)
STEPS, GLOBAL_BATCH = 10_000, 256
"""Length and batch of a run of any size but `tiny`."""
VOCAB_MULTIPLE = 64
BUILT_IN_TEXT = "built-in text"
COMMENTS = {
    "base": "has all other keys; see trainyard config FILE",
    "hardware": "what trainyard plan FILE assumes",
    "model": "vocab: at least that of data.tokenizer",
    "data": "your files; tokenizer: bytes, a tokenizer.json, or OWNER/NAME on the Hub",
    "train": "optimizer steps, and samples in each",
    "optimizer": "peak learning rate",
    "schedule": "steps to the peak, and the learning rate at the end",
    "layout": "the fastest that fits: trainyard plan FILE --search",
    "evaluate": "steps between evaluations on held-out samples",
    "checkpoint": "steps between checkpoints",
    "log": "name of the run directory in runs/",
}
T = TypeVar("T")
Sections = dict[str, Any]
"""Keys of the file by section, in the order of the file."""


def new(
    file: Annotated[Path, Argument(metavar="FILE", help="YAML file to write, such as my.yaml. It must not exist.")],
    data: Annotated[
        str | None,
        Option(
            metavar="PATH",
            help="Text, JSON lines, Parquet, PREFIX of .bin and .idx, packed rows, or a glob. Default: built-in text.",
        ),
    ] = None,
    size: Annotated[
        str | None, Option(metavar="SIZE", help=f"Weights of the model: {', '.join(SIZE_NAMES)}. Default: tiny.")
    ] = None,
    hardware: Annotated[str | None, Option(metavar="NAME:COUNT", help="Such as h200:8. Default: this machine.")] = None,
) -> None:
    """Write a configuration file of about ten lines for your data, model size and hardware.

    Asks for what the options do not give; without a terminal, the defaults hold. The file names a base, which has all
    other keys, and the fastest layout that fits the hardware.

    Examples:

      trainyard new my.yaml

      trainyard new my.yaml --data 'text/*.jsonl' --size 125m --hardware h200:8
    """
    target = file.expanduser()
    if target.suffix not in (".yaml", ".yml"):
        raise UserError(f"{file}: not the name of a YAML file; nearest: {file}.yaml")
    if target.exists():
        raise UserError(f"{file}: exists already; name another file, or remove it first")
    if not target.parent.is_dir():
        raise UserError(f"{file}: there is no directory {target.parent}")
    data_keys = _answer(data, "Data to train on, a path or glob", BUILT_IN_TEXT, read_data)
    chosen = _answer(size, f"Model size: {', '.join(SIZE_NAMES)}", "tiny", read_size)
    spec = _answer(hardware, "Hardware, such as h200:8 or trn1.32xlarge:4", local_hardware(), read_hardware)
    sections = {"base": BASE, **make_sections(data_keys, chosen, spec), "log": {"name": run_name(target)}}
    atomic_write_text(target, file_text(sections, str(file)))
    print(f"  written      {file}")
    print(f"Next: trainyard train {file} --smoke   (a trial of seconds)")


def _answer(given: str | None, question: str, default: str, read: Callable[[str], T]) -> T:
    """Read an option, the answer in a terminal (asked for again if it is wrong), or the default."""
    if given is not None or not sys.stdin.isatty():
        return read(default if given is None else given)
    while True:
        try:
            return read(input(f"{question} [{default}]: ").strip() or default)
        except EOFError:
            raise UserError("new: the input ended; use --data, --size and --hardware") from None
        except UserError as error:
            print(error)


def read_data(text: str) -> Sections:
    """The keys of the data section that a path means."""
    if text == BUILT_IN_TEXT:
        return {"paths": []}
    paths = [Path(text)] if is_url(text) else match_paths(text)
    if is_token_file(Path(text)) or (paths and all(map(is_token_file, paths))):
        return {"source": "tokens", "paths": [text]}
    if not paths:
        raise UserError(f"--data {text}: no such file; nearest: '*.txt', or '{BUILT_IN_TEXT}'")
    if any(path.suffix in HDF5_SUFFIXES for path in paths):
        raise UserError(f"--data {text}: sentence pairs are for BERT; write a file with base: bert-large-phase1")
    if all((path / ARROW_STATE_FILE).is_file() for path in paths):
        from trainyard.data.formats.arrow_dataset import row_length

        return {"source": "arrow", "paths": [text], "seq_len": row_length(paths[0])}
    return {"paths": [text], "tokenizer": "bytes"}


def read_size(text: str) -> str:
    if text.lower() not in SIZE_NAMES:
        raise UserError(f"--size {text}: not one of {', '.join(SIZE_NAMES)}")
    return text.lower()


def read_hardware(text: str) -> Hardware:
    return parse_hardware(text, measure=measure_cpu)


def local_hardware() -> str:
    """This machine in the form of `parse_hardware`; one rank if it has no device of the catalog."""
    device = devices.select("auto")
    found = catalog_hardware(device.describe(), device.max_local_ranks())
    return "cpu:1" if found.startswith("cpu:") else found


def make_sections(data: Sections, size: str, hardware: Hardware) -> Sections:
    """The keys in which the file differs from its base, with the fastest layout that fits."""
    is_cpu, ranks = hardware.entry.kind.is_host, hardware.ranks
    sections: Sections = {"hardware": "this machine" if is_cpu else f"{hardware.count} x {hardware.name}"}
    base = load(BASE)
    model: Sections = {}
    steps, batch, every = base.train.steps, base.train.global_batch, base.evaluate.every
    if size in SIZES:
        *shape, seq_len, lr = SIZES[size]
        model = {"vocab": base.model.vocab, **dict(zip(SHAPE_KEYS, shape, strict=True))}
        sections |= {"optimizer": {"lr": lr}, "schedule": {"warmup_steps": 200, "min_lr": round(lr / 10, 8)}}
        data = {"seq_len": seq_len, **data}
        steps, batch, every = STEPS, GLOBAL_BATCH, 500
    if "seq_len" in data:
        model["max_positions"] = data["seq_len"]
    train = {"steps": steps, "global_batch": -(-batch // ranks) * ranks}
    sections |= {"train": train, "evaluate": {"every": every}, "checkpoint": {"every": every}}
    sections["data"] = data
    if not is_cpu:
        sections["precision"] = {"kind": "bf16"}
    if ranks > 1:
        sections["layout"] = {"ranks": ranks}
    if hardware.lnc != next(iter(hardware.entry.ranks_per_device)):
        sections["device"] = {"lnc": hardware.lnc}
    if data.get("source") and (vocab := data_vocab_size(load(BASE, _overrides({"data": data, "model": model})).data)):
        model["vocab"] = -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    if model:
        sections["model"] = model
    if size in SIZES or ranks > 1 or not is_cpu:
        _add_layout(sections, size, hardware)
    return {name: sections[name] for name in ("hardware", *Config.model_fields) if name in sections}


def _add_layout(sections: Sections, size: str, hardware: Hardware) -> None:
    sections["train"]["micro_batch"] = 1
    config = load(BASE, _overrides(sections))
    ranking = LayoutSearch(config, hardware).best(1)
    if not ranking.layouts:
        raise UserError(
            f"--size {size}: does not fit {hardware.describe()}; nearest: a smaller --size, or more devices"
        )
    for override in ranking.layouts[0].overrides(override_values(config)):
        key, _, value = override.partition("=")
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = yaml.safe_load(value)


def _overrides(sections: Sections) -> list[str]:
    """The keys as overrides of the base."""
    return [
        f"{section}.{key}={_flow(value)}"
        for section, keys in sections.items()
        if isinstance(keys, dict)
        for key, value in keys.items()
    ]


def run_name(file: Path) -> str:
    return re.sub(r"[^\w.\-]", "-", file.stem)


def file_text(sections: Sections, file: str) -> str:
    """The file, a line for each section."""
    lines = [f"{section}: {_flow(value)}" for section, value in sections.items()]
    width = min(max(map(len, lines)), 60)
    comments = [COMMENTS.get(section, "").replace("FILE", file) for section in sections]
    lines = [f"{line:<{width}}  # {text}" if text else line for line, text in zip(lines, comments, strict=True)]
    return "\n".join(lines) + "\n"


def _flow(value: object) -> str:
    """A value on one line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=inf)
    return text.removesuffix("\n").removesuffix("\n...").strip()
