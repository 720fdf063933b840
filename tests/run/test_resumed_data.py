"""A resumed run notices data files that changed since its checkpoint."""

import zlib
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import configs
from tests.support.logs import captured_log
from tests.support.token_files import write_counting_documents
from trainyard import Trainer
from trainyard.config.load import parse
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.data.loading.fingerprint import BLOCK_BYTES, fingerprint_files


def token_run(directory: Path, **data: Any) -> dict[str, Any]:
    """The configuration of two steps on token files, saved at the first."""
    for name in "ab":
        write_counting_documents(directory / name, [40] * 5, dtype="uint16")
    config = configs.tiny_config(
        {**configs.LLAMA, "vocab": 256},
        data={"source": "tokens", "paths": [str(directory / "a")], "seq_len": 8, **data},
        train={"steps": 2, "global_batch": 2, "micro_batch": 2},
        checkpoint={"every": 1, "export_hf": False, "directory": str(directory / "checkpoints")},
        log={"directory": str(directory / "runs")},
    )
    with captured_log(lambda line: None):
        Trainer(config).run()
    return config.model_dump(mode="json")


def resume(config: dict[str, Any], *overrides: str) -> list[str]:
    """The log of the first step of the run, continued for one more."""
    lines: list[str] = []
    path = f"{config['checkpoint']['directory']}/step_00000001"
    keys = [f"checkpoint.resume={path}", "checkpoint.every=0", "checkpoint.directory=null", *overrides]
    with captured_log(lines.append):
        Trainer(parse(deepcopy(config), keys)).run()
    return lines


def test_changed_contents_are_refused_until_accepted(tmp_path: Path) -> None:
    """Guards against a resumed run that continues with other samples than it began with."""
    config = token_run(tmp_path)
    assert not [line for line in resume(config) if line.startswith("note:")]
    tokens = np.fromfile(tmp_path / "a.bin", "<u2")
    tokens[100] += 1
    tokens.tofile(tmp_path / "a.bin")
    with pytest.raises(UserError, match=r"a\.bin: its contents changed .*\(the same 400 bytes\)") as caught:
        resume(config)
    assert "checkpoint.accept_changed_data=true" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [line for line in resume(config, "checkpoint.accept_changed_data=true") if "a.bin: its contents" in line]
    write_counting_documents(tmp_path / "a", [40] * 6, dtype="uint16")
    with pytest.raises(UserError, match=r"a\.bin: .*400 bytes then, 480 now"):
        resume(config)


def test_files_that_come_and_go_under_a_glob_are_noticed(tmp_path: Path) -> None:
    config = token_run(tmp_path, paths=[str(tmp_path / "[ab]")])
    write_counting_documents(tmp_path / "c", [40] * 5, dtype="uint16")
    resume(config)
    (tmp_path / "b.idx").rename(tmp_path / "kept")
    with pytest.raises(UserError, match=r"b\.bin: the checkpoint was written with this file"):
        resume(config)


def test_other_paths_are_a_choice_and_only_noted(tmp_path: Path) -> None:
    config = token_run(tmp_path)
    lines = resume(config, f"data.paths=[{tmp_path / 'b'}]")
    assert [line for line in lines if line.startswith("note: data.paths was")]


def test_steps_are_part_of_megatrons_order(tmp_path: Path) -> None:
    config = token_run(tmp_path, order="megatron")
    assert [line for line in resume(config, "train.steps=9") if line.startswith("note: train.steps was 2")]


def test_fingerprints_read_blocks_of_large_files_and_all_of_small_ones(tmp_path: Path) -> None:
    def fingerprint(path: Path, contents: bytes) -> list[int]:
        path.write_bytes(contents)
        config: Config = configs.tiny_config(data={"source": "text", "paths": [str(path)]})
        return fingerprint_files(config.data)[str(path)]

    small = bytes(BLOCK_BYTES + 10)
    assert fingerprint(tmp_path / "x", small) == [len(small), zlib.crc32(small)]
    assert fingerprint(tmp_path / "x", small[:-1] + b"1") != [len(small), zlib.crc32(small)]
    large = bytearray(100 * BLOCK_BYTES + 5)
    before = fingerprint(tmp_path / "x", large)
    for position in (0, len(large) - 1):
        changed = large.copy()
        changed[position] = 1
        assert fingerprint(tmp_path / "x", changed) != before
    assert fingerprint(tmp_path / "x", b"") == [0, 0]


@pytest.mark.parametrize("name", ["tokenizer.json", "."])
def test_fingerprints_include_the_tokenizer(tmp_path: Path, name: str) -> None:
    text, tokenizer = tmp_path / "x.txt", tmp_path / "tokenizer.json"
    text.write_text("text")
    tokenizer.write_text("{}")
    data = {"source": "text", "paths": [str(text)], "tokenizer": str(tmp_path / name)}
    files = fingerprint_files(configs.tiny_config(data=data).data)
    assert list(files) == [str(text), str(tokenizer)]
