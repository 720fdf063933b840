"""`trainyard train` on data behind URLs: it trains, and mistakes are one line with exit code 2."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.cli.conftest import Call, fail, succeed
from tests.support import configs
from tests.support.s3_server import s3_server
from tests.support.token_files import write_counting_documents


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    with s3_server():
        yield fsspec.filesystem("s3")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    data = {"source": "tokens", "paths": ["s3://yard/missing"], "seq_len": 8, "cache": {"directory": "cache"}}
    config = configs.tiny_config(data=data, log={"every": 1, "loggers": [], "directory": str(tmp_path / "runs")})
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps(config.model_dump(mode="json")))
    return path


def test_trains_on_token_files_in_a_bucket(call: Call, s3: Any, config: Path, tmp_path: Path) -> None:
    write_counting_documents(tmp_path / "a", [40, 50, 60], dtype="uint16")
    for suffix in (".bin", ".idx"):
        s3.put_file(str(tmp_path / f"a{suffix}"), f"yard/cli/a{suffix}")
    succeed(call("train", config, "data.paths=[s3://yard/cli/a]"))
    assert list((tmp_path / "cache").glob("??/*"))
    (run,) = (tmp_path / "runs").iterdir()
    assert "s3://yard/cli/a, token " in succeed(call("data", "show", run, "--step", "1"))


def test_mistakes_are_one_line_with_exit_code_2(
    call: Call, s3: Any, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(call("train", config), r"data\.paths=s3://yard/missing: no such token files")
    fail(call("train", config, "data.cache.gib=0"), r".*data\.cache\.gib=0: must be at least 0\.001")

    def not_installed(*arguments: Any, **keys: Any) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", not_installed)
    fail(call("train", config), r"s3://yard/missing\.idx: s3:// needs .* pip install 'trainyard\[s3\]'")
