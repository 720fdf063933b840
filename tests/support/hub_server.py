"""A small Hugging Face Hub on the loopback: what huggingface_hub asks of the real one to list, download and upload.

Files above a size are in LFS: their download is redirected to a second server, as the Hub redirects to its CDN.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import yaml

from tests.support.web_server import Handler, ServedFile, WebServer, running

LFS_BYTES = 1000
Files = dict[str, bytes]


def git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def commit_id(files: Files) -> str:
    return hashlib.sha1(repr(sorted((path, git_id(content)) for path, content in files.items())).encode()).hexdigest()


@dataclass
class Repo:
    commits: dict[str, Files] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    messages: list[str] = field(default_factory=list)
    """Of commits that were pushed."""

    def commit(self, files: Files, branch: str = "main") -> str:
        number = commit_id(files)
        self.commits[number] = files
        self.branches[branch] = number
        return number

    def find(self, revision: str) -> str | None:
        return self.branches.get(revision) or (revision if revision in self.commits else None)


class HubHandler(Handler):
    server: "HubServer"

    def do_POST(self) -> None:  # noqa: N802 (BaseHTTPRequestHandler calls it)
        self._dispatch()

    def do_PUT(self) -> None:  # noqa: N802
        self._dispatch()

    def _answer(self, with_body: bool) -> None:
        with self.server.lock:
            fault = self.server.faults.popleft() if self.server.faults else self.server.always
        if fault and fault(self):
            return
        self._dispatch()

    def _dispatch(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length) if length else b""
        with self.server.lock:
            self.server.requests.append((self.command, self.path, dict(self.headers)))
        parts = urlsplit(self.path)
        path = parts.path
        routes = (
            (r"/api/repos/create", self._create),
            (r"/api/whoami-v2", self._whoami),
            (r"/api/validate-yaml", self._validate_card),
            (r"/api/(models|datasets)/([^/]+/[^/]+)/preupload/([^/]+)", self._preupload),
            (r"/api/(models|datasets)/([^/]+/[^/]+)/commit/([^/]+)", self._commit),
            (r"/api/(models|datasets)/([^/]+/[^/]+)/tree/([^/]+)", self._tree),
            (r"/api/(models|datasets)/([^/]+/[^/]+)/refs", self._refs),
            (r"/api/(models|datasets)/([^/]+/[^/]+)(?:/revision/([^/]+))?", self._info),
            (r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._resolve),
            (r"/(datasets/)?([^/]+/[^/]+)\.git/info/lfs/objects/batch", self._lfs_batch),
            (r"/lfs/([0-9a-f]{64})", self._lfs_put),
        )
        for pattern, handle in routes:
            if match := re.fullmatch(pattern, path):
                handle(*[unquote(group) if group else group for group in match.groups()])
                return
        self._error(404, "NotFound", f"no such route {path}")

    def _json(self, data: Any, code: int = 200) -> None:
        self._bytes(json.dumps(data).encode(), code, {"Content-Type": "application/json"})

    def _bytes(self, content: bytes, code: int, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self._send(content)

    def _error(self, code: int, kind: str, message: str) -> None:
        self._bytes(b"{}", code, {"X-Error-Code": kind, "X-Error-Message": message, "Content-Type": "application/json"})

    @property
    def token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _repo(self, kind: str | None, name: str) -> Repo | None:
        """The repository, if the token may see it; else an error is sent."""
        repo = self.server.repos.get((kind or "models").strip("/") + "/" + name)
        if repo is None or (repo.private and self.token not in self.server.tokens):
            self._error(401 if not self.token else 404, "RepoNotFound", "Repository not found")
            return None
        return repo

    def _files(self, repo: Repo, revision: str) -> tuple[str, Files] | None:
        commit = repo.find(revision)
        if commit is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return commit, repo.commits[commit]

    def _info(self, kind: str, name: str, revision: str | None) -> None:
        if (repo := self._repo(kind, name)) and (found := self._files(repo, revision or "main")):
            commit, files = found
            siblings = [{"rfilename": path} for path in files]
            gated = "manual" if repo.gated else False
            self._json({"id": name, "sha": commit, "siblings": siblings, "gated": gated, "private": repo.private})

    def _tree(self, kind: str, name: str, revision: str) -> None:
        if (repo := self._repo(kind, name)) and (found := self._files(repo, revision)):
            entries = [self._entry(path, content) for path, content in found[1].items()]
            assert parse_qs(urlsplit(self.path).query)["recursive"] == ["true"]
            self._json(entries)

    def _entry(self, path: str, content: bytes) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": git_id(content)}
        if len(content) > LFS_BYTES:
            digest = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 134}
        return entry

    def _refs(self, kind: str, name: str) -> None:
        if repo := self._repo(kind, name):
            names = repo.branches.items()
            refs = [{"name": key, "ref": f"refs/heads/{key}", "targetCommit": commit} for key, commit in names]
            self._json({"branches": refs, "converts": [], "tags": []})

    def _resolve(self, kind: str | None, name: str, revision: str, path: str) -> None:
        repo = self._repo(kind, name)
        if not repo:
            return
        if repo.gated and self.token not in self.server.accepted:
            self._error(403 if self.token else 401, "GatedRepo", f"Access to model {name} is restricted")
            return
        found = self._files(repo, revision)
        if not found:
            return
        commit, files = found
        if path not in files:
            self._error(404, "EntryNotFound", "Entry not found")
            return
        content, headers = files[path], {"X-Repo-Commit": commit}
        if len(content) <= LFS_BYTES:
            self._bytes(content, 200, {**headers, "ETag": f'"{git_id(content)}"', "Accept-Ranges": "none"})
            return
        digest = hashlib.sha256(content).hexdigest()
        self.server.cdn.files.setdefault(f"/{digest}", ServedFile(content))
        headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
        headers["Location"] = f"{self.server.cdn.url}/{digest}?X-Amz-Signature=cdn-secret"
        self._bytes(b"", 302, headers)

    def _whoami(self) -> None:
        known = self.token in self.server.tokens
        self._json({"name": "tester", "type": "user"} if known else {}, 200 if known else 401)

    def _validate_card(self) -> None:
        content = json.loads(self.body)["content"]
        try:
            metadata = yaml.safe_load(content.split("---\n")[1]) if content.startswith("---") else {}
            problems = [] if isinstance(metadata, dict) else ["not a mapping"]
        except yaml.YAMLError as error:
            problems = [str(error)]
        self._json({"errors": [{"message": text} for text in problems], "warnings": []}, 400 if problems else 200)

    def _writable(self) -> bool:
        if self.token not in self.server.tokens:
            self._error(401, "Unauthorized", "Invalid credentials in Authorization header")
            return False
        return True

    def _create(self) -> None:
        if self._writable():
            data = json.loads(self.body)
            kind, name = f"{data.get('type') or 'model'}s", f"{data['organization']}/{data['name']}"
            if f"{kind}/{name}" in self.server.repos:
                self._json({"error": "exists", "url": f"{self.server.url}/{name}"}, 409)
                return
            private = data.get("visibility") == "private" or data.get("private") is True
            self.server.repos[f"{kind}/{name}"] = repo = Repo(private=private)
            repo.commit({".gitattributes": b"*.safetensors filter=lfs\n"})
            self._json({"url": f"{self.server.url}/{name}", "id": name})

    def _preupload(self, kind: str, name: str, revision: str) -> None:
        if self._writable() and self._repo(kind, name):
            files = json.loads(self.body)["files"]
            modes = [
                {"path": file["path"], "uploadMode": "lfs" if file["size"] > LFS_BYTES else "regular"}
                | {"shouldIgnore": False, "oid": None}
                for file in files
            ]
            self._json({"files": modes, "commitOid": ""})

    def _lfs_batch(self, kind: str | None, name: str) -> None:
        objects = json.loads(self.body)["objects"]
        out = []
        for entry in objects:
            oid = entry["oid"]
            href = f"{self.server.url}/lfs/{oid}"
            known = {} if oid in self.server.lfs else {"actions": {"upload": {"href": href, "header": {}}}}
            out.append({"oid": oid, "size": entry["size"], **known})
        self._json({"transfer": "basic", "objects": out})

    def _lfs_put(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            self._error(400, "BadOid", "the content has another hash")
            return
        self.server.lfs[oid] = self.body
        self._bytes(b"", 200, {})

    def _commit(self, kind: str, name: str, revision: str) -> None:
        repo = self._repo(kind, name) if self._writable() else None
        if not repo:
            return
        files = dict(repo.commits[repo.branches["main"]])
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                repo.messages.append(value["summary"])
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.server.lfs[value["oid"]]
            elif entry["key"] == "deletedFile":
                files.pop(value["path"])
        number = repo.commit(files, revision)
        self._json({"commitUrl": f"{self.server.url}/{name}/commit/{number}", "commitOid": number})


class HubServer(WebServer):
    def __init__(self, cdn: WebServer) -> None:
        super().__init__(HubHandler)
        self.cdn = cdn
        self.repos: dict[str, Repo] = {}
        self.tokens = {"hf_goodgoodgoodgoodgoodgood"}
        """Tokens of existing users."""
        self.accepted: set[str] = set()
        """Tokens of users who accepted all licenses."""
        self.lfs: dict[str, bytes] = {}

    def add(self, name: str, files: Files, kind: str = "models", **options: bool) -> Repo:
        repo = self.repos[f"{kind}/{name}"] = Repo(**options)
        repo.commit(files)
        return repo


@contextmanager
def hub_server() -> Iterator[HubServer]:
    cdn = WebServer()
    hub = HubServer(cdn)
    with running(cdn), running(hub):
        yield hub


def hub_environment(server: HubServer, home: Path) -> dict[str, str]:
    """Variables that a user of another Hub sets."""
    return {
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRAINYARD_DOWNLOADS": str(home / "downloads"),
    }


def use_hub(patch: pytest.MonkeyPatch, server: HubServer, home: Path) -> None:
    """Point huggingface_hub, which reads its variables when it is imported, at a server."""
    from huggingface_hub import constants

    from trainyard.remote.local_copies import forget_sources

    for name, value in hub_environment(server, home).items():
        patch.setenv(name, value)
    patch.delenv("HF_TOKEN", raising=False)
    patch.setattr(constants, "ENDPOINT", server.url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    patch.setattr("trainyard.remote.sources.retry.FIRST_WAIT_S", 0.02)
    forget_sources()
