"""Uploads a directory to the Hub as one commit: the repository has all of it or nothing."""

from pathlib import Path

from trainyard.core.errors import UserError
from trainyard.remote.location import HubLocation
from trainyard.remote.sources.hub import CLIENT_LIMIT, hub_api, quiet_client, translate_error
from trainyard.remote.sources.retry import with_retries

CARD = "README.md"
WEIGHTS = ("model", "pytorch_model")
"""Beginnings of the names of weights. Those of an earlier upload that the new one lacks are deleted."""


def parse_target(target: str, location: HubLocation) -> HubLocation:
    if location.kind != "model" or location.path or "/" not in location.repo:
        raise UserError(f"{target}: expected hf://OWNER/NAME or hf://OWNER/NAME@BRANCH")
    return location


def upload_directory(
    directory: Path, location: HubLocation, message: str, private: bool, card_marker: str
) -> tuple[str, bool]:
    """Commit all files of a directory; the repository is created if needed. A card there without `card_marker` stays.
    Returns the URL of the commit, and whether the card was written."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, get_token

    if not get_token():
        raise UserError(f"{location}: pushing needs a token with write access; set HF_TOKEN or run `hf auth login`")
    api = hub_api()

    def commit() -> tuple[str, bool]:
        api.create_repo(location.repo, private=private, exist_ok=True)
        if location.revision:
            api.create_branch(location.repo, branch=location.revision, exist_ok=True)
        present = api.list_repo_files(location.repo, revision=location.revision)
        names = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
        writes_card = CARD not in present or _has_marker(location, card_marker)
        if not writes_card:
            names.remove(CARD)
        stale = [name for name in present if _is_weights(name) and name not in names]
        operations = [
            *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(directory / name)) for name in names),
            *(CommitOperationDelete(path_in_repo=name) for name in stale),
        ]
        # upload_folder would commit large directories in several steps
        info = api.create_commit(
            location.repo, operations=operations, commit_message=message, revision=location.revision
        )
        return str(info.commit_url), writes_card

    def attempt() -> tuple[str, bool]:
        try:
            with quiet_client():
                return commit()
        except Exception as error:
            raise translate_error(error, location) from None

    return with_retries(attempt, CLIENT_LIMIT)


def _has_marker(location: HubLocation, card_marker: str) -> bool:
    """True if the card of the repository was written by an earlier push, and not edited since."""
    path = hub_api().hf_hub_download(location.repo, CARD, revision=location.revision)
    return card_marker in Path(path).read_text(encoding="utf-8", errors="replace")


def _is_weights(name: str) -> bool:
    return name.startswith(WEIGHTS) and name.endswith((".safetensors", ".bin", ".index.json"))
