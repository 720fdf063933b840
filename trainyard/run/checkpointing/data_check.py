"""Data of a resumed run: its files must be those of the run that wrote the checkpoint."""

import logging

from trainyard.checkpoint.checkpoint import Checkpoint
from trainyard.config.data_schema import DataSection
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.data.loading.fingerprint import Fingerprints, fingerprint_files
from trainyard.data.text.tokenizer import NAMED_TOKENIZERS
from trainyard.devices import Device
from trainyard.parallel.mesh import Mesh
from trainyard.remote.local_copies import local_tokenizer
from trainyard.remote.location import has_urls

FINGERPRINTS_KEY = "data_files"
"""Key of the manifest. Converted checkpoints do not have it."""
ACCEPT = "checkpoint.accept_changed_data=true"
logger = logging.getLogger(__name__)


def fingerprint_data(data: DataSection, refresh: bool = False) -> Fingerprints:
    """Fingerprints of the files of a run, and of its tokenizer if that is not local, by the name that the run has.
    `refresh`: of objects in stores as they are now."""
    files = fingerprint_files(data, refresh=refresh)
    if data.source != "text" or data.tokenizer in NAMED_TOKENIZERS:
        return files
    directory = local_tokenizer(data.tokenizer)
    tokenizer = fingerprint_files(data.model_copy(update={"tokenizer": str(directory)}))
    for path in tokenizer.keys() - files.keys():
        files[path.replace(str(directory), data.tokenizer, 1)] = tokenizer[path]
    return files


def check_data(checkpoint: Checkpoint, now: DataSection, accept_changed: bool, mesh: Mesh, device: Device) -> None:
    """Raise UserError if the rest of the run would see other samples than planned when the checkpoint was written."""
    manifest, before = checkpoint.manifest, checkpoint.config.data
    if manifest.get("converted"):
        return
    problem = None
    if (before.source, before.paths) == (now.source, now.paths):  # other paths are a note of check_compatible
        files = mesh.broadcast_object(lambda: fingerprint_data(now, refresh=True), device)
        problem = _changed_file(manifest[FINGERPRINTS_KEY], files)
    elif before.source == now.source and (has_urls(before.paths) or has_urls(now.paths)):
        note = mesh.broadcast_object(lambda: _compare_moved_files(manifest[FINGERPRINTS_KEY], now), device)
        logger.warning("note: %s", note)
    if problem and not accept_changed:
        raise UserError(f"{problem}, or {ACCEPT}")
    if problem:
        logger.warning("note: %s", problem.partition("; nearest")[0])


def check_same_versions(data: DataSection, mesh: Mesh) -> None:
    """Raise UserError if an object changed while the ranks, one after the other, looked at it."""
    if not has_urls(data.paths):
        return
    of_ranks = mesh.all_gather_object(fingerprint_files(data))
    for of_rank in of_ranks:
        if different := [name for name in of_ranks[0] if of_ranks[0][name] != of_rank.get(name)]:
            raise UserError(f"{different[0]}: changed while the run began; start it again")


def _compare_moved_files(before: Fingerprints, data: DataSection) -> str:
    """Whether the files of a run are the same in another place: on a disk and in a store, or in two stores."""
    were_read = all(isinstance(fingerprint[1], int) for fingerprint in before.values())
    now = fingerprint_files(data, read_blocks=were_read, refresh=True)
    names = f"data.paths={', '.join(data.paths)}"
    if len(now) != len(before):
        return (
            f"{names}: {counted(len(now), 'file')}, and {len(before)} when the checkpoint was "
            "written: other samples follow"
        )
    is_version = not were_read and all(isinstance(fingerprint[1], str) for fingerprint in now.values())
    for (old_name, old), (name, new) in zip(before.items(), now.items(), strict=True):
        if old[0] != new[0]:
            return f"{name}: {new[0]:,} bytes, but {old_name} had {old[0]:,}: other samples follow"
        if (were_read or is_version) and old[1] != new[1]:
            return f"{name}: not the contents of {old_name}: other samples follow"
    same = "equal sizes" if not (were_read or is_version) else "equal sizes and checksums"
    return f"{names}: the same files as in the checkpoint by {same}, in another place: the same samples follow"


def _changed_file(before: Fingerprints, now: Fingerprints) -> str | None:
    hint = "nearest: restore it"
    for path, (size, _) in before.items():
        if path not in now:
            return f"{path}: the checkpoint was written with this file, data.paths does not find it now; {hint}"
        if now[path] != before[path]:
            new_size = now[path][0]
            change = f"{size:,} bytes then, {new_size:,} now" if new_size != size else f"the same {size:,} bytes"
            return f"{path}: its contents changed since the checkpoint was written ({change}); {hint}"
    if added := [path for path in now if path not in before]:
        return f"{added[0]}: added since the checkpoint was written; nearest: remove it"
    return None
