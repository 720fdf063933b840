"""`trainyard cache`: Manage compiled code: ls, verify, clean, clear-locks, pack, unpack."""

import time
from pathlib import Path
from typing import Annotated

from typer import Argument, Option, Typer

from trainyard import devices
from trainyard.cli.console import ProgressDisplay
from trainyard.core.atomic_files import remove_atomically
from trainyard.core.constants import GIB, MIB
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.devices.neuron import compile_cache
from trainyard.preflight.precompile import cache_entries
from trainyard.preflight.precompile.archive import pack_cache, unpack_cache
from trainyard.preflight.precompile.precompile import read_records
from trainyard.train.compile import inductor_cache

app = Typer(
    help="Manage compiled code, which precompile and train store under ~/.cache/trainyard or TRAINYARD_CACHE.",
    no_args_is_help=True,
    add_completion=False,
)
VERIFY_QUIET_S = 2.0
"""Seconds before `cache verify` reports progress."""

DeviceOption = Annotated[str, Option("--device", help="Toolchain: cpu, cuda or auto.")]
NeuronOption = Annotated[
    Path | None,
    Option("--neuron", metavar="DIR", help="neuronx-cc cache (trn1). Default: the one in use on this machine, if any."),
]


@app.command("ls")
def ls(device: DeviceOption = "auto", neuron: NeuronOption = None) -> None:
    """List compiled graphs: last use, size, compile time and name.

    Examples:

      trainyard cache ls

      TRAINYARD_CACHE=/shared/cache trainyard cache ls

      trainyard cache ls --neuron /var/tmp/neuron-compile-cache
    """
    own = inductor_cache.cache_dir(devices.select(device))
    directories = _cache_directories(own)
    for directory in directories:
        graphs = cache_entries.list_graphs(directory)
        mark = "  (this machine)" if directory == own else ""
        print(
            f"{directory}: {counted(len(graphs), 'graph')}, {cache_entries.total_bytes(directory) / MIB:,.1f} MiB{mark}"
        )
        for graph in graphs:
            seconds = f"{graph.compile_seconds:.1f} s" if graph.compile_seconds else "-"
            age, size = _format_age(graph.last_used), f"{graph.size_bytes / 1024:.1f} KiB"
            print(f"  {age:>8}  {size:>12}  {seconds:>8}  {graph.key[:16]}  {graph.name}")
    if not directories:
        print(f"{inductor_cache.cache_root()}: nothing compiled yet")
    _print_filesystem_note()
    if root := _neuron_directory(neuron):
        entries = compile_cache.list_entries(root)
        print(f"{root}: {len(entries)} neuronx-cc graphs")
        for entry in entries:
            age, size = _format_age(entry.modified_at), f"{entry.size_bytes / 1024:.1f} KiB"
            print(f"  {age:>8}  {size:>12}  {entry.state:>8}  {entry.key}  {entry.compiler_version}")


@app.command("verify")
def verify(
    device: DeviceOption = "auto",
    remove: Annotated[bool, Option("--remove", help="Remove damaged entries; they will be compiled again.")] = False,
    neuron: NeuronOption = None,
) -> int:
    """Find damaged entries: truncated libraries, entries whose content does not match their name, and failed or
    truncated graphs of neuronx-cc.

    Examples:

      trainyard cache verify

      trainyard cache verify --remove
    """
    root = _neuron_directory(neuron)
    directory = _existing_cache_dir(device, required=root is None)
    start, found = time.monotonic(), 0

    def on_file(count: int) -> None:
        if time.monotonic() - start > VERIFY_QUIET_S and count % 1000 == 0:
            print(f"{counted(count, 'file')} ...", flush=True)

    def print_damage(where: Path, damaged: dict[Path, str]) -> None:
        for path, reason in damaged.items():
            print(f"{path}: {reason}{', removed' if remove else ''}")
        print(f"{where}: {len(damaged)} damaged" + ("" if remove or not damaged else "; --remove removes them"))

    if directory:
        damaged = cache_entries.find_damage(directory, on_file)
        for path in damaged if remove else ():
            remove_atomically(path)
        print_damage(directory, damaged)
        found += len(damaged)
    if root:
        entries = compile_cache.damaged_entries(compile_cache.list_entries(root))
        if remove:
            entries = compile_cache.remove_entries(entries)
        print_damage(root, {entry.path: ", ".join(compile_cache.entry_problems(entry)) for entry in entries})
        found += len(entries)
    return 1 if found and not remove else 0


@app.command("clean")
def clean(
    device: DeviceOption = "auto",
    others: Annotated[bool, Option("--others", help="Remove only the code of other toolchains.")] = False,
    to: Annotated[
        float | None, Option(min=0, metavar="GIB", help="Remove the least recently used code until GIB remain.")
    ] = None,
    neuron: Annotated[
        Path | None, Option(metavar="DIR", help="Remove the graphs of this neuronx-cc cache instead.")
    ] = None,
    force: Annotated[bool, Option("--force", help="Also remove directories in which a compiler runs.")] = False,
) -> None:
    """Remove compiled code: all of it, that of other toolchains, or the oldest until --to GiB remain.

    Examples:

      trainyard cache clean --others

      trainyard cache clean --to 10

      trainyard cache clean --neuron /var/tmp/neuron-compile-cache
    """
    root = inductor_cache.cache_root()
    if neuron:
        if others or to is not None:
            raise UserError("--neuron: removes all graphs of that cache; use it without --others and --to")
        return _clean_neuron_cache(_neuron_directory(neuron) or neuron, force)
    if to is not None:
        print(f"{root}: removed {inductor_cache.trim(root, int(to * GIB)) / MIB:,.1f} MiB")
        return None
    own = inductor_cache.cache_dir(devices.select(device))
    directories = [directory for directory in _cache_directories(own) if not others or directory != own]
    for directory in directories:
        if not force and cache_entries.active_locks(directory):
            raise UserError(f"{directory}: a compiler is running; wait for it, or use --force")
    for directory in directories:
        size = cache_entries.total_bytes(directory)
        remove_atomically(directory)
        print(f"{directory}: removed {size / MIB:,.1f} MiB")
    if not directories:
        print(f"{root}: nothing to remove")
    return None


def _clean_neuron_cache(root: Path, force: bool) -> None:
    entries = compile_cache.list_entries(root)
    if not force and any(map(compile_cache.is_being_compiled, entries)):
        raise UserError(f"{root}: a compiler is running; wait for it, or use --force")
    removed = compile_cache.remove_entries(entries, force=force)
    size = sum(entry.size_bytes for entry in removed)
    print(f"{root}: removed {counted(len(removed), 'graph')}, {size / MIB:,.1f} MiB")


@app.command("clear-locks")
def clear_locks(
    device: DeviceOption = "auto",
    neuron: NeuronOption = None,
    minutes: Annotated[float, Option(min=0, help="Minimum age of a neuronx-cc lock; another host may hold it.")] = 60,
) -> None:
    """Remove locks that no process holds.

    Examples:

      trainyard cache clear-locks

      trainyard cache clear-locks --neuron /var/tmp/neuron-cache --minutes 10
    """
    root = _neuron_directory(neuron)
    if directory := _existing_cache_dir(device, required=root is None):
        removed, active = cache_entries.clear_locks(directory), cache_entries.active_locks(directory)
        print(f"{directory}: {counted(removed, 'lock')} removed" + (f", {len(active)} in use" if active else ""))
    if root:
        cleared = compile_cache.clear_locks(compile_cache.list_entries(root), minutes)
        left = sum(len(entry.locks) for entry in compile_cache.list_entries(root))
        in_use = f", {left} in use or younger than {minutes:g} minutes" if left else ""
        print(f"{root}: {counted(len(cleared), 'lock')} removed{in_use}")


@app.command("pack")
def pack(
    target: Annotated[Path, Argument(metavar="FILE.tar", help="New archive file.")],
    run: Annotated[str | None, Option(help="Pack only the code of this precompiled run (its log.name).")] = None,
    device: DeviceOption = "auto",
) -> None:
    """Write compiled code to one archive that other nodes can unpack.

    Examples:

      trainyard cache pack all.tar

      trainyard cache pack my-run.tar --run my-run
    """
    directory = _existing_cache_dir(device)
    assert directory is not None
    if target.exists():
        raise UserError(f"{target}: already exists; name a new file")
    if not target.absolute().parent.is_dir():
        raise UserError(f"{target}: its directory does not exist")
    records = read_records(directory)
    selected = [record for record in records if run in (None, record["name"])]
    if run and not selected:
        known = ", ".join(sorted({record["name"] for record in records})) or "none"
        raise UserError(f"--run {run}: not precompiled here; precompiled runs: {known}")
    if run:
        files = {name for record in selected for name in record["files"]}
        files |= {str(Path(record["path"]).relative_to(directory)) for record in selected}
    else:
        files = {str(path.relative_to(directory)) for path in inductor_cache.list_files(directory)}
        files = {name for name in files if not name.startswith(("locks/", "logs/", "."))}
        files.discard(inductor_cache.FINGERPRINT_FILE)
    contents = pack_cache(directory, target, sorted(files), inductor_cache.fingerprint(devices.select(device)))
    print(f"{target}: {counted(len(contents.files), 'file')}, {contents.total_bytes / MIB:,.1f} MiB")


@app.command("unpack")
def unpack(
    source: Annotated[Path, Argument(metavar="FILE.tar", help="Archive from `trainyard cache pack`.")],
    device: DeviceOption = "auto",
) -> None:
    """Unpack an archive into this machine's cache. Training executes its code: unpack only archives you trust.

    Example:

      srun --ntasks-per-node 1 trainyard cache unpack /shared/my-run.tar
    """
    selected = devices.select(device)
    directory = inductor_cache.cache_dir(selected)
    if not source.is_file():
        raise UserError(f"{source}: no such file")
    total = source.stat().st_size
    fingerprint = inductor_cache.fingerprint(selected)
    with ProgressDisplay("unpack") as progress:
        contents = unpack_cache(source, directory, fingerprint, lambda done: progress.update(done, total))
    inductor_cache.prepare_cache(selected)
    print(f"{directory}: {counted(len(contents.files), 'file')}, {contents.total_bytes / MIB:,.1f} MiB")
    _print_filesystem_note()


def _cache_directories(own: Path) -> list[Path]:
    """Return the directory of every toolchain, and `own` if it exists elsewhere."""
    directories = cache_entries.cache_dirs(inductor_cache.cache_root())
    return directories if own in directories or not own.exists() else [*directories, own]


def _existing_cache_dir(device: str, required: bool = True) -> Path | None:
    directory = inductor_cache.cache_dir(devices.select(device))
    if not directory.is_dir() and required:
        raise UserError(f"{directory}: nothing compiled yet; run trainyard precompile FILE")
    return directory if directory.is_dir() else None


def _neuron_directory(directory: Path | None) -> Path | None:
    """The named neuronx-cc cache, or the one in use if it is a directory of this machine."""
    if directory and not directory.is_dir():
        raise UserError(f"--neuron {directory}: no such directory")
    root = directory or Path(compile_cache.cache_location())
    return root if root.is_dir() else None


def _print_filesystem_note() -> None:
    root = inductor_cache.cache_root()
    kind = inductor_cache.file_system(root)
    if kind in inductor_cache.UNSAFE_FILE_SYSTEMS and not inductor_cache.user_cache_dir():
        print(f"{root}: on {kind}, where locks may not work across hosts; each host uses its own directory")


def _format_age(timestamp: float) -> str:
    """Format the time since `timestamp` in the largest unit that fits."""
    seconds = max(time.time() - timestamp, 0.0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
