"""Hooks of the documentation site (mkdocs.yml).

Pages are written for a reader of the repository. The site differs in two ways:

- A link that leaves docs/ leads to a copy of the file: CHANGELOG.md and CONTRIBUTING.md are pages, other text files are
  shown as code under files/, directories as a list of their files.
- A generated section of the API reference, between `<!-- api: NAME -->` and `<!-- /api -->`, becomes mkdocstrings' page
  of the same object.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
ROOT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md")
"""Pages of the site that lie outside docs/."""
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)(#[^)\s]+)?(?=\))")
API_SECTION = re.compile(r"<!-- api: ([\w.]+) -->.*?<!-- /api -->", re.DOTALL)
LANGUAGES = {".py": "python", ".json": "json", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/ that pages link to."""
    for name in ROOT_PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text()))
    sources = [DOCS / file.src_uri for file in files.documentation_pages() if not file.generated_by]
    targets = {target for page in [*sources, *(ROOT / name for name in ROOT_PAGES)] for target in _outside_links(page)}
    for target in sorted(targets):
        for uri, content in _copies(target):
            if uri not in files.src_uris:
                files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the copies, and render the API from docstrings."""
    uri = page.file.src_uri
    if uri.startswith("files/"):
        return markdown
    source = ROOT / uri if uri in ROOT_PAGES else DOCS / uri

    def site_link(match: re.Match[str]) -> str:
        target = (source.parent / match[1]).resolve()
        if not target.exists():
            return match[0]  # mkdocs reports it
        return _relative(_site_uri(target), uri) + (match[2] or "")

    markdown = LINK.sub(site_link, markdown)
    return API_SECTION.sub(lambda match: f"::: {match[1]}", markdown)


def _outside_links(page: Path) -> Iterator[Path]:
    for match in LINK.finditer(page.read_text()):
        target = (page.parent / match[1]).resolve()
        if target.exists() and not target.is_relative_to(DOCS) and target.name not in ROOT_PAGES:
            yield target


def _site_uri(target: Path) -> str:
    """Where a file of the repository is on the site."""
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    name = target.relative_to(ROOT).as_posix()
    if name == "README.md":
        return "index.md"
    if name in ROOT_PAGES:
        return name
    return f"files/{name}/index.md" if target.is_dir() else f"files/{name}.md"


def _copies(target: Path) -> Iterator[tuple[str, str]]:
    """A page for a text file; for a directory, pages for its files and a list of them."""
    name = target.relative_to(ROOT).as_posix()
    hidden = "---\nsearch: {exclude: true}\n---\n"
    if target.is_dir():
        children = sorted(child for child in target.iterdir() if child.is_file())
        listing = "\n".join(f"- [{child.name}]({child.name}.md)" for child in children)
        yield _site_uri(target), f"{hidden}# {name}\n\n{listing}\n"
        for child in children:
            yield from _copies(child)
    elif target != ROOT / "README.md":
        fence = f"````{LANGUAGES.get(target.suffix, 'text')}"
        yield _site_uri(target), f"{hidden}# {name}\n\n{fence}\n{target.read_text().rstrip()}\n````\n"


def _relative(target: str, page: str) -> str:
    return os.path.relpath(target, PurePosixPath(page).parent).replace(os.sep, "/")
