"""`trainyard cache`: what has been compiled, and looking after it."""

import time
from pathlib import Path
from typing import Annotated

import typer

from trainyard import devices
from trainyard.cli.console import ProgressDisplay
from trainyard.compile import inductor_cache
from trainyard.core.errors import UserError
from trainyard.devices.neuron import compile_cache
from trainyard.precompile import cache_entries as kept_code
from trainyard.precompile.archive import pack_cache as pack_files
from trainyard.precompile.archive import unpack_cache as unpack_files
from trainyard.precompile.precompile import read_records

app = typer.Typer(
    help="Look after compiled code: what precompile and train keep under ~/.cache/trainyard, or TRAINYARD_CACHE.",
    no_args_is_help=True,
    add_completion=False,
)
GIB, MIB = 2**30, 2**20

DeviceOption = Annotated[str, typer.Option("--device", help="Whose toolchain it is: cpu, cuda or auto.")]


@app.command("ls")
def ls(
    device: DeviceOption = "auto",
    neuron: Annotated[Path | None, typer.Option("--neuron", metavar="DIR", help="A cache of neuronx-cc, too.")] = None,
) -> None:
    """List compiled graphs: when used last, size, time to compile, what they compute.

    Examples:

      trainyard cache ls

      TRAINYARD_CACHE=/shared/cache trainyard cache ls --neuron /var/tmp/neuron-compile-cache
    """
    here = inductor_cache.cache_dir(devices.select(device))
    found = kept_code.cache_dirs(inductor_cache.cache_root())
    for place in found if here in found or not here.exists() else [*found, here]:
        entries = kept_code.list_graphs(place)
        size = kept_code.total_bytes(place)
        mark = "  (this machine's)" if place == here else ""
        print(f"{place}: {len(entries)} graphs, {size / MIB:,.1f} MiB{mark}")
        for entry in entries:
            took = f"{entry.compile_seconds:.1f} s" if entry.compile_seconds else "-"
            print(
                f"  {_format_age(entry.last_used):>8}  {entry.size_bytes / 1024:8.1f} KiB  {took:>8}  {entry.key[:16]}  {entry.name}"
            )
    if not found and not here.exists():
        print(f"{inductor_cache.cache_root()}: nothing compiled yet")
    _print_filesystem_note()
    root = neuron or Path(compile_cache.cache_location())
    if neuron or root.is_dir():
        modules = compile_cache.list_entries(root)
        print(f"{root}: {len(modules)} graphs of neuronx-cc")
        for module in modules:
            age = _format_age(module.modified_at)
            print(
                f"  {age:>8}  {module.size_bytes / 1024:8.1f} KiB  {module.state:>8}  {module.key}  {module.compiler_version}"
            )


@app.command("verify")
def verify(
    device: DeviceOption = "auto",
    remove: Annotated[bool, typer.Option("--remove", help="Remove what is damaged; it is compiled again.")] = False,
) -> int:
    """Find damaged entries: libraries that are cut off, entries that are not what their name says.

    Examples:

      trainyard cache verify

      trainyard cache verify --remove
    """
    place = _existing_cache_dir(device)
    start = time.monotonic()

    def see(count: int) -> None:
        if time.monotonic() - start > 2 and count % 1000 == 0:
            print(f"{count} files ...", flush=True)

    damaged = kept_code.find_damage(place, see)
    for path, why in damaged.items():
        print(f"{path}: {why}{', removed' if remove else ''}")
        if remove:
            kept_code.remove_atomically(path)
    print(f"{place}: {len(damaged)} damaged" + ("" if remove or not damaged else "; --remove removes them"))
    return 1 if damaged and not remove else 0


@app.command("clean")
def clean(
    device: DeviceOption = "auto",
    others: Annotated[bool, typer.Option("--others", help="Only what other toolchains have compiled.")] = False,
    to: Annotated[
        float | None, typer.Option("--to", min=0, metavar="GIB", help="Only what was used longest ago.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Also while something is being compiled.")] = False,
) -> None:
    """Remove compiled code: all of it, other toolchains' only, or the oldest until --to GiB are left.

    Examples:

      trainyard cache clean --others

      trainyard cache clean --to 10
    """
    root = inductor_cache.cache_root()
    if to is not None:
        print(f"{root}: {inductor_cache.trim(root, int(to * GIB)) / MIB:,.1f} MiB removed")
        return
    here = inductor_cache.cache_dir(devices.select(device))
    chosen = (
        [place for place in kept_code.cache_dirs(root) if place != here] if others else [*kept_code.cache_dirs(root)]
    )
    if not others and here.exists() and here not in chosen:
        chosen.append(here)
    for place in chosen:
        if not force and kept_code.active_locks(place):
            raise UserError(f"{place}: something is being compiled; wait for it, or --force")
    for place in chosen:
        size = kept_code.total_bytes(place)
        kept_code.remove_atomically(place)
        print(f"{place}: {size / MIB:,.1f} MiB removed")
    if not chosen:
        print(f"{root}: nothing to remove")


@app.command("clear-locks")
def clear_locks(device: DeviceOption = "auto") -> None:
    """Remove locks that nobody holds. One that a process holds stays.

    Example:

      trainyard cache clear-locks
    """
    place = _existing_cache_dir(device)
    gone, held = kept_code.clear_locks(place), kept_code.active_locks(place)
    print(f"{place}: {gone} locks removed" + (f", {len(held)} in use" if held else ""))


@app.command("pack")
def pack(
    target: Annotated[Path, typer.Argument(metavar="FILE.tar", help="A file that is new.")],
    run: Annotated[
        str | None, typer.Option("--run", help="Only what this run needs: its log.name, once precompiled.")
    ] = None,
    device: DeviceOption = "auto",
) -> None:
    """Write compiled code to one file, for nodes to unpack.

    Examples:

      trainyard cache pack all.tar

      trainyard cache pack my-run.tar --run my-run
    """
    place = _existing_cache_dir(device)
    if target.exists():
        raise UserError(f"{target}: exists; name a new file")
    if not target.absolute().parent.is_dir():
        raise UserError(f"{target}: no such directory to write to")
    known = read_records(place)
    chosen = [record for record in known if run in (None, record["name"])]
    if run and not chosen:
        names = ", ".join(sorted({record["name"] for record in known})) or "nothing yet"
        raise UserError(f"--run {run}: not precompiled here; here: {names}")
    if run:
        names_of = {name for record in chosen for name in record["files"]}
        names_of |= {str(Path(record["path"]).relative_to(place)) for record in chosen}
    else:
        names_of = {str(path.relative_to(place)) for path in inductor_cache.list_files(place)} - {
            inductor_cache.FINGERPRINT_FILE
        }
        names_of = {name for name in names_of if not name.startswith(("locks/", "logs/", "."))}
    contents = pack_files(place, target, sorted(names_of), inductor_cache.fingerprint(devices.select(device)))
    print(f"{target}: {len(contents.files)} files, {contents.total_bytes / MIB:,.1f} MiB")


@app.command("unpack")
def unpack(
    source: Annotated[Path, typer.Argument(metavar="FILE.tar", help="From `trainyard cache pack`.")],
    device: DeviceOption = "auto",
) -> None:
    """Put packed code into this machine's cache. It is run by training: unpack only what you trust.

    Example:

      srun --ntasks-per-node 1 trainyard cache unpack /shared/my-run.tar
    """
    chosen = devices.select(device)
    place = inductor_cache.cache_dir(chosen)
    if not source.is_file():
        raise UserError(f"{source}: no such file")
    total = source.stat().st_size
    with ProgressDisplay("unpack") as screen:
        contents = unpack_files(
            source,
            place,
            inductor_cache.fingerprint(chosen),
            lambda done: screen.update(done, total, "of compiled code"),
        )
    inductor_cache.prepare_cache(chosen)
    print(f"{place}: {len(contents.files)} files, {contents.total_bytes / MIB:,.1f} MiB")
    _print_filesystem_note()


def _existing_cache_dir(device: str) -> Path:
    place = inductor_cache.cache_dir(devices.select(device))
    if not place.is_dir():
        raise UserError(f"{place}: nothing compiled yet; trainyard precompile FILE does")
    return place


def _print_filesystem_note() -> None:
    kind = inductor_cache.file_system(inductor_cache.cache_root())
    if kind in inductor_cache.UNSAFE_FILE_SYSTEMS and not inductor_cache.user_cache_dir():
        where = inductor_cache.cache_root()
        print(f"{where}: on {kind}, whose locks may not hold between hosts: each host has its own directory")


def _format_age(when: float) -> str:
    """How long ago, in the largest unit that fits."""
    seconds = max(time.time() - when, 0.0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
