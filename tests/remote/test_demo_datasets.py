"""`trainyard get sample-...`: data sets made without a network, which the data commands read."""

import bz2
import json
import sys
from pathlib import Path
from unittest.mock import patch
from xml.etree import ElementTree

import pytest

from trainyard.cli import main


def run(*arguments: object) -> int:
    argv = ["trainyard", *map(str, arguments)]
    with patch.object(sys, "argv", argv), pytest.raises(SystemExit) as ended:
        main.main()
    return int(ended.value.code or 0)


@pytest.mark.nightly
def test_wikipedia_is_a_dump(tmp_path: Path) -> None:
    assert run("get", "sample-wikipedia", tmp_path / "dump") == 0
    (dump,) = (tmp_path / "dump").iterdir()
    root = ElementTree.fromstring(bz2.decompress(dump.read_bytes()))
    pages = root.findall("{*}page")
    assert len(pages) > 100
    assert run("data", "extract", dump, "--output", tmp_path / "wiki") == 0
    lines = (tmp_path / "wiki" / "wiki_00000.jsonl").read_text().splitlines()
    articles = {record["title"]: record["text"] for record in map(json.loads, lines)}
    assert set(articles) == {page.findtext("{*}title") for page in pages}
    assert "JSON" in articles["json"]
    assert sum(map(len, articles.values())) > 500_000


def test_code_is_json_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("get", "sample-code", tmp_path / "code") == 0
    records = [json.loads(line) for line in (tmp_path / "code" / "python.jsonl").read_text().splitlines()]
    by_path = {record["path"]: record["text"] for record in records}
    compile(by_path["argparse.py"], "argparse.py", "exec")
    assert all(text.strip() for text in by_path.values())
    capsys.readouterr()
    assert run("get", "sample-code", tmp_path / "code") == 2
    assert "already exists; --overwrite replaces it" in capsys.readouterr().err
    assert run("get", "sample-code", tmp_path / "code", "--overwrite") == 0
    assert run("get", "sample-code", tmp_path / "other", "--dry-run") == 0
    assert not (tmp_path / "other").exists()
