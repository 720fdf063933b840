"""Bad input of any kind ends in one line: values of keys, damaged files of every format, wrong command lines.

The fast tier runs a part of it; `python bench/fuzz.py` runs 10,000 inputs and writes bench/results/fuzz-cpu.json.
"""

import random
import subprocess
from collections.abc import Iterator

import pytest

from tests.fuzz.corpus import write_corpus
from tests.fuzz.fuzzer import Fuzzer, check_end
from tests.fuzz.inputs import READERS, explore, key_inputs, parts, run_key, run_reader
from tests.support.forkserver import ForkServer

KEY_GROUPS = 20
"""Parts of the nightly test of all keys."""


@pytest.fixture(scope="module")
def fuzzer(cli: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzer]:
    root = tmp_path_factory.mktemp("fuzz")
    one = Fuzzer(cli, write_corpus(root / "corpus", cli), root / "scratch")
    yield one
    print(f"fuzz: {one.inputs} inputs, {one.refused} refused")


@pytest.fixture
def seed_value(request: pytest.FixtureRequest) -> int:
    """Printed with a failure; `--hypothesis-seed=N` repeats it."""
    given = request.config.getoption("--hypothesis-seed")
    value = int(given) if given not in (None, "random") else random.SystemRandom().randrange(1 << 32)
    print(f"fuzz: seed {value}")
    return value


def test_some_of_everything(fuzzer: Fuzzer, seed_value: int) -> None:
    generator = random.Random(seed_value)
    for case in generator.sample(list(key_inputs()), 24):
        run_key(fuzzer, case)
    every = parts()
    for name in generator.sample(sorted(every), 16):
        explore(fuzzer, every[name], 1, seed_value)


@pytest.mark.nightly
@pytest.mark.parametrize("group", range(KEY_GROUPS))
def test_keys(group: int, fuzzer: Fuzzer) -> None:
    for case in list(key_inputs())[group::KEY_GROUPS]:
        run_key(fuzzer, case)


@pytest.mark.nightly
@pytest.mark.parametrize("name", parts())
def test_generated_inputs(name: str, fuzzer: Fuzzer, seed_value: int) -> None:
    explore(fuzzer, parts()[name], 60, seed_value)


@pytest.mark.nightly
@pytest.mark.parametrize("name", READERS)
def test_undamaged_files_are_read(name: str, fuzzer: Fuzzer) -> None:
    assert run_reader(fuzzer, None, name) == 0


@pytest.mark.parametrize(
    ("code", "stderr"),
    [
        (1, "Traceback (most recent call last):\nValueError\n"),
        (-11, ""),
        (2, ""),
        (2, "trainyard: \n"),
        (2, "trainyard: a\ntrainyard: b\n"),
        (134, "thread 'main' panicked at src/lib.rs\ntrainyard: aborted\n"),
    ],
)
def test_bad_ends_are_noticed(code: int, stderr: str) -> None:
    with pytest.raises(AssertionError):
        check_end(["x"], subprocess.CompletedProcess([], code, "", stderr))


def test_limits(fuzzer: Fuzzer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command has 4 GiB, and one that hangs is found: here, in code of the user."""
    command = ["train", "tiny-llama", "--smoke", "train.steps=1", "train.loss=user:f"]
    module = fuzzer.directory() / "user.py"
    module.write_text("bytearray(8 << 30)\n")
    assert fuzzer.run(command) == 2
    module.write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr("tests.fuzz.fuzzer.LIMIT_S", 2.0)
    with pytest.raises(AssertionError, match="no answer in 2 s"):
        fuzzer.run(command)
