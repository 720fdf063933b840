"""The manifest of an upload to an object store: size and SHA-256 of all files, and whether the upload is complete.

It is the first file of `trainyard push`, with the names of all files, and the last, with their hashes. So a reader can
tell half an upload from a directory that others wrote.
"""

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from trainyard.core.errors import UserError, one_line
from trainyard.core.quantities import counted
from trainyard.remote.object_store import ObjectStore, translate_error

MANIFEST_FILE = "trainyard-manifest.json"


class Manifest(NamedTuple):
    files: dict[str, tuple[int, str]]
    """Size in bytes and SHA-256 of each file of an upload; without the latter while the upload is not complete."""
    is_complete: bool


def manifest_text(entries: Mapping[str, dict[str, Any]], is_complete: bool) -> bytes:
    return json.dumps({"complete": is_complete, "files": dict(sorted(entries.items()))}, indent=1).encode()


def read_manifest(store: ObjectStore, path: str, label: str) -> Manifest | None:
    """The manifest of the upload at a path, if there is one. Raises UserError if it cannot be understood."""
    try:
        content = store.filesystem.cat_file(f"{path}/{MANIFEST_FILE}")
    except (FileNotFoundError, PermissionError):  # S3 without the right to list answers 403 for a missing object
        return None
    except Exception as error:
        raise translate_error(error, label, {}) from None
    try:
        data = json.loads(content)
        files = {str(name): (int(file["size"]), str(file.get("sha256", ""))) for name, file in data["files"].items()}
        return Manifest(files, data.get("complete", True) is True)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{label}/{MANIFEST_FILE}: not a manifest: {one_line(error)}") from None


def check_upload(store: ObjectStore, path: str, pattern: str, sizes: dict[str, int], label: str) -> dict[str, str]:
    """The SHA-256 of the files that match a glob below a path, from the manifest there or in a directory above. Raises
    UserError unless the upload is complete and has these sizes."""
    parts = path.split("/")
    roots = ("/".join(parts[:depth]) for depth in range(len(parts), 0, -1))
    found = ((root, manifest) for root in roots if (manifest := read_manifest(store, root, label)))
    root, manifest = next(found, (path, Manifest({}, True)))
    prefix = path[len(root) + 1 :] + "/" if path != root else ""
    named = {name.removeprefix(prefix): entry for name, entry in manifest.files.items() if name.startswith(prefix)}
    expected = {name: entry for name, entry in named.items() if fnmatchcase(name, pattern)}
    if expected and not manifest.is_complete:
        there = sum(sizes.get(name) == size for name, (size, _) in expected.items())
        raise UserError(
            f"{label}: an upload that did not finish: {there} of {counted(len(expected), 'file')} arrived; "
            "the same `trainyard push` completes it"
        )
    for name, (size, _) in expected.items():
        if sizes.get(name) != size:
            raise UserError(f"{label}/{name}: missing or of another size than {MANIFEST_FILE} says; upload it again")
    return {name: digest for name, (_, digest) in expected.items()}
