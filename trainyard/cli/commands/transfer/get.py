"""`trainyard get`: Download models, tokenizers and data: from the Hub, S3 and the web."""

import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from trainyard.cli.console import ProgressDisplay, interrupt_on_terminate
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted, size_text

if TYPE_CHECKING:
    from trainyard.remote.demo_datasets import DemoDataset

UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def get(
    source: Annotated[
        str | None, Argument(metavar="SOURCE", help="OWNER/NAME or hf://... on the Hub, s3://, https://, or a NAME.")
    ] = None,
    destination: Annotated[
        str | None, Argument(metavar="DEST", help="File or directory to create. Default: the name of the source.")
    ] = None,
    list_names: Annotated[bool, Option("--list", help="List the data sets that have a NAME.")] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Print files and sizes; download nothing.")] = False,
    sha256: Annotated[str | None, Option(metavar="HEX", help="SHA-256 that the file must have.")] = None,
    unpack: Annotated[bool, Option("--unpack", help="Unpack a .tar, .tar.gz or .zip into DEST.")] = False,
    max_size: Annotated[str, Option(metavar="SIZE", help="Maximum size of the unpacked archive.")] = "1T",
    include: Annotated[list[str] | None, Option(metavar="GLOB", help="Only files that match; repeatable.")] = None,
    all_files: Annotated[
        bool, Option("--all", help="All files of a model; default: configuration, tokenizer, safetensors.")
    ] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace DEST if it exists.")] = False,
    streams: Annotated[int, Option(min=1, max=64, help="Number of parallel transfers.")] = 8,
) -> None:
    """Download a model, a data set or a file, in parallel, checked and resumable.

    DEST appears when everything is complete and checked: its size, and its hash if the source has one (LFS files of the
    Hub, S3, Content-MD5, --sha256). Until then the data is in .DEST.part next to it, where the same command continues
    after an interruption. Tokens and keys come from the environment (HF_TOKEN, AWS_PROFILE, ~/.netrc) and are never
    stored.

    Examples:

      trainyard get --list

      trainyard get deepseek-ai/deepseek-coder-1.3b-base

      trainyard get hf://datasets/OWNER/NAME@main/data/*.parquet data

      trainyard get megatron-wikipedia data

      trainyard get sample-wikipedia data

      trainyard get https://example.com/text.tar.gz text --unpack
    """
    from trainyard.remote.catalog import DATASETS
    from trainyard.remote.demo_datasets import DEMO_DATASETS
    from trainyard.remote.get import GetOptions, check_existing, choose_target, list_source
    from trainyard.remote.get import get as run_get

    if list_names:
        print_datasets()
        return
    if source is None:
        raise UserError("get: give a SOURCE, or --list")
    if source in DEMO_DATASETS:
        write_demo_dataset(DEMO_DATASETS[source], destination, dry_run, overwrite)
        return
    dataset = DATASETS.get(source)
    options = GetOptions(
        sha256, unpack or bool(dataset and dataset.unpack), parse_size(max_size), all_files, tuple(include or ())
    )
    sources = dataset.sources if dataset else (source,)
    with interrupt_on_terminate():
        listing = list_source(sources, options)
        if dataset:
            listing = replace(listing, is_directory=not options.unpack)
        if dry_run:
            for file in listing.files:
                print(f"{_size_text(file.size):>12}  {file.name}")
            print(f"{_size_text(listing.size):>12}  in {counted(len(listing.files), 'file')}; nothing is downloaded")
            return
        target = choose_target(listing, destination or (dataset.name if dataset else None), options)
        if os.path.lexists(target) and not overwrite and not (target.is_dir() and not any(target.iterdir())):
            if options.unpack:
                raise UserError(f"{target}: already exists; --overwrite replaces it")
            check_existing(listing, target)
            print(
                f"{_short(target)}: complete already, {_size_text(listing.size)} in "
                f"{counted(len(listing.files), 'file')}"
            )
            return
        start = time.monotonic()
        with ProgressDisplay("download") as progress:
            count = run_get(sources, listing, target, options, progress.update, streams)
    seconds = max(time.monotonic() - start, 1e-9)
    rate = f" ({size_text(listing.size / seconds)}/s)" if listing.size else ""
    print(f"{_short(target)}: {counted(count, 'file')}, {_size_text(listing.size)} in {seconds:.1f} s{rate}")
    if dataset:
        print(f"license: {dataset.license}")
        print(f"next: {dataset.next_command.format(dest=destination or dataset.name)}")


def write_demo_dataset(dataset: "DemoDataset", destination: str | None, dry_run: bool, overwrite: bool) -> None:
    """Make a small data set on this machine."""
    target = Path(destination or dataset.name).expanduser()
    if os.path.lexists(target) and not overwrite and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(f"{target}: already exists; --overwrite replaces it")
    if dry_run:
        print(f"{target}: {dataset.description}; nothing is written")
        return
    count = dataset.write(target)
    size = sum(path.stat().st_size for path in target.iterdir())
    print(f"{_short(target)}: {counted(count, 'document', ',')}, {_size_text(size)}")
    print(f"license: {dataset.license}")
    print(f"next: {dataset.next_command.format(dest=destination or dataset.name)}")


def print_datasets() -> None:
    """The named data sets with size, license and the next command."""
    from trainyard.remote.catalog import DATASETS
    from trainyard.remote.demo_datasets import DEMO_DATASETS
    from trainyard.remote.get import ask_sizes

    if sys.stderr.isatty():
        print("asking the sources for sizes ...", file=sys.stderr)
    sizes = ask_sizes({dataset.name: dataset.sources for dataset in DATASETS.values()})
    for dataset in DATASETS.values():
        print(f"{dataset.name}: {dataset.description}")
        size = _size_text(sizes[dataset.name]) if sizes.get(dataset.name) else dataset.size
        print(f"  size: {size or 'unknown, its source does not answer'}; license: {dataset.license}")
        for place in dataset.sources:
            print(f"  from: {place}")
        print(f"  get:  trainyard get {dataset.name} {dataset.name}")
        print(f"  next: {dataset.next_command.format(dest=dataset.name)}")
    for demo in DEMO_DATASETS.values():
        print(f"{demo.name}: {demo.description}")
        print(f"  license: {demo.license}")
        print(f"  get:  trainyard get {demo.name} {demo.name}")
        print(f"  next: {demo.next_command.format(dest=demo.name)}")


def parse_size(text: str) -> int:
    """Bytes of a text such as 500M or 1.5T."""
    match = re.fullmatch(r"([\d.]+)\s*([kmgt]?)(i?b)?", text.strip().lower())
    try:
        return int(float(match[1]) * UNITS[match[2]]) if match else int(text)
    except ValueError:
        raise UserError(f"--max-size {text}: expected a size such as 500M, 20G or 1T") from None


def _short(path: Path) -> str:
    """The path as one would type it here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _size_text(size: int | None) -> str:
    return "unknown size" if size is None else size_text(size)
