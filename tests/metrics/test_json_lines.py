"""Files of JSON lines, read while another process writes them, or after a crash."""

from pathlib import Path

from trainyard.metrics.json_lines import MAX_LINE_BYTES, read_json_lines
from trainyard.metrics.run_directory import RunDirectory, is_training


def test_an_incomplete_line_is_read_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_json_lines(path) == ([], 0)
    path.write_text('{"step": 1}\n{"step": 2')
    records, offset = read_json_lines(path)
    assert records == [{"step": 1}]
    with path.open("a") as file:
        file.write('}\n{"step": 3}\n')
    records, offset = read_json_lines(path, offset)
    assert records == [{"step": 2}, {"step": 3}]
    assert read_json_lines(path, offset) == ([], offset)
    path.write_text('{"step": 1}\n')  # a resumed run dropped the end
    assert read_json_lines(path, offset).records == [{"step": 1}]


def test_lines_that_are_no_objects_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    nested = b"[" * 100_000
    path.write_bytes(b'{"step": 1}\n{"st\n[1]\nnull\n\xff\xfe\n' + nested + b'\n{"step": 2}\n')
    assert read_json_lines(path).records == [{"step": 1}, {"step": 2}]


def test_reading_in_parts_gives_all_records(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(b'{"step": %d}\n' % step for step in range(500)))
    offset, steps = 0, []
    while True:
        records, offset = read_json_lines(path, offset, max_bytes=97)
        if not records:
            break
        steps += [record["step"] for record in records]
    assert steps == list(range(500))


def test_a_line_without_end_does_not_stop_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"x" * (2 * MAX_LINE_BYTES) + b'\n{"step": 1}\n')
    offset, found = 0, []
    for _ in range(4):
        records, offset = read_json_lines(path, offset, max_bytes=MAX_LINE_BYTES + 1)
        found += records
    assert found == [{"step": 1}]


def test_is_training_while_the_lock_is_held(tmp_path: Path) -> None:
    assert not is_training(tmp_path)
    with RunDirectory.create(tmp_path, "run") as run:
        assert is_training(run.path)
    assert not is_training(run.path)
