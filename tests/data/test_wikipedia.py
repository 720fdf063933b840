"""Dumps of every kind to the same lines, whatever the processes, kills and broken bytes on the way."""

import bz2
import gzip
import json
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.data import wikipedia_dumps
from tests.support.examples import examples
from trainyard.cli import main
from trainyard.cli.console import SkipReporter
from trainyard.core.errors import UserError
from trainyard.data.wikipedia import dump
from trainyard.data.wikipedia.dump import open_dump
from trainyard.data.wikipedia.extract import UnreadablePage, extract_articles
from trainyard.data.wikipedia.progress import ExtractOptions, ExtractState, load_state, lock_output
from trainyard.data.wikipedia.wikitext import WikiNamespaces, wikitext_to_text

NAMES = WikiNamespaces(frozenset(("datei", "kategorie")))
SMALL = ExtractOptions(shard_size=20_000)
PAGES = list(wikipedia_dumps.pages(60, sections=2))


def run(
    *paths: Path,
    output: Path,
    job: ExtractOptions = SMALL,
    workers: int = 1,
    strict: bool = False,
    restart: bool = False,
) -> tuple[ExtractState, list[UnreadablePage]]:
    bad: list[UnreadablePage] = []
    found = [open_dump(path) for path in paths]
    with lock_output(output):
        state = load_state(found, output, job, restart)
        if not state.finished:
            extract_articles(
                found, output, job, state, workers, SkipReporter(True) if strict else bad.append, lambda _: None
            )
    return state, bad


def written(output: Path) -> dict[str, bytes]:
    """All files that have their final names."""
    return {path.name: path.read_bytes() for path in sorted(output.iterdir()) if path.name.startswith("wiki_")}


def lines(output: Path) -> list[dict[str, str]]:
    return [json.loads(line) for data in written(output).values() for line in data.splitlines()]


def expected(data: bytes, namespaces: tuple[int, ...] = (0,)) -> list[dict[str, str]]:
    """The same by a parser that reads the dump as a whole."""
    root = ElementTree.fromstring(re.sub(rb' xmlns="[^"]*"', b"", data, count=1))
    found = []
    for page in root.iter("page"):
        get: Any = page.findtext
        plain = get("revision/model") == "wikitext" and page.find("redirect") is None
        text = wikitext_to_text(get("revision/text"), NAMES)
        if plain and text and int(get("ns")) in namespaces:
            url = f"https://de.wikipedia.org/wiki?curid={get('id')}"
            found.append({"id": get("id"), "url": url, "title": get("title"), "text": text})
    return found


@pytest.mark.parametrize("kind", wikipedia_dumps.KINDS)
@pytest.mark.parametrize("workers", [1, 3])
def test_every_kind_of_file_gives_the_same(tmp_path: Path, kind: str, workers: int) -> None:
    path, plain = tmp_path / f"de.{kind}", tmp_path / "plain.xml"
    path.write_bytes(wikipedia_dumps.KINDS[kind](PAGES))
    plain.write_bytes(wikipedia_dumps.dump(PAGES))
    state, bad = run(path, output=tmp_path / "out", workers=workers)
    run(plain, output=tmp_path / "plain")
    assert written(tmp_path / "out") == written(tmp_path / "plain")
    assert lines(tmp_path / "out") == expected(wikipedia_dumps.dump(PAGES))
    assert not bad
    counts = {"articles": 36, "redirect": 6, "namespace": 12, "model": 6}
    assert {key: count for key, count in state.counts.items() if key in counts} == counts
    assert state.counts["bytes"] == sum(map(len, written(tmp_path / "out").values()))
    sizes = [len(data) for data in written(tmp_path / "out").values()]
    assert len(sizes) == state.shards > 3
    assert all(20_000 <= size < 45_000 for size in sizes[:-1])


def test_articles_as_they_come(tmp_path: Path) -> None:
    found = [
        wikipedia_dumps.page(1, "Größe & <Maß>", "'''A''' [[Datei:x.jpg|b]]c &amp; ''d''[[Kategorie:e]]"),
        wikipedia_dumps.page(2, "Old redirect", "#REDIRECT [[A]]"),
        wikipedia_dumps.page(3, "Empty", "{{Stub}}"),
        wikipedia_dumps.page(4, "Short", "abc"),
        wikipedia_dumps.page(5, "Diskussion:東京", "talk & talk", namespace=1),
    ]
    (tmp_path / "a.xml").write_bytes(wikipedia_dumps.dump(found))
    state, _ = run(tmp_path / "a.xml", output=tmp_path / "out")
    address = "https://de.wikipedia.org/wiki?curid="
    assert lines(tmp_path / "out") == [
        {"id": "1", "url": f"{address}1", "title": "Größe & <Maß>", "text": "A c & d"},
        {"id": "4", "url": f"{address}4", "title": "Short", "text": "abc"},
    ]
    assert (state.counts["redirect"], state.counts["short"], state.counts["namespace"]) == (1, 1, 1)
    run(tmp_path / "a.xml", output=tmp_path / "both", job=ExtractOptions(namespaces=(0, 1), min_text=5))
    assert [line["id"] for line in lines(tmp_path / "both")] == ["1", "5"]


def test_compressed_shards_have_the_same_lines(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_bytes(wikipedia_dumps.dump(PAGES))
    run(tmp_path / "a.xml", output=tmp_path / "plain")
    run(tmp_path / "a.xml", output=tmp_path / "packed", job=ExtractOptions(SMALL.shard_size, compress=True), workers=2)
    packed = {name.removesuffix(".gz"): gzip.decompress(data) for name, data in written(tmp_path / "packed").items()}
    assert packed == written(tmp_path / "plain")
    assert all(data[4:8] == bytes(4) for data in written(tmp_path / "packed").values())  # no time of day in them


def test_several_dumps_one_after_the_other(tmp_path: Path) -> None:
    """Each with the names of its own wiki."""
    (tmp_path / "a.xml.bz2").write_bytes(
        wikipedia_dumps.multistream([*PAGES[:20], wikipedia_dumps.page(98, "A", "[[Tiedosto:x|shown]]")])
    )
    other = wikipedia_dumps.dump([wikipedia_dumps.page(99, "B", "not [[Tiedosto:x|shown]]")])
    (tmp_path / "b.xml").write_bytes(other.replace(b"Datei", b"Tiedosto").replace(b"//de.", b"//fi."))
    run(tmp_path / "a.xml.bz2", tmp_path / "b.xml", output=tmp_path / "out", workers=2)
    *first, one, two = lines(tmp_path / "out")
    assert first == expected(wikipedia_dumps.dump(PAGES[:20]))
    assert (one["url"], one["text"]) == ("https://de.wikipedia.org/wiki?curid=98", "shown")
    assert (two["url"], two["text"]) == ("https://fi.wikipedia.org/wiki?curid=99", "not")


def test_bytes_that_look_like_a_stream_and_streams_of_any_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams are found by their first bytes: right however often those appear, and in a stream too long to hold."""
    monkeypatch.setattr(dump, "STREAM_START", re.compile(dump.STREAM_START.pattern + rb"|[\x00-\x03]"))
    monkeypatch.setattr(dump, "MAX_STREAM_BYTES", 300)
    monkeypatch.setattr(dump, "READ_BYTES", 1000)
    monkeypatch.setattr(dump, "UNPACK_BYTES", 700)
    for kind in ("xml.bz2", "multistream.xml.bz2", "chopped.xml.bz2"):
        (tmp_path / kind).write_bytes(wikipedia_dumps.KINDS[kind](PAGES))
        for workers in (1, 4):
            run(tmp_path / kind, output=tmp_path / "out", workers=workers, restart=True)
            assert lines(tmp_path / "out") == expected(wikipedia_dumps.dump(PAGES))


class Stop(Exception):
    pass


@pytest.mark.parametrize("kind", wikipedia_dumps.KINDS)
def test_a_run_goes_on_after_each_shard(tmp_path: Path, kind: str) -> None:
    path, output = tmp_path / kind, tmp_path / "out"
    path.write_bytes(wikipedia_dumps.KINDS[kind](PAGES))
    whole, _ = run(path, output=tmp_path / "whole")
    found = [open_dump(path)]
    starts = 0
    for _ in range(whole.shards + 1):
        with lock_output(output):
            state = load_state(found, output, SMALL, False)
            if state.finished:
                break
            assert state.shards == starts
            starts += 1

            def stop(_: int, now: ExtractState = state, goal: int = starts) -> None:
                if now.shards == goal and not now.finished:
                    raise Stop

            try:
                extract_articles(found, output, SMALL, state, 1, lambda _: None, stop)
            except Stop:
                continue
    assert starts == whole.shards > 3
    assert written(output) == written(tmp_path / "whole")
    assert state.counts == whole.counts


DRIVER = """
import sys
from pathlib import Path
from trainyard.data.wikipedia.extract import extract
from trainyard.data.wikipedia.dump import open_dump
from trainyard.data.wikipedia.progress import Job, begin, claimed

found, output, job = [open_dump(Path(sys.argv[1]))], Path(sys.argv[2]), Job(shard_size=20_000)
with claimed(output):
    state = begin(found, output, job, False)
    if not state.finished:
        extract(found, output, job, state, 2, print, lambda done: None)
"""
"""What the command does, without its half a second of imports."""


@pytest.mark.parametrize("kind", ["multistream.xml.bz2", "xml.bz2"])
def test_killed_runs_leave_what_one_run_does(tmp_path: Path, kind: str) -> None:
    chance = random.Random(kind)
    path, output = tmp_path / kind, tmp_path / "out"
    path.write_bytes(wikipedia_dumps.KINDS[kind](list(wikipedia_dumps.pages(700, sections=2))))
    run(path, output=tmp_path / "whole")
    command = [sys.executable, "-c", DRIVER, str(path), str(output)]
    kills = 0
    for _ in range(8):
        before = len(written(output)) if output.exists() else 0
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while process.poll() is None and not (output.exists() and len(written(output)) > before):
            time.sleep(0.002)
        time.sleep(chance.random() * 0.03)
        process.kill()
        kills += process.wait() == -signal.SIGKILL
        for name, data in written(output).items():
            assert data == (tmp_path / "whole" / name).read_bytes()
    assert kills >= 3
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert written(output) == written(tmp_path / "whole")
    assert not list(output.glob(".*.part"))


def test_what_a_directory_holds_is_never_mixed(tmp_path: Path) -> None:
    path, output = tmp_path / "a.xml", tmp_path / "out"
    path.write_bytes(wikipedia_dumps.dump(PAGES))
    run(path, output=output)
    before = written(output)
    stamps = {file: file.stat().st_mtime_ns for file in output.iterdir() if file.name != ".extract.lock"}
    assert run(path, output=output)[0].finished
    assert {file: file.stat().st_mtime_ns for file in stamps} == stamps
    with pytest.raises(UserError, match="other min text; --restart"):
        run(path, output=output, job=ExtractOptions(SMALL.shard_size, min_text=3))
    with lock_output(output):
        code = "import sys; from pathlib import Path; from trainyard.data.wikipedia.progress import claimed\n"
        code += f"with claimed(Path({str(output)!r})): pass"
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "another run writes there" in other.stderr
    (output / "wiki_00001.jsonl").rename(output / "away")
    with pytest.raises(UserError, match=r"wiki_00001.jsonl is gone; --restart"):
        run(path, output=output)
    (output / ".extract.json").write_text("{}")
    with pytest.raises(UserError, match="--restart"):
        run(path, output=output)
    (output / ".extract.json").unlink()
    with pytest.raises(UserError, match="--restart"):
        run(path, output=output)
    run(path, output=output, restart=True)
    assert written(output) == before
    path.write_bytes(wikipedia_dumps.dump(PAGES[:30]))
    with pytest.raises(UserError, match="other input; --restart"):
        run(path, output=output)
    run(path, output=output, restart=True)
    assert lines(output) == expected(wikipedia_dumps.dump(PAGES[:30]))


def test_a_page_that_is_no_xml_is_skipped_and_named(tmp_path: Path) -> None:
    wrong = wikipedia_dumps.page(99, "Wrong", "x").replace("<ns>", "<sn>")
    no_end = wikipedia_dumps.page(98, "No end", "x").replace("</page>", "")
    no_start = wikipedia_dumps.page(97, "No start", "x").replace("<page>", "")
    no_title = wikipedia_dumps.page(96, "No title", "x").replace("<title>No title</title>", "")
    data = wikipedia_dumps.dump(
        [*PAGES[:9], wrong, PAGES[9], no_end, PAGES[10], no_start, *PAGES[11:20], no_title, no_end]
    )
    (tmp_path / "a.xml").write_bytes(data)
    state, bad = run(tmp_path / "a.xml", output=tmp_path / "out", workers=2)
    assert lines(tmp_path / "out") == expected(wikipedia_dumps.dump(PAGES[:20]))
    assert state.counts["malformed"] == 5
    assert data[bad[0].xml_offset :].startswith(wrong.strip().encode()[:40])
    assert "mismatched tag" in bad[0].reason
    assert [data[each.xml_offset :][:6] for each in bad] == [b"<page>", b"<page>", b"</page", b"<page>", b"<page>"]
    with pytest.raises(UserError, match=f"a.xml: byte {bad[0].xml_offset} of its XML: mismatched tag"):
        run(tmp_path / "a.xml", output=tmp_path / "strict", strict=True)


@pytest.mark.parametrize("kind", wikipedia_dumps.KINDS)
def test_a_truncated_dump_says_how_many_articles_were_complete(tmp_path: Path, kind: str) -> None:
    data = wikipedia_dumps.KINDS[kind](PAGES)
    (tmp_path / "a").write_bytes(data[: len(data) * 3 // 4])
    with pytest.raises(UserError, match=r"(truncated|ended before).*; \d+ articles before that were complete") as error:
        run(tmp_path / "a", output=tmp_path / "out", workers=2)
    count = int(re.findall(r"(\d+) articles before", str(error.value))[0])
    assert count < 36
    assert count > (20 if kind != "xml.bz2" else 5)
    assert lines(tmp_path / "out") == expected(wikipedia_dumps.dump(PAGES))[: len(lines(tmp_path / "out"))]


def test_a_page_without_end_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump, "LARGEST", 100_000)
    monkeypatch.setattr(dump, "READ_BYTES", 10_000)
    (tmp_path / "a.xml").write_bytes(wikipedia_dumps.dump([PAGES[0], "<page>" + "x" * 10_000_000]))
    with pytest.raises(UserError, match="a page of more than"):
        run(tmp_path / "a.xml", output=tmp_path / "out")


DUMP = wikipedia_dumps.dump(PAGES[:8])
PACKED = [DUMP, bz2.compress(DUMP), wikipedia_dumps.multistream(PAGES[:8], each=2), gzip.compress(DUMP)]


@st.composite
def broken(draw: st.DrawFn) -> bytes:
    """Random bytes, with or without a beginning that looks right; or a dump with bytes changed, lost or added."""
    if draw(st.integers(0, 3)) == 0:
        starts = [
            b"",
            b"BZh9",
            b"BZh91AY&SY",
            b"\x1f\x8b\x08\x00",
            b"<mediawiki>",
            b"<mediawiki><page>",
            wikipedia_dumps.HEAD.encode(),
        ]
        return draw(st.sampled_from(starts)) + draw(st.binary(max_size=300))
    data = bytearray(draw(st.sampled_from(PACKED)))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        action = draw(st.sampled_from(["cut", "change", "insert", "lose"]))
        if action == "cut":
            del data[at:]
        elif action == "lose":
            del data[at : at + draw(st.integers(1, 50))]
        else:
            new = draw(
                st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from([b"</page>", b"<page>", b"<", b"&"]))
            )
            data[at : at + (len(new) if action == "change" else 0)] = new
    return bytes(data)


@examples(200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=broken())
def test_no_bytes_crash_it(tmp_path: Path, data: bytes) -> None:
    """A line for the user, or articles that are whole lines with ids of the dump."""
    output = tmp_path / "out"
    output.mkdir(exist_ok=True)
    (tmp_path / "a").write_bytes(data)
    try:
        state, bad = run(tmp_path / "a", output=output, restart=True)
    except UserError as error:
        message = str(error)
    else:
        message = ""
        assert state.finished
        assert state.counts["malformed"] == len(bad)
        assert state.counts["articles"] == len(lines(output))
    assert "\n" not in message
    for line in lines(output):
        assert set(line) == {"id", "url", "title", "text"}


def command(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["trainyard", "data", "extract", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        main.main()
    return int(end.value.code or 0)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(2):
        (tmp_path / f"part{number}.xml").write_bytes(wikipedia_dumps.dump(PAGES[number * 30 : number * 30 + 30]))
    words = [tmp_path / "part*.xml", "-o", tmp_path / "out", "--shard-size", "20K"]
    assert command(monkeypatch, *words) == 0
    said = capsys.readouterr().out
    assert said.startswith("36 articles, ")
    assert "skipped: 6 redirects, 12 in other namespaces, 6 not wikitext, " in said
    assert lines(tmp_path / "out") == expected(wikipedia_dumps.dump(PAGES))
    assert command(monkeypatch, *words) == 0
    assert capsys.readouterr().out.startswith("already finished")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["missing.xml", "-o", "out"], "missing.xml: no such file"),
        (["text.xml", "-o", "out"], "text.xml: no MediaWiki dump"),
        (["noise.bz2", "-o", "out"], "noise.bz2: cannot be read: Invalid data stream"),
        (["a.xml", "-o", "text.xml"], "--output text.xml: cannot be written"),
        (["a.xml", "-o", "out", "--shard-size", "much"], "--shard-size much: not a number of bytes; nearest: 256M"),
        (["a.xml", "-o", "out", "--namespaces", "Talk"], "--namespaces Talk: not numbers"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.xml").write_bytes(wikipedia_dumps.dump(PAGES[:3]))
    Path("text.xml").write_text("nothing of the kind")
    Path("noise.bz2").write_bytes(b"BZh9" + random.Random(0).randbytes(1000))
    assert command(monkeypatch, *words) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"trainyard: {line}")
    assert said.count("\n") == 1
    assert not Path("out").exists()
