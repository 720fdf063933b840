"""Repositories on the Hugging Face Hub: their files, and errors that say what to do next.

The client of huggingface_hub supplies endpoint, token and offline mode. Its own downloads neither resume a file nor
check its hash; `fetch.py` transfers the files.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any
from urllib.error import HTTPError

from trainyard.core.errors import UserError, one_line
from trainyard.remote.credentials import redact
from trainyard.remote.location import COMMIT_HASH, HubLocation, endpoint
from trainyard.remote.sources.remote_file import Checksum, RemoteFile
from trainyard.remote.sources.retry import AttemptLimit, SourceUnavailable, TransferError, with_retries
from trainyard.remote.sources.web import BUSY, WebFile

CLIENT_LIMIT = AttemptLimit(3)
"""Attempts at requests that huggingface_hub makes: it repeats some of them itself."""
TOKEN_HELP = "set HF_TOKEN or run `hf auth login`"


@dataclass(frozen=True)
class HubFile:
    path: str
    size: int
    blob: str
    """The name of the content in the cache: its SHA-256 if it is in LFS, else its id in git."""
    checksum: Checksum


@dataclass(frozen=True)
class HubListing:
    location: HubLocation
    commit: str
    files: tuple[HubFile, ...]

    def remote_files(self, paths: list[str], name: Callable[[HubFile], str] | None = None) -> list[RemoteFile]:
        """Some files, for a download. `name` chooses the local name of each."""
        from huggingface_hub import constants, get_token, hf_hub_url

        by_path = {file.path: file for file in self.files}
        token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        out = []
        for path in paths:
            file = by_path[path]
            url = hf_hub_url(self.location.repo, path, repo_type=self.location.kind, revision=self.commit)
            reader = WebFile(url, headers, lambda error: _explain(error, self.location), file.checksum)
            reader.size = file.size
            out.append(
                RemoteFile(name(file) if name else path, f"{self.location}: {path}", file.size, file.blob, reader)
            )
        return out


def list_repository(location: HubLocation) -> HubListing:
    """The files of a repository at the commit of its revision."""
    from huggingface_hub.hf_api import RepoFile

    def request() -> HubListing:
        with _hub_errors(location):
            commit = _commit(location)
            entries = hub_api().list_repo_tree(location.repo, recursive=True, revision=commit, repo_type=location.kind)
            files = []
            for entry in entries:
                if isinstance(entry, RepoFile):
                    lfs = entry.lfs
                    checksum = Checksum("sha256", lfs.sha256) if lfs else Checksum("git", entry.blob_id)
                    files.append(
                        HubFile(
                            entry.path,
                            lfs.size if lfs else entry.size,
                            _plain_id(checksum.digest, location),
                            checksum,
                        )
                    )
        return HubListing(location, commit, tuple(files))

    return with_retries(request, CLIENT_LIMIT)


def resolve_commit(location: HubLocation) -> HubLocation:
    """The location at the commit that its revision is now."""
    if location.revision and COMMIT_HASH.fullmatch(location.revision):
        return location

    def request() -> str:
        with _hub_errors(location):
            return _commit(location)

    return replace(location, revision=with_retries(request, CLIENT_LIMIT))


def hub_api() -> Any:
    """The client of huggingface_hub."""
    from huggingface_hub import HfApi

    return HfApi(library_name="trainyard")


def _commit(location: HubLocation) -> str:
    info = hub_api().repo_info(location.repo, repo_type=location.kind, revision=location.revision)
    return _plain_id(info.sha, location)


def select_paths(location: HubLocation, paths: Iterable[str]) -> list[str]:
    """The files that the path of a location names: a file, all files of a directory, or those that match a glob."""
    wanted = location.path
    paths = [path for path in paths if path != ".gitattributes"]
    if not wanted:
        return paths
    chosen = [path for path in paths if path == wanted or path.startswith(f"{wanted}/") or fnmatchcase(path, wanted)]
    if not chosen:
        close = [path for path in paths if path.rpartition("/")[0] == wanted.rpartition("/")[0]] or paths
        shown = ", ".join(close[:6]) or "nothing"
        raise UserError(f"{location}: no such file; has: {shown}" + (", ..." if len(close) > 6 else ""))
    return chosen


def _plain_id(text: str | None, location: HubLocation) -> str:
    """A commit or blob id, which becomes part of a path."""
    if not text or not re.fullmatch(r"[0-9a-f]{40,64}", text):
        raise UserError(f"{location}: {endpoint()} answers {text!r} where an id is expected")
    return text


@contextmanager
def quiet_client() -> Iterator[None]:
    """Run code of huggingface_hub without its progress bars and warnings."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    logger, disabled = logging.getLogger("huggingface_hub"), are_progress_bars_disabled()
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    if not disabled:
        disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if not disabled:
            enable_progress_bars()


@contextmanager
def _hub_errors(location: HubLocation) -> Iterator[None]:
    """Turn errors of huggingface_hub into TransferError, if they may pass, or a UserError with the next step."""
    try:
        with quiet_client():
            yield
    except Exception as error:
        raise translate_error(error, location) from None


def translate_error(error: Exception, location: HubLocation) -> Exception:
    from huggingface_hub import errors

    repo = str(location)
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if isinstance(error, UserError | TransferError):
        return error
    if isinstance(error, errors.OfflineModeIsEnabled):
        return SourceUnavailable(f"{repo}: HF_HUB_OFFLINE is set")
    if isinstance(error, errors.GatedRepoError):
        return _gated(location)
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(f"{repo}: no branch, tag or commit {location.revision or 'main'}; {_revisions(location)}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return _not_found(location)
    if isinstance(error, errors.EntryNotFoundError):
        return UserError(f"{repo}: no such file")
    if isinstance(error, errors.HFValidationError):
        return UserError(f"{repo}: not the name of a repository; expected OWNER/NAME")
    if status == 401:
        return UserError(f"{repo}: the Hub refuses the token; {TOKEN_HELP}")
    if status == 403:
        return UserError(f"{repo}: the token may not do this (HTTP 403); {TOKEN_HELP} with more rights")
    if status is not None and status in BUSY:
        after = response.headers.get("Retry-After", "") if response is not None else ""
        return TransferError(f"{repo}: HTTP {status}", float(after) if after.isdigit() else None)
    if status == 404:
        return UserError(f"{repo}: no such repository, revision or file at {endpoint()} (HTTP 404)")
    if status is not None:
        reason = getattr(error, "server_message", None) or getattr(response, "reason_phrase", "")
        return UserError(f"{repo}: HTTP {status} {redact(' '.join(str(reason).split()))}".rstrip())
    if type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "requests", "urllib3"):
        return TransferError(
            f"{repo}: {endpoint()} cannot be reached: {redact(one_line(error)) or type(error).__name__}"
        )
    return UserError(f"{repo}: {type(error).__name__}: {redact(one_line(error))}")


def _explain(error: HTTPError, location: HubLocation) -> UserError | None:
    """What an answer to the download of a file means."""
    code = error.headers.get("X-Error-Code")
    if code == "GatedRepo":
        return _gated(location)
    if code == "RepoNotFound" or error.code == 401:
        return _not_found(location)
    if error.code == 403:
        return UserError(f"{location}: access denied (HTTP 403); {TOKEN_HELP} with more rights")
    return None


def _gated(location: HubLocation) -> UserError:
    if _has_token():
        return UserError(f"{location}: its license is not accepted yet with this token; accept it at {location.page}")
    return UserError(
        f"{location}: gated, and there is no token; accept its license at {location.page}, then {TOKEN_HELP}"
    )


def _not_found(location: HubLocation) -> UserError:
    if _has_token():
        return UserError(f"{location}: no such repository, or the token has no access to it; see {location.page}")
    return UserError(f"{location}: no such repository, or a private one: check the name, or {TOKEN_HELP}")


def _has_token() -> bool:
    from huggingface_hub import get_token

    return bool(get_token())


def _revisions(location: HubLocation) -> str:
    try:
        refs = hub_api().list_repo_refs(location.repo, repo_type=location.kind)
    except Exception:
        return f"see {location.page}"
    names = [ref.name for ref in (*refs.branches, *refs.tags)]
    return f"has: {', '.join(names[:8])}" if names else f"see {location.page}"
