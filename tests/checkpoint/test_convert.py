"""From every form to every other at any layout: bit for bit there and back; whole or not at all; mistakes in a line."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.checkpoint.test_nxd import GQA, Memory, cases, llama
from tests.checkpoint.test_nxd_optimizer import checkpoint as nxd_checkpoint
from tests.checkpoint.test_nxd_optimizer import two_groups
from tests.distributed.rank_jobs import Losses
from tests.support import configs
from tests.support.configs import tiny_batch
from tests.support.hf_reference import hf_forward, hf_reference
from tests.support.logs import captured_log
from trainyard.checkpoint.convert import DTYPE_CHOICES, ConversionTarget, convert_checkpoint, parse_layout, total_bytes
from trainyard.checkpoint.formats.hf import open_hf, write_config, write_hf
from trainyard.checkpoint.formats.nxd.layout import NxdLayout
from trainyard.checkpoint.formats.tensor_map import unfused_tensors
from trainyard.checkpoint.io.storage import open_storage
from trainyard.checkpoint.native.checkpoint import COMMIT_FILE, STATE_KINDS, Checkpoint
from trainyard.checkpoint.registry import first_model_difference, open_weights
from trainyard.config.hf_config import from_hf
from trainyard.config.model_schema import LlamaConfig
from trainyard.core.errors import UserError
from trainyard.core.tensor_slice import TensorSlice
from trainyard.train.trainer import Trainer

GENERATED = settings(
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a case takes too long to look for a simpler one
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    """What is asked here is not whether it outlives a power failure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


def carry(source: Path, directory: Path, form: Any, words: str = "", hints: str = "", **options: Any) -> Path:
    """As the command does it; and all the bytes that were promised are written."""
    opened = open_weights(source, None, parse_layout("nxd", hints))
    target = ConversionTarget(form, parse_layout(form, words), **options)
    counts: list[int] = []
    convert_checkpoint(opened, source, directory, target, counts.append)
    assert sum(counts) == total_bytes(opened, target)
    return directory


def same_state(one: Path, two: Path) -> None:
    """Every part of every kind, and how the run stood."""
    with Checkpoint(open_storage(one)) as first, Checkpoint(open_storage(two)) as second:
        assert first.dtypes == second.dtypes
        assert first.model == second.model
        for key in ("step", "updates", "skipped", "consumed_samples"):
            assert first.manifest[key] == second.manifest[key]
        for kind in first.dtypes:
            for name, tensor in unfused_tensors(first.model).items():
                a, b = (checkpoint.read_state(kind, tensor) for checkpoint in (first, second))
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), (kind, name)


def contents(directory: Path) -> dict[str, bytes]:
    """Of all files but the marker, which has the time in it."""
    paths = (path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != COMMIT_FILE)
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def read(directory: Path) -> dict[str, Tensor]:
    weights = open_weights(directory).weights
    return {name: weights.read(tensor).clone() for name, tensor in unfused_tensors(weights.model).items()}


# Our own form, with the optimizer's state

FAMILIES = {
    "llama": {**configs.LLAMA, "layers": 4, "vocab": 259},
    "gpt": {**configs.GPT, "layers": 4, "vocab": 131},
    "bert": {**configs.BERT, "layers": 4, "vocab": 127},
}
BATCH = {"global_batch": 12, "micro_batch": 4, "steps": 2}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint of a family after two steps."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            directory = tmp_path_factory.mktemp(family)
            sections = {"checkpoint": {"every": 1, "export_hf": False}, "log": {"directory": str(directory)}}
            summary = Trainer(configs.tiny_config(FAMILIES[family], train=BATCH, **sections)).run()
            made[family] = summary.directory / "checkpoints" / "step_00000002"
        return made[family]

    return make


@st.composite
def layouts(draw: st.DrawFn) -> str:
    tp, cp, dp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3]))
    pp, vpp = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1), (4, 1)]))
    words = [f"tp={tp}", f"pp={pp}", f"vpp={vpp}", f"cp={cp}", f"dp={dp if tp * cp * pp * dp <= 16 else 1}"]
    if pp == 2 and vpp == 1 and draw(st.booleans()):
        words.append(f"pipeline_cuts={draw(st.integers(0, 2))}")
    return ",".join(draw(st.permutations(words)))


@settings(GENERATED, max_examples=8)
@given(family=st.sampled_from(list(FAMILIES)), one=layouts(), two=layouts())
def test_from_one_layout_to_another_and_back(saved: Callable[[str], Path], family: str, one: str, two: str) -> None:
    with TemporaryDirectory() as folder:
        there = carry(saved(family), Path(folder) / "a", "native", one)
        other = carry(there, Path(folder) / "b", "native", two)
        back = carry(other, Path(folder) / "c", "native", one)
        for path in (there, other, back):
            same_state(saved(family), path)
        assert contents(there) == contents(back)
        with Checkpoint(open_storage(other)) as found:
            found.verify(found.files)
            wanted = parse_layout("native", two)
            assert len(found.files) == wanted["tp"] * wanted["pp"] * wanted["cp"] * wanted.pop("dp")
            assert {key: getattr(found.config.layout, key) for key in wanted} == wanted


def test_a_micro_batch_does_not_stand_in_the_way_of_a_layout(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """12 samples are 6 for each of two ranks, which are no micro batches of 4; a run may take any other."""
    with Checkpoint(open_storage(carry(saved("gpt"), tmp_path / "out", "native", "dp=2"))) as found:
        assert (found.config.train.global_batch, found.config.train.micro_batch) == (12, 1)
    with pytest.raises(UserError, match=r"train.global_batch=12: not a multiple of"):
        carry(saved("gpt"), tmp_path / "five", "native", "dp=5")


def test_weights_alone(saved: Callable[[str], Path], tmp_path: Path) -> None:
    source = saved("bert")
    with Checkpoint(open_storage(carry(source, tmp_path / "out", "native", "tp=2", weights_only=True))) as found:
        assert list(found.dtypes) == ["weights"]
        assert (found.step, found.manifest["updates"]) == (0, 0)
    before, after = read(source), read(tmp_path / "out")
    assert all(torch.equal(before[part], after[part]) for part in before)


def test_the_newest_checkpoint_of_a_run_is_taken(saved: Callable[[str], Path], tmp_path: Path) -> None:
    checkpoint = saved("gpt")
    for number, path in enumerate((checkpoint, checkpoint.parent, checkpoint.parents[1])):
        carry(path, tmp_path / str(number), "hf")
    assert contents(tmp_path / "0") == contents(tmp_path / "1") == contents(tmp_path / "2")


# Hugging Face, NxD, ours, Hugging Face


def words_of(layout: NxdLayout) -> str:
    """What a user would write."""
    out = []
    for field in fields(layout):
        value = getattr(layout, field.name)
        if value != field.default:
            out.append(f"{field.name}={':'.join(map(str, value)) if field.name == 'pipeline_cuts' else value}")
    return ",".join(out)


@settings(GENERATED, max_examples=20)
@given(case=cases(), dtype=st.sampled_from([torch.float32, torch.bfloat16]), xser=st.booleans(), data=st.data())
def test_through_nxd_and_ours(
    case: tuple[LlamaConfig, NxdLayout], dtype: torch.dtype, xser: bool, data: st.DataObject
) -> None:
    model, layout = case
    words = words_of(layout)
    assert NxdLayout(**parse_layout("nxd", words)) == layout
    with TemporaryDirectory() as folder:
        root = Path(folder)
        write_hf(root / "hf", Memory(model, dtype))
        carry(
            root / "hf",
            root / "nxd",
            "nxd",
            f"{words},qkv={layout.qkv},kv_multiplier={layout.kv_multiplier}",
            xser=xser,
        )
        assert any(path.suffix == ".tensors" for path in (root / "nxd" / "model").iterdir()) == xser
        tp = data.draw(st.sampled_from([tp for tp in (1, 2, 4, 8) if model.heads % tp == model.ffn % tp == 0]))
        hints = f"by_head={layout.by_head},kv_order={layout.kv_order}"
        carry(root / "nxd", root / "ours", "native", f"tp={tp},dp={data.draw(st.integers(1, 2))}", hints)
        carry(root / "ours", root / "back", "hf")
        assert contents(root / "back") == contents(root / "hf")


@pytest.mark.parametrize(
    ("model", "words", "kind"),
    [
        (llama(**GQA), "tp=4", {"qkv": "fused", "kv_multiplier": 2}),
        (llama(**GQA), "tp=2", {"qkv": "fused", "kv_multiplier": 1}),
        (llama(**GQA), "tp=4,qkv=qkv_linear,kv_order=trn2", {"kv_order": "trn2", "kv_multiplier": 2}),
        (llama(), "tp=4", {"qkv": "coalesced", "kv_multiplier": 1}),
        (llama(), "style=megatron", {"qkv": "coalesced"}),
        (llama(**GQA), "tp=2,style=megatron", {"qkv": "qkv_linear", "kv_multiplier": 1}),
    ],
)
def test_what_is_left_open_is_as_nxds_models_have_it(
    model: LlamaConfig, words: str, kind: dict[str, Any], tmp_path: Path
) -> None:
    write_hf(tmp_path / "hf", Memory(model))
    carry(tmp_path / "hf", tmp_path / "nxd", "nxd", words)
    found: Any = open_weights(tmp_path / "nxd").weights
    assert {key: getattr(found.layout, key) for key in kind} == kind


# Hugging Face's forms

AUTO: dict[str, Any] = {
    "llama": transformers.AutoModelForCausalLM,
    "gpt": transformers.AutoModelForCausalLM,
    "bert": transformers.BertForPreTraining,
}
TOKENIZER = {
    "tokenizer.json": '{"version": "1.0"}',
    "tokenizer_config.json": "{}",
    "special_tokens_map.json": "{}",
    "vocab.txt": "[PAD]\n",
    "merges.txt": "#\n",
    "generation_config.json": "{}",
}


def sharded(directory: Path, index: str, tensors: dict[str, Tensor], save: Callable[[Any, Path], None]) -> None:
    names = list(tensors)
    where = {name: f"part-{number % 3}-of-3" for number, name in enumerate(names)}
    for file in set(where.values()):
        save({name: tensors[name] for name in names if where[name] == file}, directory / file)
    (directory / index).write_text(json.dumps({"metadata": {}, "weight_map": where}))


def write_source(form: str, directory: Path, model: nn.Module) -> None:
    """A transformers model in the forms that people have them."""
    model.save_pretrained(directory)  # type: ignore[operator]
    file = directory / "model.safetensors"
    if form == "safetensors":
        return
    if form == "in shards":
        write_hf(directory.with_name("sharded"), open_hf(directory), max_shard_bytes=20_000)
        shutil.rmtree(directory)
        directory.with_name("sharded").rename(directory)
        assert len(list(directory.glob("model-*-of-*.safetensors"))) > 2
        return
    file.unlink()
    state = model.state_dict()  # with copies of tied weights in it, as torch.save keeps them
    if form == "bin":
        torch.save(state, directory / "pytorch_model.bin")
    else:
        sharded(directory, "pytorch_model.bin.index.json", state, torch.save)


@pytest.mark.parametrize("form", ["safetensors", "in shards", "bin", "bin in shards"])
@pytest.mark.parametrize("variant", ["llama-gqa", "llama-tied", "gpt2", "bert"])
def test_transformers_gives_the_same_logits(variant: str, form: str, tmp_path: Path) -> None:
    family, model, _ = hf_reference(variant)
    write_source(form, tmp_path / "in", model)
    for name, text in TOKENIZER.items():
        (tmp_path / "in" / name).write_text(text)
    (tmp_path / "in" / "README.md").write_text("of the source alone")
    out = carry(tmp_path / "in", tmp_path / "out", "hf")
    theirs = AUTO[family].from_pretrained(out).eval()
    batch = tiny_batch(family)
    with torch.no_grad():
        assert torch.equal(hf_forward(family, theirs, batch)[0], hf_forward(family, model, batch)[0])
    files = contents(out)
    assert set(files) == {"config.json", "model.safetensors", *TOKENIZER}
    assert all(files[name].decode() == text for name, text in TOKENIZER.items())


def test_tokenizer_files_go_along_to_nxd_and_back(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", Memory(llama()))
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    (tmp_path / "hf" / "tokenizer.model").mkdir()  # not a file of one
    carry(tmp_path / "hf", tmp_path / "nxd", "nxd", "tp=2")
    for number, path in enumerate((tmp_path / "nxd", tmp_path / "nxd" / "model")):
        assert "tokenizer.json" in contents(carry(path, tmp_path / str(number), "hf"))


def test_gpt2_without_a_prefix(tmp_path: Path) -> None:
    """As the files of gpt2 itself: they were saved from the model without its head."""
    _, model, _ = hf_reference("gpt2")
    model.transformer.save_pretrained(tmp_path / "bare")  # type: ignore[union-attr,operator]
    model.save_pretrained(tmp_path / "full")  # type: ignore[operator]
    assert "wte.weight" in load_file(tmp_path / "bare" / "model.safetensors")
    bare, full = (contents(carry(tmp_path / each, tmp_path / f"{each}-out", "hf")) for each in ("bare", "full"))
    assert bare["model.safetensors"] == full["model.safetensors"]


def test_bert_with_gamma_and_beta(tmp_path: Path) -> None:
    """As the files of bert-base-uncased itself."""
    _, model, _ = hf_reference("bert")
    model.save_pretrained(tmp_path / "new")  # type: ignore[operator]
    state = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in model.state_dict().items()
    }
    assert sum("gamma" in name for name in state) == 6
    (tmp_path / "old").mkdir()
    shutil.copy(tmp_path / "new" / "config.json", tmp_path / "old")
    torch.save(state, tmp_path / "old" / "pytorch_model.bin")
    old, new = (contents(carry(tmp_path / each, tmp_path / f"{each}-out", "hf")) for each in ("old", "new"))
    assert old == new


@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: {"model": x}, lambda x: {"state_dict": {"model": x}, "epoch": 3}]
)
def test_one_file_of_weights(wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    model = llama()
    write_hf(tmp_path / "hf", Memory(model))
    torch.save(wrap(load_file(tmp_path / "hf" / "model.safetensors")), tmp_path / "weights.pt")
    with pytest.raises(UserError, match=r"weights\.pt: does not say what model it holds; give --config"):
        open_weights(tmp_path / "weights.pt")
    opened = open_weights(tmp_path / "weights.pt", model)
    convert_checkpoint(
        opened, tmp_path / "weights.pt", tmp_path / "out", ConversionTarget("hf", {}), lambda count: None
    )
    assert contents(tmp_path / "out") == contents(tmp_path / "hf")


# Dtypes

HARD = [0.0, -0.0, 1.0, 1 + 2**-9, 1 + 2**-8, 1 + 3 * 2**-8, 65519.0, 65520.0, 1e30, -1e30, 3e38, 2**-25, 2**-24, 1e-40]
HARD += [float("inf"), -float("inf"), float("nan"), 2049.0, 2051.0]


@pytest.mark.parametrize("form", ["hf", "nxd", "native"])
@pytest.mark.parametrize("name", DTYPE_CHOICES)
def test_dtypes_change_as_torch_changes_them(name: str, form: str, tmp_path: Path) -> None:
    """Halves to even, what is too great to infinity, what is too small to less of itself, and nothing else."""
    weights = Memory(llama())
    weights.parts["embedding.weight"].view(-1)[: len(HARD)] = torch.tensor(HARD)
    write_hf(tmp_path / "hf", weights)
    found = read(carry(tmp_path / "hf", tmp_path / "out", form, dtype=DTYPE_CHOICES[name]))
    for part, value in weights.parts.items():
        assert found[part].dtype == DTYPE_CHOICES[name]
        assert torch.equal(found[part].view(torch.uint8), value.to(DTYPE_CHOICES[name]).view(torch.uint8)), part


def test_a_dtype_is_in_the_config(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", Memory(llama()))
    carry(tmp_path / "hf", tmp_path / "half", "hf", dtype=torch.bfloat16)
    config = json.loads((tmp_path / "half" / "config.json").read_text())
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"


class Mixed(Memory):
    """Parts of several dtypes, as a model has that keeps its norms in fp32."""

    def __init__(self, kinds: dict[str, torch.dtype]) -> None:
        super().__init__(llama(), torch.bfloat16)
        for word, dtype in kinds.items():
            self.parts = {part: value.to(dtype) if word in part else value for part, value in self.parts.items()}


@pytest.mark.parametrize(
    ("kinds", "one"),
    [({"norm": torch.float32}, torch.float32), ({"mlp": torch.float16}, torch.float32), ({}, torch.bfloat16)],
)
def test_no_value_is_lost_where_dtypes_are_mixed(
    kinds: dict[str, torch.dtype], one: torch.dtype, tmp_path: Path
) -> None:
    """A file of ours has one dtype: that which holds the others. fp16 and bf16 do not hold each other."""
    weights = Mixed(kinds)
    weights.parts["layers.0.mlp.up.weight"][0, 0] = 1 + 2**-7
    write_hf(tmp_path / "hf", weights)
    for form in ("hf", "nxd", "native"):
        found = read(carry(tmp_path / "hf", tmp_path / f"to-{form}", form))
        for part, value in weights.parts.items():
            assert torch.equal(found[part].double(), value.double()), part
            assert found[part].dtype == (one if form == "native" else value.dtype)


# Mistakes


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_hf(tmp_path / "hf", Memory(llama(**GQA)))
    return tmp_path / "hf"


@pytest.mark.parametrize(
    ("form", "words", "says"),
    [
        ("nxd", "tp=3", "tp_size=3: does not divide heads=8"),
        ("nxd", "tp", "--layout tp: nxd takes tp, pp, vpp, pipeline_cuts, kv_multiplier, qkv"),
        ("nxd", "dp=2", "--layout dp=2: nxd takes tp, pp"),
        ("nxd", "tp=x", "--layout tp=x: wanted a number from 1 up"),
        ("nxd", "tp=0", "--layout tp=0: wanted a number from 1 up"),
        ("nxd", "tp=-2", "--layout tp=-2: wanted a number from 1 up"),
        ("nxd", "qkv=all", "--layout qkv=all: not one of separate, coalesced, qkv_linear, fused"),
        ("nxd", "kv_order=trn3", "--layout kv_order=trn3: not one of trn1, trn2"),
        ("nxd", "gate_up=maybe", "--layout gate_up=maybe: wanted true or false"),
        ("nxd", "pp=2,pipeline_cuts=3,7", "--layout 7: nxd takes tp"),
        ("nxd", "pp=2,pipeline_cuts=a", "--layout pipeline_cuts=a: wanted layer numbers such as 3:7"),
        ("nxd", "pp=2,pipeline_cuts=3", r"pipeline_cuts=3: must be 1 rising"),
        ("nxd", "pp=5", "5 stages for 4 layers"),
        ("native", "tp=3", r"layout.tp=3: does not divide model.heads=8.*nearest"),
        ("native", "qkv=fused", "--layout qkv=fused: native takes tp, pp, vpp, cp, dp, pipeline_cuts"),
        ("native", "pp=5", r"layout.pp=5: pp x vpp = 5 stages for 4 layers"),
        ("native", "dp=0", "--layout dp=0: wanted a number from 1 up"),
        ("native", "vpp=2", "vpp=2: virtual stages need pp above 1"),
        ("native", "pp=2,pipeline_cuts=9", r"layout.pipeline_cuts=\[9\]"),
        ("hf", "tp=2", "--layout tp=2: hf takes no layout"),
    ],
)
def test_layouts_that_are_none(form: Any, words: str, says: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=says) as error:
        carry(source, tmp_path / "out", form, words)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_targets_that_cannot_be(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes").write_text("mine")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.chdir(tmp_path)
    for target, says in (
        (full, "full: is there already and not empty; give a directory that is new"),
        (full / "notes", "notes: is there already and not empty"),
        (source, "hf: is there already and not empty"),
        (full / "notes" / "out", "out: cannot be made: .*"),
        (Path("/proc/nowhere/out"), "out: cannot be made: "),
        (Path("/proc/out"), "out: cannot be made: "),
        (tmp_path / "loop", "loop: cannot be made: "),
        (Path("s3://bucket/model"), "s3:/bucket/model: a directory of this machine was expected, not a URL"),
    ):
        for form in ("hf", "nxd", "native"):
            with pytest.raises(UserError, match=says) as error:
                carry(source, target, form)
            assert "\n" not in str(error.value)
    assert (full / "notes").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"full", "hf", "loop"}


@pytest.mark.parametrize("form", ["hf", "nxd", "native"])
def test_targets_that_can_be(form: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "far")
    wanted = read(source)
    for target in ("plain", "new/parents/out", "empty", "link", "empty/../dots", "~home"):
        carry(source, Path(target) if target != "~home" else tmp_path / "~home", form)
        found = read(tmp_path / target)
        assert all(torch.equal(found[part], value) for part, value in wanted.items())
    assert (tmp_path / "link").is_symlink()


def test_sources_that_are_none(source: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("a")
    (tmp_path / "bare").mkdir()
    shutil.copy(source / "model.safetensors", tmp_path / "bare")
    for name, says in (
        ("nowhere", "nowhere: no such file or directory"),
        (
            "empty",
            "empty: no checkpoint that is known; known are a checkpoint of trainyard, a Hugging Face directory, ",
        ),
        ("text.txt", "text.txt: no checkpoint that is known"),
        ("bare", r"config.json: not a readable config.json"),
    ):
        with pytest.raises(UserError, match=says) as error:
            carry(tmp_path / name, tmp_path / "out", "hf")
        assert "\n" not in str(error.value)


def itself() -> dict[str, Any]:
    out: dict[str, Any] = {}
    out["model"] = out
    return out


@pytest.mark.parametrize("held", [{}, {"model": {}}, [1], {"epoch": 3}, {1: torch.ones(1)}, itself()], ids=str)
def test_files_without_weights(held: Any, tmp_path: Path) -> None:
    torch.save(held, tmp_path / "weights.pt")
    with pytest.raises(UserError, match=r"weights\.pt: (holds no weights by name|.* nested more than)") as error:
        open_weights(tmp_path / "weights.pt", llama())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "index",
    [
        "[]", "{", '{"weight_map": 1}', '{"weight_map": {"model.norm.weight": ["a"]}}', '{"weight_map": {"a": 7}}',
        '{"weight_map": {"a": "../hf/model.safetensors"}}', '{"weight_map": {"a": "nowhere.safetensors"}}',
        '{"weight_map": {"a": ""}}', '{"weight_map": {"a": ".."}}', '{"weight_map": {"a": "\\u0000"}}',
        '{"weight_map": {"a": "model.safetensors"}}', '{"weight_map": {}}', "[" * 100_000,
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_indexes_that_lie(index: str, kind: str, source: Path) -> None:
    (source / f"{kind}.index.json").write_text(index)
    if kind != "model.safetensors":
        torch.save(load_file(source / "model.safetensors"), source / kind)
        (source / "model.safetensors").unlink()
    with pytest.raises(UserError) as error:
        open_hf(source)
    assert "\n" not in str(error.value)


def test_only_llama_has_a_layout_of_nxd(saved: Callable[[str], Path], tmp_path: Path) -> None:
    for family in ("gpt", "bert"):
        with pytest.raises(
            UserError, match=rf"model.family={family}: NxD's layouts are of Llama models; nearest: --to hf"
        ):
            carry(saved(family), tmp_path / "out", "nxd", "tp=2")
    assert not list(tmp_path.iterdir())


def test_the_state_keeps_its_dtype(saved: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--dtype: what goes with the optimizer's state keeps its dtype"):
        carry(saved("gpt"), tmp_path / "out", "native", dtype=torch.bfloat16)
    assert not list(tmp_path.iterdir())
    carry(saved("gpt"), tmp_path / "out", "native", dtype=torch.bfloat16, weights_only=True)
    assert {value.dtype for value in read(tmp_path / "out").values()} == {torch.bfloat16}


# What a user says of the model


def test_a_model_that_is_spelt_out_is_the_same(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """A config.json has the numbers that a file of ours leaves to defaults."""
    for family in FAMILIES:
        checkpoint = saved(family)
        section = configs.tiny_config(FAMILIES[family]).model
        write_config(tmp_path / "config.json", section, torch.float32)
        assert first_model_difference(from_hf(tmp_path), section) is None
        open_weights(checkpoint, from_hf(tmp_path))
        wider = from_hf(tmp_path).model_copy(update={"ffn": 96})
        with pytest.raises(UserError, match=rf"model.ffn=96: .* has {section.ffn_size}"):
            open_weights(checkpoint, wider)
    with pytest.raises(UserError, match=r"model.family=bert: .* has gpt"):
        open_weights(saved("gpt"), section)


# Half way


class Died(BaseException):
    """Ctrl-C, or any end of the world."""


def dying(after: int, error: BaseException) -> Callable[[int], None]:
    left = after

    def progress(count: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise error

    return progress


FORMS: dict[str, Any] = {
    "hf": ConversionTarget("hf", {}),
    "nxd": ConversionTarget("nxd", {"tp": 2, "pp": 2}),
    "nxd xser": ConversionTarget("nxd", {"tp": 2}, xser=True),
    "native": ConversionTarget("native", {"tp": 2, "pp": 2, "dp": 2}),
}


@pytest.mark.parametrize("after", [0, 7, 20])
@pytest.mark.parametrize("form", FORMS)
def test_an_end_half_way_leaves_nothing(form: str, after: int, source: Path, tmp_path: Path) -> None:
    opened = open_weights(source)
    for error in (Died(), KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")):
        with pytest.raises(type(error)):
            convert_checkpoint(opened, source, tmp_path / "out", FORMS[form], dying(after, error))
        assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    convert_checkpoint(opened, source, tmp_path / "out", FORMS[form], lambda count: None)
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "out"}


class Failing(Memory):
    """A disk that cannot be read any more."""

    def __init__(self, reads: int) -> None:
        super().__init__(llama(**GQA))
        self.left = reads

    def read(self, wanted: TensorSlice) -> Tensor:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.EIO, "Input/output error")
        return super().read(wanted)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("what", ["reading", "fsync", "rename"])
def test_a_disk_that_fails_half_way_leaves_nothing(
    form: str, what: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_weights(source)
    number = 0

    def fails(real: Callable[..., Any], at: int) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal number
            number += 1
            if number >= at:
                raise OSError(errno.EIO, "Input/output error")
            return real(*arguments, **named)

        return call

    with monkeypatch.context() as patch:
        if what == "reading":
            object.__setattr__(opened, "weights", Failing(10))
        elif what == "fsync":
            patch.setattr(os, "fsync", fails(os.fsync, 2))
        else:
            patch.setattr(os, "replace", fails(os.replace, 1))
            patch.setattr(os, "rename", fails(os.rename, 1))
        with pytest.raises(OSError, match="Input/output error"):
            convert_checkpoint(opened, source, tmp_path / "out", FORMS[form], lambda count: None)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("form", FORMS)
def test_what_a_kill_left_is_no_hindrance(form: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / ".out.part" / "model").mkdir(parents=True)
    (tmp_path / ".out.part" / "rank_00000.safetensors").write_text("half")
    convert_checkpoint(open_weights(source), source, tmp_path / "out", FORMS[form], lambda count: None)
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "out"}
    found, wanted = read(tmp_path / "out"), read(source)
    assert all(torch.equal(found[part], value) for part, value in wanted.items())


# A run of NxD goes on here

RUN = {
    "family": "llama", "vocab": 36, "hidden": 16, "layers": 3, "heads": 8, "kv_heads": 2, "head_dim": 4, "ffn": 20,
    "max_positions": 32,
}  # fmt: skip


def losses(directory: Path, **checkpoint: Any) -> tuple[list[float], Path]:
    hook = Losses()
    config = configs.tiny_config(
        RUN,
        data={"source": "synthetic", "seq_len": 8},
        train={"steps": 5, "global_batch": 4, "micro_batch": 2},
        optimizer={"lr": 1e-2},
        schedule={"warmup_steps": 3},
        checkpoint={"export_hf": False, "keep": 0, **checkpoint},
        log={"directory": str(directory)},
    )
    lines: list[str] = []
    with captured_log(lines.append):
        summary = Trainer(config, callbacks=[hook]).run()
    assert not [line for line in lines if line.startswith("note:")]
    return hook.losses, summary.directory


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dp": 2}, ""),
        ({"tp": 4, "times": 2, "pp": 2, "dp": 3, "xser": True}, "tp=2,dp=2"),
        ({"tp": 2, "dp": 2, "groups": two_groups}, "pp=3,cp=2"),
    ],
)
def test_an_nxd_run_goes_on_with_the_same_losses(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    wanted, run = losses(tmp_path / "ours", every=1)
    checkpoint = run / "checkpoints" / "step_00000002"
    with Checkpoint(open_storage(checkpoint)) as own:
        model, updates = own.model, own.manifest["updates"]
        tensors = unfused_tensors(model).items()
        kinds = {kind: {name: own.read_state(kind, tensor) for name, tensor in tensors} for kind in STATE_KINDS}
    assert isinstance(model, LlamaConfig)
    tag = nxd_checkpoint(tmp_path / "nxd" / "step_2", model, kinds, step=updates, **options)
    write_config(tag / "config.json", model, torch.float32)
    there = carry(tag, tmp_path / "there", "native", words)
    with Checkpoint(open_storage(there)) as found:
        assert (found.step, found.manifest["updates"]) == (2, updates)
    moved = carry(there, tmp_path / "moved", "native", "tp=4")
    resumed = [losses(tmp_path / f"again-{path.name}", resume=str(path))[0] for path in (checkpoint, there, moved)]
    assert resumed == [wanted[2:]] * 3
