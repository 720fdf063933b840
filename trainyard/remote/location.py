"""Where files come from: a repository on the Hugging Face Hub, a URL, or a local path."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from trainyard.core.errors import UserError
from trainyard.remote.credentials import redact

DEFAULT_ENDPOINT = "https://huggingface.co"
REPO_ID = r"[\w.-]+(?:/[\w.-]+)?"
REVISION = r"refs/(?:pr/\d+|convert/[\w.-]+)|[^/]+"
HUB_LOCATION = re.compile(rf"(?:(datasets|models)/)?({REPO_ID})(?:@({REVISION}))?(?:/(.*))?")
HUB_PAGE = re.compile(rf"/(?:(datasets)/)?([\w.-]+/[\w.-]+)(?:/(?:tree|blob|resolve|raw)/({REVISION})(?:/(.*))?)?/?")
BARE_ID = re.compile(r"(?!runs/)\w[\w.-]*/\w[\w.-]*")
"""OWNER/NAME. runs/NAME is always a run, which may not exist."""
FILE_SUFFIXES = (".json", ".jsonl", ".model", ".yaml", ".yml", ".txt", ".pt", ".bin", ".pth", ".ckpt", ".safetensors")
"""A name with one of these is meant as a local file, not as a repository."""
COMMIT_HASH = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubLocation:
    """A repository on the Hub, or files in it."""

    repo: str
    kind: Literal["model", "dataset"] = "model"
    revision: str | None = None
    """Branch, tag or commit; None: main."""
    path: str = ""
    """File, directory or glob in the repository; empty: all of it."""

    def __str__(self) -> str:
        kind = "datasets/" if self.kind == "dataset" else ""
        revision = f"@{self.revision}" if self.revision else ""
        return f"hf://{kind}{self.repo}{revision}" + (f"/{self.path}" if self.path else "")

    @property
    def page(self) -> str:
        """The page about the repository, where its license is accepted."""
        return f"{endpoint()}/{'datasets/' if self.kind == 'dataset' else ''}{self.repo}"


def endpoint() -> str:
    """The URL of the Hub: HF_ENDPOINT, or the public one."""
    return os.environ.get("HF_ENDPOINT", DEFAULT_ENDPOINT).rstrip("/")


def is_url(text: str) -> bool:
    return "://" in text and not text.startswith("file://")


def has_urls(paths: Iterable[str]) -> bool:
    return any(is_url(path) for path in paths)


def is_web_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def parse_hub_location(text: str) -> HubLocation | None:
    """The location that `hf://...` or the URL of a page of the Hub names; None for anything else."""
    if text.startswith("hf://"):
        match = HUB_LOCATION.fullmatch(text.removeprefix("hf://").rstrip("/"))
        if not match:
            raise UserError(f"{text}: expected hf://OWNER/NAME[@REVISION][/PATH] or hf://datasets/OWNER/NAME[...]")
    elif is_web_url(text) and urlsplit(text).netloc == urlsplit(endpoint()).netloc:
        match = HUB_PAGE.fullmatch(unquote(urlsplit(text).path))
        if not match:
            return None
    else:
        return None
    kind, repo, revision, path = match.groups()
    return HubLocation(
        repo, "dataset" if kind == "datasets" else "model", unquote(revision) if revision else None, path or ""
    )


def find_model_location(text: str) -> HubLocation | None:
    """The location of a model or tokenizer, which a bare OWNER/NAME may name too if no such path exists here."""
    if location := parse_hub_location(text):
        if location.kind != "model":
            raise UserError(f"{text}: a data set, not a model")
        return location
    if BARE_ID.fullmatch(text) and not text.lower().endswith(FILE_SUFFIXES):
        path = Path(text)
        if not path.exists() and not path.parent.is_dir():  # runs/my-rum is a typo
            return HubLocation(text)
    return None


def is_name_below(name: str) -> bool:
    """True if a relative path from elsewhere stays below the directory that it is joined to."""
    return not {"", ".", ".."} & set(name.split("/")) and "\0" not in name


def file_name(url: str) -> str:
    """The last component of a URL's path."""
    name = unquote(urlsplit(url).path).rstrip("/").rpartition("/")[2]
    if not is_name_below(name):
        raise UserError(f"{redact(url)}: names no file; give the name of the target")
    return name
