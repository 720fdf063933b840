"""Objects that a run reads: listings, versions and byte ranges, repeated while the store is slow or fails.

That costs time, up to a limit. An object that is not the version that was listed is an error; its bytes are never
returned.
"""

from collections.abc import Callable
from typing import TypeVar

from trainyard.core.errors import RunStopped, UserError
from trainyard.remote.object_store import Fault, Messages, ObjectStore, StoredObject, translate_error
from trainyard.remote.sources.retry import TimeLimit, with_retries

T = TypeVar("T")

LIST_LIMIT_S = 60.0
"""Seconds of retries until a listing fails. That is before the first step: a wrong address should not take long."""
READ_LIMIT_S = 600.0
"""Seconds of retries until a read fails. Other ranks wait in a collective meanwhile, for up to half an hour."""
NO_ACCESS = "no access with the credentials of this environment: {}"
MESSAGES: Messages = {
    Fault.MISSING: "no such object any more; restore it",
    Fault.CHANGED: "changed since the run began; restore that version, or start the run again",
    Fault.DENIED: NO_ACCESS,
    Fault.NO_CREDENTIALS: NO_ACCESS,
    Fault.REFUSED: "the store refuses the request: {}",
}


class ObjectReader:
    """The objects of a bucket or host."""

    def __init__(self, url: str) -> None:
        self.store = ObjectStore(url, is_retried=True)
        self.hub_commits: dict[str, str] = {}
        """hf://: the commit that is read of each repository, since branches move."""

    def find(self, url: str) -> StoredObject | None:
        """The object of this URL, as it is now; None if there is none."""
        path = self._path(url)
        info = self._retry(url, lambda: self.store.info(path))
        return self.store.stored(url, info) if info and info["type"] == "file" else None

    def match(self, pattern: str) -> list[StoredObject]:
        """The objects that match a glob, sorted by name; for a name without `*`, those below that prefix."""
        if self.store.is_http:
            return []  # has no listings
        path = self._path(pattern)
        found = self._retry(pattern, lambda: self.store.list_files(path))
        return [self.store.stored(self._url(pattern, name), found[name]) for name in sorted(found)]

    def read(self, stored: StoredObject, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` (exclusive) of this version of the object."""
        return self._retry(stored.url, lambda: self.store.read(stored, start, stop), is_read=True)

    def _path(self, url: str) -> str:
        path = str(self.store.filesystem._strip_protocol(url)).rstrip("/")
        return path if self.store.protocol != "hf" else self._retry(url, lambda: self._hub_path(path))

    def _url(self, pattern: str, path: str) -> str:
        """The URL of a path that was found under another URL, whose first part it shares."""
        for commit in self.hub_commits.values():
            path = path.replace(f"@{commit}/", "/")
        return f"{root_of(pattern)}/{path.lstrip('/').partition('/')[2]}"

    def _hub_path(self, path: str) -> str:
        """The path with the commit that its branch or tag is at when this process first asks."""
        from huggingface_hub import HfApi

        filesystem = self.store.filesystem
        resolved = filesystem.resolve_path(path)
        if not hasattr(resolved, "revision"):  # a bucket
            return path
        name = f"{resolved.repo_type}/{resolved.repo_id}@{resolved.revision}"
        if name not in self.hub_commits:
            api = HfApi(endpoint=filesystem.endpoint, token=filesystem.token)
            info = api.repo_info(resolved.repo_id, repo_type=resolved.repo_type, revision=resolved.revision)
            self.hub_commits[name] = str(info.sha)
        kind = "" if resolved.repo_type == "model" else f"{resolved.repo_type}s/"
        return f"{kind}{resolved.repo_id}@{self.hub_commits[name]}/{resolved.path_in_repo}".rstrip("/")

    def _retry(self, url: str, request: Callable[[], T], is_read: bool = False) -> T:
        def attempt() -> T:
            try:
                return request()
            except Exception as error:
                raise translate_error(error, url, MESSAGES) from None

        # A run that cannot read its data stops as if it had been told to; a wrong address is a mistake.
        limit = TimeLimit(url, READ_LIMIT_S, RunStopped) if is_read else TimeLimit(url, LIST_LIMIT_S, UserError)
        return with_retries(attempt, limit)


def root_of(url: str) -> str:
    """Protocol and first part (bucket or host) of a URL."""
    return "/".join(url.split("/")[:3])
