"""Wikipedia dumps: the same JSON lines from every kind of file, for any workers, after kills and damage."""

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

from tests.support import wikipedia_dumps
from tests.support.examples import examples
from trainyard.cli import main
from trainyard.cli.console import SkipReporter
from trainyard.core.errors import UserError
from trainyard.data.formats.documents import UnreadableRecord
from trainyard.prepare.wikipedia import dump
from trainyard.prepare.wikipedia.dump import open_dump
from trainyard.prepare.wikipedia.extract import ExtractOptions, ExtractState, extract_articles, load_state, lock_output
from trainyard.prepare.wikipedia.wikitext import wikitext_to_text

NAMESPACES = frozenset(("datei", "kategorie"))
SMALL_SHARDS = ExtractOptions(shard_size=20_000)
PAGES = list(wikipedia_dumps.pages(60, sections=2))


def run(
    *paths: Path,
    output: Path,
    options: ExtractOptions = SMALL_SHARDS,
    workers: int = 1,
    strict: bool = False,
    restart: bool = False,
) -> tuple[ExtractState, list[UnreadableRecord]]:
    unreadable: list[UnreadableRecord] = []
    on_unreadable = SkipReporter(True) if strict else unreadable.append
    dumps = [open_dump(path) for path in paths]
    with lock_output(output):
        state = load_state(dumps, output, options, restart)
        if not state.finished:
            extract_articles(dumps, output, options, state, workers, on_unreadable, lambda _: None)
    return state, unreadable


def shards(output: Path) -> dict[str, bytes]:
    """The complete shards by name."""
    return {path.name: path.read_bytes() for path in sorted(output.iterdir()) if path.name.startswith("wiki_")}


def articles(output: Path) -> list[dict[str, str]]:
    return [json.loads(line) for data in shards(output).values() for line in data.splitlines()]


def reference_articles(data: bytes, namespaces: tuple[int, ...] = (0,)) -> list[dict[str, str]]:
    """The articles by a parser that reads the whole dump at once."""
    root = ElementTree.fromstring(re.sub(rb' xmlns="[^"]*"', b"", data, count=1))
    articles = []
    for page in root.iter("page"):
        get: Any = page.findtext
        is_article = get("revision/model") == "wikitext" and page.find("redirect") is None
        text = wikitext_to_text(get("revision/text"), NAMESPACES)
        if is_article and text and int(get("ns")) in namespaces:
            url = f"https://de.wikipedia.org/wiki?curid={get('id')}"
            articles.append({"id": get("id"), "url": url, "title": get("title"), "text": text})
    return articles


@pytest.mark.parametrize("kind", wikipedia_dumps.KINDS)
@pytest.mark.parametrize("workers", [1, 3])
def test_every_kind_of_file_gives_the_same_shards(tmp_path: Path, kind: str, workers: int) -> None:
    path, plain = tmp_path / f"de.{kind}", tmp_path / "plain.xml"
    path.write_bytes(wikipedia_dumps.KINDS[kind](PAGES))
    plain.write_bytes(wikipedia_dumps.dump(PAGES))
    state, unreadable = run(path, output=tmp_path / "out", workers=workers)
    run(plain, output=tmp_path / "plain")
    assert shards(tmp_path / "out") == shards(tmp_path / "plain")
    assert articles(tmp_path / "out") == reference_articles(wikipedia_dumps.dump(PAGES))
    assert not unreadable
    counts = {"articles": 36, "redirect": 6, "namespace": 12, "model": 6}
    assert {key: count for key, count in state.counts.items() if key in counts} == counts
    assert state.counts["bytes"] == sum(map(len, shards(tmp_path / "out").values()))
    sizes = [len(data) for data in shards(tmp_path / "out").values()]
    assert len(sizes) == state.shards > 3
    assert all(20_000 <= size < 45_000 for size in sizes[:-1])


def test_article_fields_and_filters(tmp_path: Path) -> None:
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
    assert articles(tmp_path / "out") == [
        {"id": "1", "url": f"{address}1", "title": "Größe & <Maß>", "text": "A c & d"},
        {"id": "4", "url": f"{address}4", "title": "Short", "text": "abc"},
    ]
    assert (state.counts["redirect"], state.counts["short"], state.counts["namespace"]) == (1, 1, 1)
    run(tmp_path / "a.xml", output=tmp_path / "both", options=ExtractOptions(namespaces=(0, 1), min_text=5))
    assert [line["id"] for line in articles(tmp_path / "both")] == ["1", "5"]


def test_compressed_shards_have_the_same_articles(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_bytes(wikipedia_dumps.dump(PAGES))
    run(tmp_path / "a.xml", output=tmp_path / "plain")
    run(
        tmp_path / "a.xml",
        output=tmp_path / "packed",
        options=ExtractOptions(SMALL_SHARDS.shard_size, compress=True),
        workers=2,
    )
    packed = {name.removesuffix(".gz"): gzip.decompress(data) for name, data in shards(tmp_path / "packed").items()}
    assert packed == shards(tmp_path / "plain")
    assert all(data[4:8] == bytes(4) for data in shards(tmp_path / "packed").values())  # no time of day in them


def test_several_dumps_in_order(tmp_path: Path) -> None:
    """Each dump has the namespaces of its own wiki."""
    (tmp_path / "a.xml.bz2").write_bytes(
        wikipedia_dumps.multistream([*PAGES[:20], wikipedia_dumps.page(98, "A", "[[Tiedosto:x|shown]]")])
    )
    other = wikipedia_dumps.dump([wikipedia_dumps.page(99, "B", "not [[Tiedosto:x|shown]]")])
    (tmp_path / "b.xml").write_bytes(other.replace(b"Datei", b"Tiedosto").replace(b"//de.", b"//fi."))
    run(tmp_path / "a.xml.bz2", tmp_path / "b.xml", output=tmp_path / "out", workers=2)
    *first, one, two = articles(tmp_path / "out")
    assert first == reference_articles(wikipedia_dumps.dump(PAGES[:20]))
    assert (one["url"], one["text"]) == ("https://de.wikipedia.org/wiki?curid=98", "shown")
    assert (two["url"], two["text"]) == ("https://fi.wikipedia.org/wiki?curid=99", "not")


def test_false_stream_starts_and_long_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first bytes of a stream may appear anywhere in the data, and a stream may exceed the buffer."""
    monkeypatch.setattr(dump, "STREAM_START", re.compile(dump.STREAM_START.pattern + rb"|[\x00-\x03]"))
    monkeypatch.setattr(dump, "MAX_STREAM_BYTES", 300)
    monkeypatch.setattr(dump, "READ_BYTES", 1000)
    monkeypatch.setattr(dump, "UNPACK_BYTES", 700)
    for kind in ("xml.bz2", "multistream.xml.bz2", "chopped.xml.bz2"):
        (tmp_path / kind).write_bytes(wikipedia_dumps.KINDS[kind](PAGES))
        for workers in (1, 4):
            run(tmp_path / kind, output=tmp_path / "out", workers=workers, restart=True)
            assert articles(tmp_path / "out") == reference_articles(wikipedia_dumps.dump(PAGES))


class StopExtraction(Exception):
    pass


@pytest.mark.parametrize("kind", wikipedia_dumps.KINDS)
def test_run_resumes_after_each_shard(tmp_path: Path, kind: str) -> None:
    path, output = tmp_path / kind, tmp_path / "out"
    path.write_bytes(wikipedia_dumps.KINDS[kind](PAGES))
    complete, _ = run(path, output=tmp_path / "complete")
    dumps = [open_dump(path)]
    starts = 0
    for _ in range(complete.shards + 1):
        with lock_output(output):
            state = load_state(dumps, output, SMALL_SHARDS, False)
            if state.finished:
                break
            assert state.shards == starts
            starts += 1

            def stop(_: int, state: ExtractState = state, goal: int = starts) -> None:
                if state.shards == goal and not state.finished:
                    raise StopExtraction

            try:
                extract_articles(dumps, output, SMALL_SHARDS, state, 1, lambda _: None, stop)
            except StopExtraction:
                continue
    assert starts == complete.shards > 3
    assert shards(output) == shards(tmp_path / "complete")
    assert state.counts == complete.counts


PROGRAM = """
import sys
from pathlib import Path
from trainyard.prepare.wikipedia.extract import extract_articles
from trainyard.prepare.wikipedia.dump import open_dump
from trainyard.prepare.wikipedia.extract import ExtractOptions, load_state, lock_output

dumps, output, options = [open_dump(Path(sys.argv[1]))], Path(sys.argv[2]), ExtractOptions(shard_size=20_000)
with lock_output(output):
    state = load_state(dumps, output, options, False)
    if not state.finished:
        extract_articles(dumps, output, options, state, 2, print, lambda done: None)
"""
"""The extract command without the import of the command line."""


@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        ("multistream.xml.bz2", 4),
        pytest.param("multistream.xml.bz2", 12, marks=pytest.mark.nightly),
        pytest.param("xml.bz2", 8, marks=pytest.mark.nightly),
    ],
)
def test_killed_runs_give_the_shards_of_one_run(tmp_path: Path, kind: str, kills: int) -> None:
    rng = random.Random(kind)
    path, output = tmp_path / kind, tmp_path / "out"
    path.write_bytes(wikipedia_dumps.KINDS[kind](list(wikipedia_dumps.pages(100 * kills, sections=2))))
    run(path, output=tmp_path / "complete")
    arguments = [sys.executable, "-c", PROGRAM, str(path), str(output)]
    killed = 0
    for _ in range(kills):
        before = len(shards(output)) if output.exists() else 0
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
        while process.poll() is None and not (output.exists() and len(shards(output)) > before):
            time.sleep(0.002)
        time.sleep(rng.random() * 0.03)
        process.kill()
        killed += process.wait() == -signal.SIGKILL
        for name, data in shards(output).items():
            assert data == (tmp_path / "complete" / name).read_bytes()
    assert killed >= kills // 2
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert shards(output) == shards(tmp_path / "complete")
    assert not list(output.glob(".*.part"))


def test_progress_file_keeps_its_format(tmp_path: Path) -> None:
    """A run resumes after an update of the package."""
    (tmp_path / "a.xml").write_bytes(wikipedia_dumps.dump(PAGES))
    run(tmp_path / "a.xml", output=tmp_path / "out")
    saved = json.loads((tmp_path / "out" / ".extract.json").read_text())
    assert set(saved) == {"place", "shards", "counts", "finished", "job"}
    assert set(saved["job"]) == {"input", "shard_size", "namespaces", "min_text", "compress"}
    assert saved["place"] == [1, 0, 0, 0]


def test_output_of_different_runs_is_never_mixed(tmp_path: Path) -> None:
    path, output = tmp_path / "a.xml", tmp_path / "out"
    path.write_bytes(wikipedia_dumps.dump(PAGES))
    run(path, output=output)
    before = shards(output)
    modified = {file: file.stat().st_mtime_ns for file in output.iterdir() if file.name != ".extract.lock"}
    assert run(path, output=output)[0].finished
    assert {file: file.stat().st_mtime_ns for file in modified} == modified
    with pytest.raises(UserError, match="different min text; pass --restart"):
        run(path, output=output, options=ExtractOptions(SMALL_SHARDS.shard_size, min_text=3))
    with lock_output(output):
        code = "from pathlib import Path; from trainyard.prepare.wikipedia.extract import lock_output\n"
        code += f"with lock_output(Path({str(output)!r})): pass"
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert "another run is writing there" in other.stderr
    (output / "wiki_00001.jsonl").rename(output / "away")
    with pytest.raises(UserError, match=r"wiki_00001.jsonl is missing; pass --restart"):
        run(path, output=output)
    (output / ".extract.json").write_text("{}")
    with pytest.raises(UserError, match="--restart"):
        run(path, output=output)
    (output / ".extract.json").unlink()
    with pytest.raises(UserError, match="--restart"):
        run(path, output=output)
    run(path, output=output, restart=True)
    assert shards(output) == before
    path.write_bytes(wikipedia_dumps.dump(PAGES[:30]))
    with pytest.raises(UserError, match="different input; pass --restart"):
        run(path, output=output)
    run(path, output=output, restart=True)
    assert articles(output) == reference_articles(wikipedia_dumps.dump(PAGES[:30]))


def test_unreadable_pages_are_skipped_and_reported(tmp_path: Path) -> None:
    invalid = wikipedia_dumps.page(99, "Wrong", "x").replace("<ns>", "<sn>")
    no_end = wikipedia_dumps.page(98, "No end", "x").replace("</page>", "")
    no_start = wikipedia_dumps.page(97, "No start", "x").replace("<page>", "")
    no_title = wikipedia_dumps.page(96, "No title", "x").replace("<title>No title</title>", "")
    data = wikipedia_dumps.dump(
        [*PAGES[:9], invalid, PAGES[9], no_end, PAGES[10], no_start, *PAGES[11:20], no_title, no_end]
    )
    (tmp_path / "a.xml").write_bytes(data)
    state, unreadable = run(tmp_path / "a.xml", output=tmp_path / "out", workers=2)
    assert articles(tmp_path / "out") == reference_articles(wikipedia_dumps.dump(PAGES[:20]))
    assert state.counts["malformed"] == 5
    offsets = [int(page.location.removeprefix("byte ").removesuffix(" of its XML")) for page in unreadable]
    assert data[offsets[0] :].startswith(invalid.strip().encode()[:40])
    assert "mismatched tag" in unreadable[0].reason
    assert [data[offset:][:6] for offset in offsets] == [b"<page>", b"<page>", b"</page", b"<page>", b"<page>"]
    with pytest.raises(UserError, match=f"a.xml: byte {offsets[0]} of its XML: mismatched tag"):
        run(tmp_path / "a.xml", output=tmp_path / "strict", strict=True)


@pytest.mark.parametrize("kind", wikipedia_dumps.KINDS)
def test_truncated_dump_reports_the_complete_articles(tmp_path: Path, kind: str) -> None:
    data = wikipedia_dumps.KINDS[kind](PAGES)
    (tmp_path / "a").write_bytes(data[: len(data) * 3 // 4])
    with pytest.raises(UserError, match=r"(truncated|ended before).*; \d+ articles complete before that") as error:
        run(tmp_path / "a", output=tmp_path / "out", workers=2)
    count = int(re.findall(r"(\d+) articles complete", str(error.value))[0])
    assert count < 36
    assert count > (20 if kind != "xml.bz2" else 5)
    assert (
        articles(tmp_path / "out") == reference_articles(wikipedia_dumps.dump(PAGES))[: len(articles(tmp_path / "out"))]
    )


def test_page_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump, "MAX_PAGE_BYTES", 100_000)
    monkeypatch.setattr(dump, "READ_BYTES", 10_000)
    (tmp_path / "a.xml").write_bytes(wikipedia_dumps.dump([PAGES[0], "<page>" + "x" * 10_000_000]))
    with pytest.raises(UserError, match="a page of more than"):
        run(tmp_path / "a.xml", output=tmp_path / "out")


DUMP = wikipedia_dumps.dump(PAGES[:8])
DUMP_FILES = [DUMP, bz2.compress(DUMP), wikipedia_dumps.multistream(PAGES[:8], pages_per_stream=2), gzip.compress(DUMP)]


@st.composite
def damaged_dumps(draw: st.DrawFn) -> bytes:
    """Random bytes, some with a valid start, or a dump with bytes changed, removed or inserted."""
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
    data = bytearray(draw(st.sampled_from(DUMP_FILES)))
    for _ in range(draw(st.integers(1, 3))):
        offset = draw(st.integers(0, len(data)))
        action = draw(st.sampled_from(["cut", "change", "insert", "remove"]))
        if action == "cut":
            del data[offset:]
        elif action == "remove":
            del data[offset : offset + draw(st.integers(1, 50))]
        else:
            new = draw(
                st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from([b"</page>", b"<page>", b"<", b"&"]))
            )
            data[offset : offset + (len(new) if action == "change" else 0)] = new
    return bytes(data)


@examples(200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=damaged_dumps())
def test_damaged_dumps_are_refused_or_read(tmp_path: Path, data: bytes) -> None:
    """A one-line error, or complete articles."""
    output = tmp_path / "out"
    output.mkdir(exist_ok=True)
    (tmp_path / "a").write_bytes(data)
    try:
        state, unreadable = run(tmp_path / "a", output=output, restart=True)
    except UserError as error:
        message = str(error)
    else:
        message = ""
        assert state.finished
        assert state.counts["malformed"] == len(unreadable)
        assert state.counts["articles"] == len(articles(output))
    assert "\n" not in message
    for article in articles(output):
        assert set(article) == {"id", "url", "title", "text"}


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["trainyard", "data", "extract", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_info:
        main.main()
    return int(exit_info.value.code or 0)


def test_command_prints_a_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(2):
        (tmp_path / f"part{number}.xml").write_bytes(wikipedia_dumps.dump(PAGES[number * 30 : number * 30 + 30]))
    arguments = [tmp_path / "part*.xml", "-o", tmp_path / "out", "--shard-size", "20K"]
    assert command(monkeypatch, *arguments) == 0
    output = capsys.readouterr().out
    assert output.startswith("36 articles, ")
    assert "skipped: 6 redirects, 12 in other namespaces, 6 not wikitext, " in output
    assert articles(tmp_path / "out") == reference_articles(wikipedia_dumps.dump(PAGES))
    assert command(monkeypatch, *arguments) == 0
    assert capsys.readouterr().out.startswith("already finished")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.xml", "-o", "out"], "missing.xml: no such file"),
        (["text.xml", "-o", "out"], "text.xml: not a MediaWiki dump"),
        (["noise.bz2", "-o", "out"], "noise.bz2: cannot be read: Invalid data stream"),
        (["a.xml", "-o", "text.xml"], "--output text.xml: cannot be written"),
        (["a.xml", "-o", "out", "--shard-size", "much"], "--shard-size much: not a number of bytes; nearest: 256M"),
        (["a.xml", "-o", "out", "--namespaces", "Talk"], "--namespaces Talk: not comma-separated numbers"),
    ],
)
def test_user_mistakes_are_one_line_errors(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.xml").write_bytes(wikipedia_dumps.dump(PAGES[:3]))
    Path("text.xml").write_text("nothing of the kind")
    Path("noise.bz2").write_bytes(b"BZh9" + random.Random(0).randbytes(1000))
    assert command(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"trainyard: {message}")
    assert error.count("\n") == 1
    assert not Path("out").exists()
