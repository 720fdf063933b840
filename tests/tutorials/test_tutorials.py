"""The tutorials run as printed: the commands of their column "This machine", with the outputs they show."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "tutorials.py"))
page_parameter = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def test_there_is_one_tutorial_per_guide() -> None:
    assert {page.stem for page in PAGES} == {
        "bert",
        "deepseek",
        "fine-tune",
        "gpt3-wikipedia",
        "llama-nxdt",
        "llama2-nxd",
        "prefer",
        "solve",
    }


@page_parameter
def test_two_columns(page: Path) -> None:
    """Commands come in pairs, the cluster's and this machine's, and are followed by what they print."""
    blocks = SCRIPT["read_blocks"](page.read_text())
    titles = [block.title for block in blocks]
    assert titles.count("This machine") >= 8
    assert titles.count("The cluster") >= 6
    for block, following in zip(blocks, [*titles[1:], ""], strict=True):
        known = ("The cluster", "This machine", "Output", "Example output")
        assert block.title in known or re.fullmatch(r"[\w.-]+", block.title), block
        assert block.title != "The cluster" or following == "This machine", f"line {block.line}"
        assert "utput" not in block.title or block.body.strip(), f"line {block.line}: run scripts/tutorials.py --update"
    for column in re.findall(r'<div class="grid" markdown>(.*?)</div>', page.read_text(), re.DOTALL):
        assert [block.title for block in SCRIPT["read_blocks"](column)] == ["The cluster", "This machine"]


@page_parameter
def test_shows_results(page: Path) -> None:
    """A plot of the loss, a screenshot or what the model says, and the time it takes."""
    text = page.read_text()
    for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
        assert (page.parent / picture).stat().st_size > 1000
    assert SCRIPT["PICTURE"].search(text)
    minutes = re.search(r"<!-- time -->(\d+\.\d) minutes<!-- /time -->", text)
    assert minutes
    assert float(minutes[1]) < 8


@pytest.mark.nightly
@page_parameter
def test_commands_print_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    directory = tmp_path / "tutorial"
    directory.mkdir()
    assert SCRIPT["run_page"](page, directory, update=False) == []


class TestRunner:
    """The runner finds errors of a page."""

    def run(self, tmp_path: Path, text: str, update: bool = False) -> list[str]:
        page, directory = tmp_path / "page.md", tmp_path / "tutorial"
        page.write_text(text)
        directory.mkdir()
        problems: list[str] = SCRIPT["run_page"](page, directory, update)
        return problems

    def test_passes_and_keeps_variables(self, tmp_path: Path) -> None:
        blocks = ("name=7\ncd ..", "echo loss $name.0 in 3 s\necho\necho end")
        text = "".join(f'```bash title="This machine"\n{block}\n```\n\n' for block in blocks)
        assert self.run(tmp_path, text + '```text title="Output"\nloss 7.5 in 400.1 ms\n...\nend\n```\n') == []

    @pytest.mark.parametrize(
        ("command", "output", "problem"),
        [
            ("false; echo a", "a", "exit code 1"),
            ("echo a\nexit 3", "a", "exit code 3"),
            ("echo a; echo b", "a", "not on the page: 'b'"),
            ("echo b", "a", "not printed: 'a'"),
            ("echo loss 1.0", "loss 2.0", "not printed"),
            ("echo step 2/3 took 4 s", "step 3/3 took 4 s", "not printed"),
            ("echo a; echo c", "a\nb\n...", "not printed: 'b'"),
        ],
    )
    def test_finds(self, tmp_path: Path, command: str, output: str, problem: str) -> None:
        text = f'```bash title="This machine"\n{command}\n```\n\n```text title="Output"\n{output}\n```\n'
        (found,) = self.run(tmp_path, text)
        assert problem in found

    def test_update(self, tmp_path: Path) -> None:
        text = '```bash title="This machine"\nseq 3; echo loss 1.5\n```\n\n```text title="Output"\n...\nloss 9.0\n```\n'
        assert self.run(tmp_path, text, update=True) == []
        assert "...\nloss 1.5\n" in (tmp_path / "page.md").read_text()
