"""Files of JSON lines that a kill cut off anywhere: a resumed run continues them without a gap and without a repeat."""

import json
from pathlib import Path

import pytest

from trainyard.metrics.json_lines import JsonLinesWriter, read_json_lines, repair_json_lines

RECORDS = [
    {"step": 1, "loss": 2.5},
    {"step": 2, "loss": float("nan"), "checkpoint": "runs/ä"},
    {"step": 3, "text": 'quote " and newline \n', "samples": [1, 2]},
]


def write(path: Path, *records: dict[str, object]) -> None:
    writer = JsonLinesWriter(path)
    writer.write(*records)
    writer.close()


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "events.jsonl"])
def test_a_last_line_cut_off_at_any_byte_is_repaired(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    write(path, *RECORDS)
    content = path.read_bytes()
    before_last = content.rindex(b"\n", 0, -1) + 1
    for size in range(before_last, len(content) + 1):
        path.write_bytes(content[:size])
        complete = size >= len(content) - 1  # only its newline may be missing
        tail = repair_json_lines(path, lambda record: True)
        assert [record["step"] for record in tail] == ([1, 2, 3] if complete else [1, 2])
        write(path, {"step": 4})
        lines = path.read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == ([1, 2, 3, 4] if complete else [1, 2, 4])


def test_repair_drops_later_steps_and_garbage_and_leaves_a_sound_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, *RECORDS)
    before = path.stat()
    assert len(repair_json_lines(path, lambda record: record["step"] <= 3)) == 3
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert path.stat().st_ino == before.st_ino
    sound = path.read_bytes()
    path.write_bytes(b'\0\0\0\n[1]\n{"no": 1}\n"text"\n\xff\xfe\n{"step": "x"}\n' + sound + b'{"step": 9}\n')
    assert [record["step"] for record in repair_json_lines(path, lambda record: record["step"] <= 3)] == [1, 2, 3]
    assert path.read_bytes() == sound
    assert repair_json_lines(tmp_path / "none", lambda record: True) == []
    assert not (tmp_path / "none").exists()


def test_a_reader_sees_complete_records_while_the_file_grows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(path)
    writer.write({"step": 1, "text": "x" * 100_000})
    assert len(read_json_lines(path).records[0]["text"]) == 100_000
    writer.write({"step": 2, "loss": float("-inf")})
    assert read_json_lines(path).records[1] == {"step": 2, "loss": "-inf"}
    writer.close()
