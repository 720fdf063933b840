"""Checkpoints that mean harm or are broken: one line that names the file, and nothing has happened."""

import argparse
import enum
import functools
import io
import operator
import os
import pickle
import random
import re
import subprocess
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from tests.checkpoint.test_torch_file import alike, save, unlazy
from trainyard.checkpoint.io import pickle_limits
from trainyard.checkpoint.io.pickle_allowlist import ALLOWED_GLOBALS
from trainyard.checkpoint.io.torch_file import StubObject, open_torch_file
from trainyard.checkpoint.io.torch_writer import TorchFileWriter
from trainyard.core import atomic_files
from trainyard.core.errors import UserError


class Calls:
    """Pickled as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> Any:
        return self.reduced


class Held:
    """Pickled as a persistent id."""

    def __init__(self, *words: Any) -> None:
        self.words = words


def program(value: Any) -> bytes:
    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return value.words if isinstance(value, Held) else None

    stream = io.BytesIO()
    Pickler(stream, 2).dump(value)
    return stream.getvalue()


def archive(path: Path, pickled: bytes) -> Path:
    """A file with this pickle, and a storage of 40 bytes."""
    with zipfile.ZipFile(path, "w") as new:
        new.writestr("archive/data.pkl", pickled)
        new.writestr("archive/data/0", bytes(40))
    return path


def refused(path: Path, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        unlazy(open_torch_file(path))
    said = str(caught.value)
    assert said.startswith(str(path.parent))
    assert said.isprintable()  # one line, too
    assert len(said) < 600


def nested(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def evils(mark: str) -> dict[str, Any]:
    """By the name that the message must have. Most would make a file `mark`."""
    make = f"open({mark!r}, 'w')"
    return {
        "posix.system": Calls(os.system, f"touch {mark}"),
        "builtins.eval": Calls(eval, make),
        "builtins.exec": Calls(exec, make),
        "io.open": Calls(open, mark, "w"),
        "builtins.getattr": Calls(getattr, os.system, "__call__"),
        "operator.attrgetter": Calls(operator.attrgetter, "a.b"),
        "functools.partial": Calls(functools.partial, os.system, f"touch {mark}"),
        "(commands|subprocess).Popen": Calls(subprocess.Popen, ["touch", mark]),  # the former in Python 2
        "_?pickle.loads": Calls(pickle.loads, pickle.dumps(Calls(eval, make))),
        "torch.serialization.load": Calls(torch.load, mark),
        "torch.storage._load_from_bytes": Calls(torch.storage._load_from_bytes, nested(Calls(eval, make))),
        "numpy.load": Calls(np.load, mark),
        "pathlib.PosixPath": Path(mark),
        "trainyard.core.atomic_files.atomic_write_text": Calls(atomic_files.atomic_write_text, mark, "text"),
        "tests.checkpoint.test_torch_file_hostile.Plain": Plain(),
        "tests.checkpoint.test_torch_file_hostile.Choice": Choice.ONE,
    }


class Plain:
    def __init__(self) -> None:
        self.attribute = [1, 2]

    def __setstate__(self, state: Any) -> None:
        raise AssertionError


class Choice(enum.Enum):
    ONE = 1


@pytest.mark.parametrize("name", evils(""))
@pytest.mark.parametrize("zipped", [True, False])
def test_nothing_is_called(name: str, zipped: bool, tmp_path: Path) -> None:
    state = {"a": torch.ones(3), "b": [evils(str(tmp_path / "mark"))[name]]}
    for protocol in (2, 4):
        path = save(state, tmp_path / "a.pt", zipped, protocol)
        refused(path, f"a.pt: refuses to load {name}: not a tensor")
        inert = open_torch_file(path, allow_stubs=True)
        assert type(inert["b"][0]) is StubObject
        assert re.fullmatch(name, inert["b"][0].name)
        alike(inert["a"].read(), torch.ones(3))
    assert os.listdir(tmp_path) == ["a.pt"]


def test_what_megatron_saves_beside_the_weights(tmp_path: Path) -> None:
    arguments = argparse.Namespace(num_layers=2, params_dtype=torch.bfloat16, kind=Choice.ONE, save=Path("a"))
    state = {
        "args": arguments,
        "checkpoint_version": 3.0,
        "iteration": 100,
        "model": {"language_model": {"embedding": torch.ones(2, 3)}},
        "optimizer": {
            "grad_scaler": {"scale": 65536.0},
            "loss_scaler": Plain(),
            "state": {0: {"step": torch.tensor(1.0)}},
        },
        "rng_state": [{"random": random.getstate(), "np": np.random.RandomState(1).get_state()}],
    }
    path = save(state, tmp_path / "model_optim_rng.pt")
    refused(path, "refuses to load .*Choice")
    ours = unlazy(open_torch_file(path, allow_stubs=True))
    for name in ("checkpoint_version", "iteration", "model", "rng_state"):
        alike(ours[name], state[name])
    kind, where = ours["args"].pop("kind"), ours["args"].pop("save")
    assert ours["args"] == {"num_layers": 2, "params_dtype": torch.bfloat16}
    assert (kind.name.rpartition(".")[2], where.name) == ("Choice", "pathlib.PosixPath")
    assert type(ours["optimizer"]["loss_scaler"]) is StubObject


SIZE = b"ctorch\nSize\n"
PROGRAMS = {
    "an instance": (b"(S'true'\niposix\nsystem\n.", "refuses to load posix.system"),
    "an object": (b"(cposix\nsystem\nS'true'\no.", "refuses to load posix.system"),
    "a chain of getattr": (
        b"cbuiltins\ngetattr\n(cos\npath\nS'os'\ntRS'system'\n.",
        "refuses to load builtins.getattr",
    ),
    "a dotted name": (b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93.", r"refuses to load torch\.os\.system"),
    "a name of control characters": (b"\x80\x04\x8c\x03\x1b[m\x8c\x01\n\x93.", r"refuses to load \\x1b\[m\.\\n"),
    "a lone surrogate": (b"\x80\x04\x8c\x03\xed\xb2\x80\x8c\x01a\x93.", r"refuses to load \\udc80\.a"),
    "a long name": (b"c" + b"a" * 10**6 + b"\nb\n.", "refuses to load a{200}:"),
    "an extension": (b"\x82\x01.", "damaged"),
    "a text id": (b"P0\n.", "damaged"),
    "a state for a function": (SIZE + b"}X\x04\x00\x00\x00callX\x01\x00\x00\x00asb.", r"a state for torch\.Size"),
    "slots for a function": (SIZE + b"N}X\x04\x00\x00\x00callX\x01\x00\x00\x00as\x86b.", r"a state for torch\.Size"),
    "a call of a list": (b"])R.", "a call of"),
    "a call without a tuple": (SIZE + b"]R.", "a call of"),
    "append to a tuple": (b")Na.", "where a list was expected"),
    "an empty stack": (b"R.", "damaged"),
    "no end": (b"N", "damaged"),
    "two values": (b"NN.", "damaged"),
    "an unknown memo": (b"h\x07.", "damaged"),
    "a great number of bytes": (b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.", "damaged"),
    "a great string": (b"X\xff\xff\xff\xff.", "damaged"),
    "a great number of digits": (b"L" + b"9" * 10**6 + b"L\n.", "damaged"),
    "a deep key": (b"})" + b"\x85" * 100_000 + b"Ns.", "used as a key"),
    "a key that unfolds": (b"})" + b"2\x86" * 100 + b"Ns.", "used as a key"),
    "a long key": (b"}(" + b"K\x01" * 17 + b"tNs.", "used as a key"),
    "a list as a key": (b"}]Ns.", "used as a key"),
    "a key that collides": (b"}\x8a\x09" + (2**64).to_bytes(9, "little") + b"Ns.", "used as a key"),
    "a deep list": (b"]" * 100_000 + b"a" * 99_999 + b".", "nested more than"),
    "a cycle": (b"]q\x00h\x00a.", "nested more than"),
    "a function that unfolds": (b")" + b"2\x86" * 100 + b")R.", "a call of a tuple"),
    "a name that unfolds": (b"N)" + b"2\x86" * 100 + b"\x93.", "a name that is none"),
    "a memo number that collides": (b"Np2305843009213693951\n.", "a memo number"),
    "one text copied on and on": (
        b"]X\x00\x00\x20\x00" + b"a" * 2**21 + b"q\x00" + b"c_codecs\nencode\nh\x00U\x06latin1\x86R0" * 2000 + b"a.",
        "copied over and over",
    ),
    "a strange device": (b"ctorch\ndevice\nU\x02\x1b\n\x85R.", r"Invalid device string: '\\x1b "),
    "an array filled twice": (program(np.arange(3))[:-1] + b"h\x14b.", "filled twice"),  # the memo has its state
    "an object array": (program(np.array([Choice], object)), "not numbers"),
    "a text array": (program(np.array(["a"])), "not numbers"),
    "a great bytearray": (b"c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R.", "damaged"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_that_are_no_values(name: str, tmp_path: Path) -> None:
    before, start = dict(ALLOWED_GLOBALS), time.monotonic()
    refused(archive(tmp_path / "a.pt", PROGRAMS[name][0]), PROGRAMS[name][1])
    assert time.monotonic() - start < 10
    assert before == ALLOWED_GLOBALS


def test_what_unfolds_or_claims_to_be_great_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle_limits, "MAX_VALUES", 10_000)
    before = psutil.Process().memory_info().rss
    refused(archive(tmp_path / "a.pt", b")" + b"2\x86" * 60 + b"."), "more than 10000 values")
    refused(archive(tmp_path / "b.pt", b"]" + b"2]q\x00]" * 3000 + b"."), "more than 10000 opcodes")
    assert open_torch_file(archive(tmp_path / "c.pt", b"Nr\xff\xff\xff\xff.")) is None  # the greatest memo number
    assert psutil.Process().memory_info().rss - before < 2**26


FLOATS = ("storage", torch.FloatStorage, "0", "cpu", 10)
VIEWS = [
    (FLOATS, 0, (11,), (1,)),
    (FLOATS, 10, (1,), (1,)),
    (FLOATS, 0, (2, 2), (9, 1)),
    (FLOATS, 0, (2**62,), (1,)),
    (FLOATS, 0, (2**40,), (0,)),
    (FLOATS, 0, (2**20,) * 4, (0,) * 4),
    (FLOATS, 0, (1,), (2**62,)),
    (FLOATS, -1, (2,), (1,)),
    (FLOATS, 0, (-1,), (1,)),
    (FLOATS, 9, (2,), (-1,)),
    (FLOATS, 0, (2.0,), (1,)),
    (FLOATS, 0, (True,), (1,)),
    (FLOATS, 0, (2,), (1, 1)),
    (FLOATS, 0, (1,) * 100, (1,) * 100),
    (FLOATS, 0, 3, 1),
    (FLOATS, None, (1,), (1,)),
    (("storage", torch.FloatStorage, "0", "cpu", 11), 0, (1,), (1,)),
    (("storage", torch.DoubleStorage, "0", "cpu", 10), 0, (1,), (1,)),
    (("storage", torch.FloatStorage, "0", "cpu", -1), 0, (1,), (1,)),
    (("storage", torch.FloatStorage, "1", "cpu", 10), 0, (1,), (1,)),
    (("storage", torch.FloatStorage, ["0"], "cpu", 10), 0, (1,), (1,)),
    (("storage", torch.Tensor, "0", "cpu", 10), 0, (1,), (1,)),
    (("module", torch.FloatStorage, "0", "cpu", 10), 0, (1,), (1,)),
    (("storage",), 0, (1,), (1,)),
]


@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_views_that_leave_their_storage(view: Any, tmp_path: Path) -> None:
    rebuild = torch._utils._rebuild_tensor_v2

    def made(storage: Any, *rest: Any) -> Path:
        return archive(tmp_path / "a.pt", program([Calls(rebuild, Held(*storage), *rest, False, {})]))

    alike(unlazy(open_torch_file(made(FLOATS, 2, (2, 4), (4, 1)))), [torch.zeros(2, 4)])
    refused(made(*view), r"a\.pt: damaged, or not a file of torch\.save")


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    refused(path, "No such file")
    refused(tmp_path, "not a file")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "not a file")
    for content in (b"", b"PK\3\4", b"version https://git-lfs", pickle.dumps({"a": 1}), b"\x80\x02"):
        path.write_bytes(content)
        refused(path, "damaged, or not a file of torch.save")
    torch.jit.script(torch.nn.Linear(2, 2)).save(path)
    refused(path, "TorchScript")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        new.writestr("archive/data.pkl", program(list(range(100))))
    refused(path, "is compressed")


def write(path: Path, state: dict[str, Any]) -> None:
    writer = TorchFileWriter(path, root_key="model")
    for name, tensor in state["model"].items():
        writer.add(name, tensor)
    writer.close()


STATE = {
    "model": {"a": torch.arange(30.0).reshape(5, 6), "b": torch.arange(9, dtype=torch.bfloat16), "c": torch.tensor(0.3)}
}
WRITERS = {
    "zip": lambda path: save(STATE, path),
    "old": lambda path: save(STATE, path, zipped=False),
    "ours": lambda path: write(path, STATE),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_damage_is_told(kind: str, tmp_path: Path) -> None:
    """Cut short: always. A bit turned: told, or without effect, or in the values of a tensor."""
    draw, path = random.Random(kind), tmp_path / "a.pt"
    WRITERS[kind](path)
    whole = path.read_bytes()
    alike(unlazy(open_torch_file(path)), STATE)
    for _ in range(100):
        path.write_bytes(whole[: draw.randrange(len(whole))])
        refused(path, "a.pt: ")
    held = [whole.find(tensor.view(-1).view(torch.uint8).numpy().tobytes()) for tensor in STATE["model"].values()]
    inside = {
        at for start, t in zip(held, STATE["model"].values(), strict=True) for at in range(start, start + t.nbytes)
    }
    told = 0
    for _ in range(300):
        at = draw.randrange(len(whole))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :])
        try:
            found = unlazy(open_torch_file(path))
        except UserError:
            told += 1
        else:
            if kind != "old" and at not in inside:  # the old format has no checksums
                alike(found, STATE)
    assert told > 30


def test_programs_of_chance(tmp_path: Path) -> None:
    """Pickles with a few bytes changed or cut, under right checksums, and plain noise: a value or a UserError."""
    draw, path = random.Random(0), tmp_path / "a.pt"
    state = {"a": torch.ones(2, 5), "b": [np.arange(3), {1: (2, "c")}], "n": argparse.Namespace(d=torch.Size([1]))}
    with zipfile.ZipFile(save(state, path)) as saved:
        good = saved.read("a/data.pkl")
    read = 0
    for number in range(600):
        changed = bytearray(good) if number % 4 else bytearray(draw.randbytes(draw.randrange(200)))
        for _ in range(draw.randrange(1, 4)):
            if changed:
                at = draw.randrange(len(changed))
                changed[at : at + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
        with suppress(UserError):
            unlazy(open_torch_file(archive(path, bytes(changed)), allow_stubs=number % 2 == 0))
            read += 1
        path.write_bytes(draw.randbytes(draw.randrange(300)))
        refused(path, "a.pt: ")
    assert 5 < read < 300
