"""Conversion between all formats and layouts: bit for bit in both directions, atomic, with one-line errors."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.distributed.rank_jobs import LossRecorder
from tests.formats.test_nxd import GQA, RandomWeights, cases, llama
from tests.formats.test_nxd_optimizer import two_groups
from tests.formats.test_nxd_optimizer import write_checkpoint as write_nxd_checkpoint
from tests.support import configs
from tests.support.configs import tiny_batch
from tests.support.examples import examples
from tests.support.hf_reference import hf_forward, hf_reference
from tests.support.logs import captured_log
from trainyard.checkpoint.checkpoint import COMMIT_FILE, STATE_KINDS, Checkpoint
from trainyard.checkpoint.weights import unfused_tensors
from trainyard.core.errors import UserError
from trainyard.core.tensor_slice import TensorSlice
from trainyard.families.builtin.llama import LlamaConfig
from trainyard.families.decoder import DecoderConfig
from trainyard.families.hf_config import from_hf
from trainyard.families.model_config import first_model_difference
from trainyard.formats.convert import DTYPE_CHOICES, ConversionTarget, convert_checkpoint, parse_layout, total_bytes
from trainyard.formats.hf import open_hf, write_hf, write_model_files
from trainyard.formats.nxd.layout import NxdLayout
from trainyard.formats.registry import open_weights
from trainyard.remote.storage import open_storage
from trainyard.run.trainer import Trainer

GENERATED: dict[str, Any] = {
    "phases": [Phase.explicit, Phase.reuse, Phase.generate],  # an example takes too long to shrink
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}


def convert(
    source: Path, directory: Path, target_format: Any, layout: str = "", hints: str = "", **options: Any
) -> Path:
    """Convert as the command does, and check that the announced number of bytes was written."""
    opened = open_weights(source, None, parse_layout("nxd", hints))
    target = ConversionTarget(target_format, parse_layout(target_format, layout), **options)
    written: list[int] = []
    convert_checkpoint(opened, source, directory, target, written.append)
    assert sum(written) == total_bytes(opened, target)
    return directory


def assert_same_state(path_a: Path, path_b: Path) -> None:
    """Compare all tensors and the counters of two native checkpoints."""
    with Checkpoint(open_storage(path_a)) as checkpoint_a, Checkpoint(open_storage(path_b)) as checkpoint_b:
        assert checkpoint_a.dtypes == checkpoint_b.dtypes
        assert checkpoint_a.model == checkpoint_b.model
        for key in ("step", "updates", "skipped", "consumed_samples"):
            assert checkpoint_a.manifest[key] == checkpoint_b.manifest[key]
        for kind in checkpoint_a.dtypes:
            for name, tensor in unfused_tensors(checkpoint_a.model).items():
                a, b = (checkpoint.read_state(kind, tensor) for checkpoint in (checkpoint_a, checkpoint_b))
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), (kind, name)


def contents(directory: Path) -> dict[str, bytes]:
    """The content of all files except the commit file, which contains the time."""
    paths = (path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != COMMIT_FILE)
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def read_weights(directory: Path) -> dict[str, Tensor]:
    weights = open_weights(directory).weights
    return {name: weights.read(tensor).clone() for name, tensor in unfused_tensors(weights.model).items()}


# The native format, with optimizer state

FAMILIES = {
    "llama": {**configs.LLAMA, "layers": 4, "vocab": 259},
    "gpt": {**configs.GPT, "layers": 4, "vocab": 131},
    "bert": {**configs.BERT, "layers": 4, "vocab": 127},
}
BATCH = {"global_batch": 12, "micro_batch": 4, "steps": 2}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint of a family after two steps."""
    checkpoints: dict[str, Path] = {}

    def train_once(family: str) -> Path:
        if family not in checkpoints:
            directory = tmp_path_factory.mktemp(family)
            sections = {"checkpoint": {"every": 1, "export_hf": False}, "log": {"directory": str(directory)}}
            summary = Trainer(configs.tiny_config(FAMILIES[family], train=BATCH, **sections)).run()
            checkpoints[family] = summary.directory / "checkpoints" / "step_00000002"
        return checkpoints[family]

    return train_once


@st.composite
def layouts(draw: st.DrawFn) -> str:
    tp, cp, dp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3]))
    pp, vpp = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1), (4, 1)]))
    sizes = [f"tp={tp}", f"pp={pp}", f"vpp={vpp}", f"cp={cp}", f"dp={dp if tp * cp * pp * dp <= 16 else 1}"]
    if pp == 2 and vpp == 1 and draw(st.booleans()):
        sizes.append(f"pipeline_cuts={draw(st.integers(0, 2))}")
    return ",".join(draw(st.permutations(sizes)))


@examples(20, **GENERATED)
@given(family=st.sampled_from(list(FAMILIES)), layout_a=layouts(), layout_b=layouts())
def test_conversion_between_layouts_and_back(
    saved: Callable[[str], Path], family: str, layout_a: str, layout_b: str
) -> None:
    with TemporaryDirectory() as folder:
        first = convert(saved(family), Path(folder) / "a", "native", layout_a)
        second = convert(first, Path(folder) / "b", "native", layout_b)
        back = convert(second, Path(folder) / "c", "native", layout_a)
        for path in (first, second, back):
            assert_same_state(saved(family), path)
        assert contents(first) == contents(back)
        with Checkpoint(open_storage(second)) as checkpoint:
            checkpoint.verify(checkpoint.files)
            layout = parse_layout("native", layout_b)
            assert len(checkpoint.files) == layout["tp"] * layout["pp"] * layout["cp"] * layout.pop("dp")
            assert {key: getattr(checkpoint.config.layout, key) for key in layout} == layout


def test_the_micro_batch_size_does_not_restrict_the_layout(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Two ranks have 6 of 12 samples each, not a multiple of micro_batch=4; a resumed run may use any other."""
    with Checkpoint(open_storage(convert(saved("gpt"), tmp_path / "out", "native", "dp=2"))) as found:
        assert (found.config.train.global_batch, found.config.train.micro_batch) == (12, 1)
    with pytest.raises(UserError, match=r"train.global_batch=12: not a multiple of"):
        convert(saved("gpt"), tmp_path / "five", "native", "dp=5")


def test_weights_only(saved: Callable[[str], Path], tmp_path: Path) -> None:
    source = saved("bert")
    with Checkpoint(open_storage(convert(source, tmp_path / "out", "native", "tp=2", weights_only=True))) as found:
        assert list(found.dtypes) == ["weights"]
        assert (found.step, found.manifest["updates"]) == (0, 0)
    before, after = read_weights(source), read_weights(tmp_path / "out")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_latest_checkpoint_of_a_run_is_converted(saved: Callable[[str], Path], tmp_path: Path) -> None:
    checkpoint = saved("gpt")
    for number, path in enumerate((checkpoint, checkpoint.parent, checkpoint.parents[1])):
        convert(path, tmp_path / str(number), "hf")
    assert contents(tmp_path / "0") == contents(tmp_path / "1") == contents(tmp_path / "2")


# From Hugging Face through NxD and native back to Hugging Face


def layout_text(layout: NxdLayout) -> str:
    """The layout as a user writes it."""
    out = []
    for field in fields(layout):
        value = getattr(layout, field.name)
        if value != field.default:
            out.append(f"{field.name}={':'.join(map(str, value)) if field.name == 'pipeline_cuts' else value}")
    return ",".join(out)


@examples(20, **GENERATED)
@given(case=cases(), dtype=st.sampled_from([torch.float32, torch.bfloat16]), xser=st.booleans(), data=st.data())
def test_conversion_through_nxd_and_native(
    case: tuple[LlamaConfig, NxdLayout], dtype: torch.dtype, xser: bool, data: st.DataObject
) -> None:
    model, layout = case
    text = layout_text(layout)
    assert NxdLayout(**parse_layout("nxd", text)) == layout
    with TemporaryDirectory() as folder:
        root = Path(folder)
        write_hf(root / "hf", RandomWeights(model, dtype))
        convert(
            root / "hf",
            root / "nxd",
            "nxd",
            f"{text},qkv={layout.qkv},kv_multiplier={layout.kv_multiplier}",
            xser=xser,
        )
        assert any(path.suffix == ".tensors" for path in (root / "nxd" / "model").iterdir()) == xser
        tp = data.draw(st.sampled_from([tp for tp in (1, 2, 4, 8) if model.heads % tp == model.ffn % tp == 0]))
        hints = f"by_head={layout.by_head},kv_order={layout.kv_order}"
        convert(root / "nxd", root / "native", "native", f"tp={tp},dp={data.draw(st.integers(1, 2))}", hints)
        convert(root / "native", root / "back", "hf")
        assert contents(root / "back") == contents(root / "hf")


@pytest.mark.parametrize(
    ("model", "layout", "expected"),
    [
        (llama(**GQA), "tp=4", {"qkv": "fused", "kv_multiplier": 2}),
        (llama(**GQA), "tp=2", {"qkv": "fused", "kv_multiplier": 1}),
        (llama(**GQA), "tp=4,qkv=qkv_linear,kv_order=trn2", {"kv_order": "trn2", "kv_multiplier": 2}),
        (llama(), "tp=4", {"qkv": "coalesced", "kv_multiplier": 1}),
        (llama(), "style=megatron", {"qkv": "coalesced"}),
        (llama(**GQA), "tp=2,style=megatron", {"qkv": "qkv_linear", "kv_multiplier": 1}),
    ],
)
def test_unspecified_options_are_as_in_nxds_models(
    model: LlamaConfig, layout: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    write_hf(tmp_path / "hf", RandomWeights(model))
    convert(tmp_path / "hf", tmp_path / "nxd", "nxd", layout)
    found: Any = open_weights(tmp_path / "nxd").weights
    assert {key: getattr(found.layout, key) for key in expected} == expected


# Hugging Face's file formats

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


def write_source(file_format: str, directory: Path, model: nn.Module) -> None:
    """Write a transformers model in one of the formats in use."""
    model.save_pretrained(directory)  # type: ignore[operator]
    file = directory / "model.safetensors"
    if file_format == "safetensors":
        return
    if file_format == "sharded":
        write_hf(directory.with_name("sharded"), open_hf(directory), max_shard_bytes=20_000)
        shutil.rmtree(directory)
        directory.with_name("sharded").rename(directory)
        assert len(list(directory.glob("model-*-of-*.safetensors"))) > 2
        return
    file.unlink()
    state = model.state_dict()  # torch.save keeps copies of tied weights
    if file_format == "bin":
        torch.save(state, directory / "pytorch_model.bin")
    else:
        sharded(directory, "pytorch_model.bin.index.json", state, torch.save)


@pytest.mark.parametrize("file_format", ["safetensors", "sharded", "bin", "sharded bin"])
@pytest.mark.parametrize("variant", ["llama-gqa", "llama-tied", "gpt2", "bert"])
def test_transformers_gives_the_same_logits(variant: str, file_format: str, tmp_path: Path) -> None:
    family, model, _ = hf_reference(variant)
    write_source(file_format, tmp_path / "in", model)
    for name, text in TOKENIZER.items():
        (tmp_path / "in" / name).write_text(text)
    (tmp_path / "in" / "README.md").write_text("not copied")
    out = convert(tmp_path / "in", tmp_path / "out", "hf")
    converted = AUTO[family].from_pretrained(out).eval()
    batch = tiny_batch(family)
    with torch.no_grad():
        assert torch.equal(hf_forward(family, converted, batch)[0], hf_forward(family, model, batch)[0])
    files = contents(out)
    assert set(files) == {"config.json", "model.safetensors", "trainyard.sha256", *TOKENIZER}
    assert all(files[name].decode() == text for name, text in TOKENIZER.items())


def test_tokenizer_files_are_copied_to_nxd_and_back(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", RandomWeights(llama()))
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    (tmp_path / "hf" / "tokenizer.model").mkdir()  # a directory, not a file
    convert(tmp_path / "hf", tmp_path / "nxd", "nxd", "tp=2")
    for number, path in enumerate((tmp_path / "nxd", tmp_path / "nxd" / "model")):
        assert "tokenizer.json" in contents(convert(path, tmp_path / str(number), "hf"))


def test_gpt2_without_a_prefix(tmp_path: Path) -> None:
    """The published files of gpt2 were saved from the model without its head."""
    _, model, _ = hf_reference("gpt2")
    model.transformer.save_pretrained(tmp_path / "no-prefix")  # type: ignore[union-attr,operator]
    model.save_pretrained(tmp_path / "full")  # type: ignore[operator]
    assert "wte.weight" in load_file(tmp_path / "no-prefix" / "model.safetensors")
    no_prefix, full = (
        contents(convert(tmp_path / name, tmp_path / f"{name}-out", "hf")) for name in ("no-prefix", "full")
    )
    assert no_prefix["model.safetensors"] == full["model.safetensors"]


def test_bert_with_gamma_and_beta(tmp_path: Path) -> None:
    """The names in the published files of bert-base-uncased."""
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
    old, new = (contents(convert(tmp_path / name, tmp_path / f"{name}-out", "hf")) for name in ("old", "new"))
    assert old == new


@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: {"model": x}, lambda x: {"state_dict": {"model": x}, "epoch": 3}]
)
def test_a_single_file_of_weights(wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    model = llama()
    write_hf(tmp_path / "hf", RandomWeights(model))
    torch.save(wrap(load_file(tmp_path / "hf" / "model.safetensors")), tmp_path / "weights.pt")
    with pytest.raises(UserError, match=r"weights\.pt: does not store the model's configuration; pass --config"):
        open_weights(tmp_path / "weights.pt")
    opened = open_weights(tmp_path / "weights.pt", model)
    convert_checkpoint(
        opened, tmp_path / "weights.pt", tmp_path / "out", ConversionTarget("hf", {}), lambda count: None
    )
    assert contents(tmp_path / "out") == contents(tmp_path / "hf")


# Dtypes

EDGE_CASES = [
    0.0,
    -0.0,
    1.0,
    1 + 2**-9,
    1 + 2**-8,
    1 + 3 * 2**-8,
    65519.0,
    65520.0,
    1e30,
    -1e30,
    3e38,
    2**-25,
    2**-24,
    1e-40,
]
EDGE_CASES += [float("inf"), -float("inf"), float("nan"), 2049.0, 2051.0]


@pytest.mark.parametrize("target_format", ["hf", "nxd", "native"])
@pytest.mark.parametrize("dtype", DTYPE_CHOICES)
def test_dtypes_are_converted_as_torch_does(dtype: str, target_format: str, tmp_path: Path) -> None:
    """Ties round to even, overflow gives infinity, underflow gives subnormals or zero."""
    weights = RandomWeights(llama())
    weights.tensors["embedding.weight"].view(-1)[: len(EDGE_CASES)] = torch.tensor(EDGE_CASES)
    write_hf(tmp_path / "hf", weights)
    found = read_weights(convert(tmp_path / "hf", tmp_path / "out", target_format, dtype=DTYPE_CHOICES[dtype]))
    for name, value in weights.tensors.items():
        assert found[name].dtype == DTYPE_CHOICES[dtype]
        assert torch.equal(found[name].view(torch.uint8), value.to(DTYPE_CHOICES[dtype]).view(torch.uint8)), name


def test_the_dtype_is_in_the_config(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", RandomWeights(llama()))
    convert(tmp_path / "hf", tmp_path / "half", "hf", dtype=torch.bfloat16)
    config = json.loads((tmp_path / "half" / "config.json").read_text())
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"


class MixedDtypeWeights(RandomWeights):
    """Tensors of several dtypes, as in a model that keeps its norms in fp32."""

    def __init__(self, dtypes: dict[str, torch.dtype]) -> None:
        super().__init__(llama(), torch.bfloat16)
        for text, dtype in dtypes.items():
            self.tensors = {name: value.to(dtype) if text in name else value for name, value in self.tensors.items()}


@pytest.mark.parametrize(
    ("dtypes", "common"),
    [({"norm": torch.float32}, torch.float32), ({"mlp": torch.float16}, torch.float32), ({}, torch.bfloat16)],
)
def test_no_value_is_lost_where_dtypes_are_mixed(
    dtypes: dict[str, torch.dtype], common: torch.dtype, tmp_path: Path
) -> None:
    """A native checkpoint has one dtype that represents all others. Neither fp16 nor bf16 represents the other."""
    weights = MixedDtypeWeights(dtypes)
    weights.tensors["layers.0.mlp.up.weight"][0, 0] = 1 + 2**-7
    write_hf(tmp_path / "hf", weights)
    for target_format in ("hf", "nxd", "native"):
        found = read_weights(convert(tmp_path / "hf", tmp_path / f"to-{target_format}", target_format))
        for name, value in weights.tensors.items():
            assert torch.equal(found[name].double(), value.double()), name
            assert found[name].dtype == (common if target_format == "native" else value.dtype)


# Invalid input


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_hf(tmp_path / "hf", RandomWeights(llama(**GQA)))
    return tmp_path / "hf"


@pytest.mark.parametrize(
    ("target_format", "layout", "message"),
    [
        ("nxd", "tp=3", "tp_size=3: does not divide heads=8"),
        ("nxd", "tp", "--layout tp: nxd takes tp, pp, vpp, pipeline_cuts, ep, kv_multiplier, qkv"),
        ("nxd", "dp=2", "--layout dp=2: nxd takes tp, pp"),
        ("nxd", "tp=x", "--layout tp=x: expected a positive whole number"),
        ("nxd", "tp=0", "--layout tp=0: expected a positive whole number"),
        ("nxd", "tp=-2", "--layout tp=-2: expected a positive whole number"),
        ("nxd", "qkv=all", "--layout qkv=all: not one of separate, coalesced, qkv_linear, fused"),
        ("nxd", "kv_order=trn3", "--layout kv_order=trn3: not one of trn1, trn2"),
        ("nxd", "gate_up=maybe", "--layout gate_up=maybe: expected true or false"),
        ("nxd", "pp=2,pipeline_cuts=3,7", "--layout 7: nxd takes tp"),
        ("nxd", "pp=2,pipeline_cuts=a", "--layout pipeline_cuts=a: expected layer numbers such as 3:7"),
        ("nxd", "pp=2,pipeline_cuts=3", r"pipeline_cuts=3: must be 1 increasing"),
        ("nxd", "pp=5", "5 stages for 4 layers"),
        ("native", "tp=3", r"layout.tp=3: does not divide model.heads=8.*nearest"),
        ("native", "qkv=fused", "--layout qkv=fused: native takes tp, pp, vpp, cp, dp, pipeline_cuts"),
        ("native", "pp=5", r"layout.pp=5: pp x vpp = 5 stages for 4 layers"),
        ("native", "dp=0", "--layout dp=0: expected a positive whole number"),
        ("native", "vpp=2", "vpp=2: virtual stages need pp above 1"),
        ("native", "pp=2,pipeline_cuts=9", r"layout.pipeline_cuts=\[9\]"),
        ("hf", "tp=2", "--layout tp=2: hf takes no layout"),
    ],
)
def test_invalid_layouts(target_format: Any, layout: str, message: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as error:
        convert(source, tmp_path / "out", target_format, layout)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_invalid_targets(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes").write_text("mine")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.chdir(tmp_path)
    for target, message in (
        (full, "full: already exists and is not empty; choose a new directory"),
        (full / "notes", "notes: already exists and is not empty"),
        (source, "hf: already exists and is not empty"),
        (full / "notes" / "out", "out: cannot be created: .*"),
        (Path("/proc/nowhere/out"), "out: cannot be created: "),
        (Path("/proc/out"), "out: cannot be created: "),
        (tmp_path / "loop", "loop: cannot be created: "),
        (Path("s3://bucket/model"), "s3:/bucket/model: expected a local directory, not a URL"),
    ):
        for target_format in ("hf", "nxd", "native"):
            with pytest.raises(UserError, match=message) as error:
                convert(source, target, target_format)
            assert "\n" not in str(error.value)
    assert (full / "notes").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"full", "hf", "loop"}


@pytest.mark.parametrize("target_format", ["hf", "nxd", "native"])
def test_valid_targets(target_format: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "far")
    wanted = read_weights(source)
    for target in ("plain", "new/parents/out", "empty", "link", "empty/../dots", "~home"):
        convert(source, Path(target) if target != "~home" else tmp_path / "~home", target_format)
        found = read_weights(tmp_path / target)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert (tmp_path / "link").is_symlink()


def test_invalid_sources(source: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("a")
    (tmp_path / "no-prefix").mkdir()
    shutil.copy(source / "model.safetensors", tmp_path / "no-prefix")
    for name, message in (
        ("nowhere", "nowhere: no such file or directory"),
        (
            "empty",
            "empty: not a known checkpoint format; known: a trainyard checkpoint, a Hugging Face directory, ",
        ),
        ("text.txt", "text.txt: not a known checkpoint format"),
        ("no-prefix", r"config.json: not a readable config.json"),
    ):
        with pytest.raises(UserError, match=message) as error:
            convert(tmp_path / name, tmp_path / "out", "hf")
        assert "\n" not in str(error.value)


def cyclic_dict() -> dict[str, Any]:
    out: dict[str, Any] = {}
    out["model"] = out
    return out


@pytest.mark.parametrize("content", [{}, {"model": {}}, [1], {"epoch": 3}, {1: torch.ones(1)}, cyclic_dict()], ids=str)
def test_files_without_weights(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(UserError, match=r"weights\.pt: (holds no tensors by name|.* nested more than)") as error:
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
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_invalid_indexes(index: str, file: str, source: Path) -> None:
    (source / f"{file}.index.json").write_text(index)
    if file != "model.safetensors":
        torch.save(load_file(source / "model.safetensors"), source / file)
        (source / "model.safetensors").unlink()
    with pytest.raises(UserError) as error:
        open_hf(source)
    assert "\n" not in str(error.value)


def test_only_families_of_nxd_convert_to_it(saved: Callable[[str], Path], tmp_path: Path) -> None:
    for family in ("gpt", "bert"):
        with pytest.raises(
            UserError,
            match=rf"model.family={family}: NxD checkpoints hold models of llama, .* only; nearest: --to hf",
        ):
            convert(saved(family), tmp_path / "out", "nxd", "tp=2")
    assert not list(tmp_path.iterdir())


def test_weights_with_optimizer_state_keep_their_dtype(saved: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--dtype: cannot change the dtype of weights with optimizer state"):
        convert(saved("gpt"), tmp_path / "out", "native", dtype=torch.bfloat16)
    assert not list(tmp_path.iterdir())
    convert(saved("gpt"), tmp_path / "out", "native", dtype=torch.bfloat16, weights_only=True)
    assert {value.dtype for value in read_weights(tmp_path / "out").values()} == {torch.bfloat16}


# The user's model configuration


def test_explicit_defaults_make_no_difference(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """A config.json has the values that a native configuration leaves to defaults."""
    for family in FAMILIES:
        checkpoint = saved(family)
        section = configs.tiny_config(FAMILIES[family]).model
        write_model_files(tmp_path, section, torch.float32)
        assert first_model_difference(from_hf(tmp_path), section) is None
        open_weights(checkpoint, from_hf(tmp_path))
        wider = from_hf(tmp_path).model_copy(update={"ffn": 96})
        with pytest.raises(UserError, match=rf"model.ffn=96: .* has {section.ffn_size}"):
            open_weights(checkpoint, wider)
    with pytest.raises(UserError, match=r"model.family=bert: .* has gpt"):
        open_weights(saved("gpt"), section)


# Interrupted conversions


class Interrupted(BaseException):
    """Any exception, such as Ctrl-C."""


def fail_after(writes: int, error: BaseException) -> Callable[[int], None]:
    remaining = writes

    def progress(count: int) -> None:
        nonlocal remaining
        remaining -= 1
        if remaining < 0:
            raise error

    return progress


TARGETS: dict[str, Any] = {
    "hf": ConversionTarget("hf", {}),
    "nxd": ConversionTarget("nxd", {"tp": 2, "pp": 2}),
    "nxd xser": ConversionTarget("nxd", {"tp": 2}, xser=True),
    "native": ConversionTarget("native", {"tp": 2, "pp": 2, "dp": 2}),
    "dcp": ConversionTarget("dcp", {"names": "torchtitan"}),
}


@pytest.mark.parametrize("writes", [0, 7, 20])
@pytest.mark.parametrize("target", TARGETS)
def test_an_interrupted_conversion_leaves_nothing(target: str, writes: int, source: Path, tmp_path: Path) -> None:
    opened = open_weights(source)
    for error in (Interrupted(), KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")):
        with pytest.raises(type(error)):
            convert_checkpoint(opened, source, tmp_path / "out", TARGETS[target], fail_after(writes, error))
        assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    convert_checkpoint(opened, source, tmp_path / "out", TARGETS[target], lambda count: None)
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "out"}


class FailingWeights(RandomWeights):
    """Weights on a disk that fails after some reads."""

    def __init__(self, reads: int) -> None:
        super().__init__(llama(**GQA))
        self.remaining = reads

    def read(self, wanted: TensorSlice) -> Tensor:
        self.remaining -= 1
        if self.remaining < 0:
            raise OSError(errno.EIO, "Input/output error")
        return super().read(wanted)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("operation", ["read", "fsync", "rename"])
def test_a_failing_disk_leaves_nothing(
    target: str, operation: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_weights(source)
    calls = 0

    def fails(function: Callable[..., Any], first_failure: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls >= first_failure:
                raise OSError(errno.EIO, "Input/output error")
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        if operation == "read":
            object.__setattr__(opened, "weights", FailingWeights(10))
        elif operation == "fsync":
            patch.setattr(os, "fsync", fails(os.fsync, 2))
        else:
            patch.setattr(os, "replace", fails(os.replace, 1))
            patch.setattr(os, "rename", fails(os.rename, 1))
        with pytest.raises(OSError, match="Input/output error"):
            convert_checkpoint(opened, source, tmp_path / "out", TARGETS[target], lambda count: None)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("target", TARGETS)
def test_leftovers_of_a_killed_conversion_do_no_harm(target: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / ".out.part" / "model").mkdir(parents=True)
    (tmp_path / ".out.part" / "rank_00000.safetensors").write_text("partial")
    convert_checkpoint(open_weights(source), source, tmp_path / "out", TARGETS[target], lambda count: None)
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "out"}
    found, wanted = read_weights(tmp_path / "out"), read_weights(source)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


# Resuming NxD runs

RUN = {
    "family": "llama", "vocab": 36, "hidden": 16, "layers": 3, "heads": 8, "kv_heads": 2, "head_dim": 4, "ffn": 20,
    "max_positions": 32,
}  # fmt: skip
MOE_RUN = {**RUN, "family": "mixtral", "experts": 3}


def losses(directory: Path, model: dict[str, Any], **checkpoint: Any) -> tuple[list[float], Path]:
    recorder = LossRecorder()
    config = configs.tiny_config(
        model,
        data={"source": "synthetic", "seq_len": 8},
        train={"steps": 5, "global_batch": 4, "micro_batch": 2},
        optimizer={"lr": 1e-2},
        schedule={"warmup_steps": 3},
        checkpoint={"export_hf": False, "keep": 0, **checkpoint},
        log={"directory": str(directory)},
    )
    lines: list[str] = []
    with captured_log(lines.append):
        summary = Trainer(config, callbacks=[recorder]).run()
    assert not [line for line in lines if line.startswith("note:")]
    return recorder.losses, summary.directory


@pytest.mark.parametrize(
    ("config", "options", "layout"),
    [
        pytest.param(RUN, {"dp": 2}, "", marks=pytest.mark.nightly),
        (RUN, {"tp": 4, "replicas": 2, "pp": 2, "dp": 3, "xser": True}, "tp=2,dp=2"),
        pytest.param(RUN, {"tp": 2, "dp": 2, "groups": two_groups}, "pp=3,cp=2", marks=pytest.mark.nightly),
        pytest.param(MOE_RUN, {"tp": 2, "pp": 2, "dp": 2}, "tp=2", marks=pytest.mark.nightly),
    ],
)
def test_a_resumed_nxd_run_has_the_same_losses(
    config: dict[str, Any], options: dict[str, Any], layout: str, tmp_path: Path
) -> None:
    expected, run = losses(tmp_path / "undisturbed", config, every=1)
    checkpoint = run / "checkpoints" / "step_00000002"
    with Checkpoint(open_storage(checkpoint)) as native:
        model, updates = native.model, native.manifest["updates"]
        tensors = unfused_tensors(model).items()
        kinds = {kind: {name: native.read_state(kind, tensor) for name, tensor in tensors} for kind in STATE_KINDS}
    assert isinstance(model, DecoderConfig)
    tag = write_nxd_checkpoint(tmp_path / "nxd" / "step_2", model, kinds, step=updates, **options)
    write_model_files(tag, model, torch.float32)
    converted = convert(tag, tmp_path / "converted", "native", layout)
    with Checkpoint(open_storage(converted)) as found:
        assert (found.step, found.manifest["updates"]) == (2, updates)
    resharded = convert(converted, tmp_path / "resharded", "native", "tp=4")
    resumed = [
        losses(tmp_path / f"resumed-{path.name}", config, resume=str(path))[0]
        for path in (checkpoint, converted, resharded)
    ]
    assert resumed == [expected[2:]] * 3
