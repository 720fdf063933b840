"""Adapters in PEFT's folders: what PEFT writes is read and written back bit for bit, PEFT loads what is written here,
and both compute the same logits."""

import json
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support import configs
from tests.support.hf_reference import MOE_VARIANTS, hf_model
from trainyard import Trainer, models
from trainyard.checkpoint.weights import WeightSource, unfused_tensors
from trainyard.config.load import parse
from trainyard.core.errors import UserError
from trainyard.core.tensor_slice import TensorSlice
from trainyard.families.hf_config import from_hf
from trainyard.formats.compare import compare_logits, first_difference
from trainyard.formats.hf import hf_tensors, open_hf, weights_from_tensors, write_hf
from trainyard.formats.io.lazy_tensor import InlineTensor
from trainyard.formats.native_writer import weights_only_state
from trainyard.formats.peft.adapter import (
    AdaptedWeights,
    adapter_tensors,
    lora_options,
    read_adapter,
    with_lora,
)
from trainyard.formats.peft.expert_tensors import TARGETS
from trainyard.formats.peft.merge import MergedWeights
from trainyard.formats.peft.write_adapter import base_name, write_adapter
from trainyard.formats.registry import check_export, open_weights

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Weights:
    """Weights in memory by name."""

    def __init__(self, model: models.ModelConfig, tensors: dict[str, Tensor]) -> None:
        self.model, self.tensors = model, tensors

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def read(self, piece: TensorSlice) -> Tensor:
        return self.tensors[piece.name][piece.to_index()]


def peft_model(variant: str = "llama-gqa", base: str = "base", **options: Any) -> Any:
    """A model of transformers with an adapter of PEFT, every tensor of which is random."""
    torch.manual_seed(0)
    model = hf_model(variant)
    model.name_or_path = base
    options = {"r": 4, "lora_alpha": 6, "target_modules": ALL, "task_type": "CAUSAL_LM", **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model, peft.LoraConfig(**options)).eval()
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            noise = torch.rand_like(parameter) * 0.2
            parameter.data = parameter.data * (1 + noise) if "magnitude" in name else parameter.data + noise - 0.1
    return adapted


def save(adapted: Any, directory: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted.save_pretrained(directory)
    return directory


def base_weights(variant: str = "llama-gqa") -> WeightSource:
    model = hf_model(variant)
    if variant in MOE_VARIANTS:  # whose modules have other names than their files
        with TemporaryDirectory() as directory:
            model.save_pretrained(directory)
            weights = open_hf(directory)
            return Weights(
                weights.model, {n: weights.read(p).clone() for n, p in unfused_tensors(weights.model).items()}
            )
    tensors = {name: InlineTensor(tensor) for name, tensor in model.state_dict().items()}
    return weights_from_tensors(from_hf(json.loads(model.config.to_json_string())), tensors)


def opened(directory: Path, variant: str = "llama-gqa") -> AdaptedWeights:
    base = base_weights(variant)
    return AdaptedWeights(read_adapter(directory), base.model, base)


ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama-gqa", {"target_modules": ["q_proj", "v_proj"]}),
    "rslora": ("llama-gqa", {"use_rslora": True, "lora_dropout": 0.05}),
    "dora": ("llama-gqa", {"use_dora": True}),
    "whole": ("llama-gqa", {"modules_to_save": ["embed_tokens", "norm", "lm_head"]}),
    "pattern": ("llama-gqa", {"target_modules": r".*\.(q|o)_proj", "rank_pattern": {"[qo]_proj": 3}}),
    "all-linear": ("llama-gqa", {"target_modules": "all-linear", "exclude_modules": ["down_proj"]}),
    "tied": ("llama-tied", {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {"use_dora": True}),
    "qwen3": ("qwen3", {"modules_to_save": ["norm"]}),
    "mixtral": ("mixtral", {"target_modules": ["q_proj", "o_proj"]}),
    "experts": ("mixtral", {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "target_parameters": TARGETS}),
    "experts-alone": ("qwen3_moe", {"target_modules": [], "target_parameters": TARGETS, "use_rslora": True}),
    "gpt_neox": ("gpt_neox-sequential", {"target_modules": ["query_key_value", "dense_h_to_4h"], "use_dora": True}),
    "falcon": ("falcon-40b", {"target_modules": ["query_key_value"]}),
    "gpt2": ("gpt2", {"target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True, "use_dora": True}),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_what_peft_writes_is_written_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    variant, options = ADAPTERS[name]
    source = save(peft_model(variant, **options), tmp_path / "peft")
    write_adapter(tmp_path / "ours", opened(source, variant))
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "ours" / file).read_bytes() == (source / file).read_bytes()
    assert (tmp_path / "ours" / "README.md").read_text().startswith("---\nbase_model: base\nlibrary_name: peft\n")


@pytest.mark.parametrize("variant", ["gpt_oss", "llama4_text"])
def test_adapters_of_transposed_experts_are_refused(variant: str) -> None:
    model = with_lora(base_weights(variant).model, {"rank": 4, "targets": ["experts"]})
    with pytest.raises(UserError, match=r"model.family=.*: PEFT has another layout of adapters of its experts"):
        adapter_tensors(model)


@pytest.mark.parametrize("name", ADAPTERS)
def test_merged_weights_are_those_that_peft_merges(name: str, tmp_path: Path) -> None:
    variant, options = ADAPTERS[name]
    adapted = peft_model(variant, **options)
    merged = MergedWeights(opened(save(adapted, tmp_path / "peft"), variant))
    assert lora_options(merged.model) is None
    tensors = dict(hf_tensors(merged))
    expected = adapted.merge_and_unload()
    if variant not in MOE_VARIANTS:
        for key, value in tensors.items():
            torch.testing.assert_close(value, expected.state_dict()[key], atol=1e-6, rtol=1e-6, msg=key)
    write_hf(tmp_path / "merged", merged)
    tokens = torch.arange(24).view(2, 12)
    loaded = type(hf_model(variant)).from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(loaded(tokens).logits, expected(tokens).logits, atol=2e-5, rtol=1e-5)


def random_weights(variant: str, **options: Any) -> Weights:
    """A model with our adapters, every tensor of which is random."""
    base = base_weights(variant)
    model = with_lora(base.model, {"rank": 4, "alpha": 6.0, **options})
    generator = torch.Generator().manual_seed(2)
    changed = {piece.name for stored in adapter_tensors(model).stored for piece in stored.slices}
    tensors = {}
    for name, piece in unfused_tensors(model).items():
        values = torch.zeros(piece.sizes) if ".lora_" in name else base.read(piece).clone()
        noise = torch.rand(piece.sizes, generator=generator) * 0.2
        tensors[name] = values + noise * (name in changed)
    return Weights(model, tensors)


def load_in_peft(variant: str, directory: Path) -> Any:
    """The adapter in PEFT, which warns of missing and unexpected tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return peft.PeftModel.from_pretrained(hf_model(variant), directory).eval()


OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama-gqa", {}),
    "rslora": ("llama-gqa", {"rank_stabilized": True, "targets": ["q", "v", "gate"]}),
    "dora": ("llama-gqa", {"dora": True}),
    "whole": ("qwen3", {"train": ["embedding", "norms", "head"]}),
    "tied": ("qwen2", {"train": ["embedding"], "targets": ["output"]}),
    "moe": ("mixtral", {}),
    "experts": ("mixtral", {"targets": ["all-linear", "experts"]}),
    "experts-alone": ("qwen3_moe", {"targets": ["experts"]}),
    "gpt2": ("gpt2", {"targets": ["up", "down"]}),
    "gpt2-output": ("gpt2-untied", {"targets": ["output"], "train": ["norms", "head"]}),
}


@pytest.mark.parametrize("name", OURS)
def test_peft_loads_what_is_written(name: str, tmp_path: Path) -> None:
    variant, options = OURS[name]
    weights = random_weights(variant, **options)
    write_adapter(tmp_path / "adapter", weights, base="org/base")
    adapted = load_in_peft(variant, tmp_path / "adapter")
    save(adapted, tmp_path / "again")
    files = [load_file(tmp_path / each / "adapter_model.safetensors") for each in ("adapter", "again")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(value, files[1][key]) for key, value in files[0].items())
    found = [json.loads((tmp_path / each / "adapter_config.json").read_text()) for each in ("adapter", "again")]
    for config in found:  # PEFT keeps sets, and changes two values when it loads them
        config["target_modules"] = sorted(config["target_modules"])
        config["target_parameters"] = sorted(config["target_parameters"] or ()) or None
        config["modules_to_save"] = config["modules_to_save"] and {n.split(".")[-1] for n in config["modules_to_save"]}
    assert found[0] == found[1]
    tokens = torch.arange(24).view(2, 12)
    write_hf(tmp_path / "merged", MergedWeights(weights))
    merged = type(hf_model(variant)).from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(adapted(tokens).logits, merged(tokens).logits, atol=2e-5, rtol=1e-5)
    base = hf_model(variant)
    assert (adapted(tokens).logits - base(tokens).logits).abs().max() > 0.1
    again = opened(tmp_path / "adapter", variant)
    assert again.model.model_dump(exclude={"linear"}) == weights.model.model_dump(exclude={"linear"})
    for key, value in weights.tensors.items():
        if key in again:
            assert torch.equal(again.read(TensorSlice.full(key, tuple(value.shape))), value)


def lora_run(tmp_path: Path, variant: str = "llama-gqa", steps: int = 3, every: int = 0, **lora: Any) -> Trainer:
    """A run that trains an adapter of a Hugging Face directory."""
    if not (tmp_path / "base").exists():
        hf_model(variant).save_pretrained(tmp_path / "base")
    model = from_hf(tmp_path / "base").model_dump(mode="json")
    config = configs.tiny_config(
        model,
        train={"steps": steps},
        optimizer={"lr": 1e-2},
        checkpoint={"init_from": str(tmp_path / "base"), "export_hf": True, "every": every},
        log={"directory": str(tmp_path / "runs"), "name": "lora"},
    )
    data = config.model_dump(mode="json")
    return Trainer(parse({**data, "lora": {"rank": 4, "alpha": 6.0, **lora}}))


def our_logits(model: Any, tokens: Tensor) -> Tensor:
    batch = {"tokens": tokens.int(), "rng_key": torch.zeros(2, dtype=torch.int32)}
    with torch.no_grad():
        return model.eval()({**batch, "sample_ids": torch.arange(len(tokens), dtype=torch.int32)}).logits()


@pytest.mark.parametrize("lora", [{}, {"rank_stabilized": True, "dropout": 0.1}, {"dora": True, "train": ["norms"]}])
def test_a_run_ends_with_an_adapter_that_computes_the_same_in_peft(lora: dict[str, Any], tmp_path: Path) -> None:
    trainer = lora_run(tmp_path, **lora)
    summary = trainer.run()
    assert summary.exported_weights == summary.directory / "adapter"
    assert not (summary.directory / "model").exists()
    config = json.loads((summary.exported_weights / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    tokens = torch.arange(24).view(2, 12)
    expected = load_in_peft("llama-gqa", summary.exported_weights)(tokens).logits
    torch.testing.assert_close(our_logits(trainer.model, tokens), expected, atol=2e-5, rtol=1e-5)
    adapter = open_weights(summary.directory)
    assert adapter.format == "peft"


def test_a_run_starts_from_an_adapter(tmp_path: Path) -> None:
    lora_run(tmp_path)  # writes the base
    options = {"lora_alpha": 6, "use_dora": True, "modules_to_save": ["norm"]}
    adapted = peft_model(**options)
    directory = str(save(adapted, tmp_path / "peft"))
    trainer = lora_run(tmp_path, dora=True, train=["norms"], dropout=0.1, init_from=directory)
    tokens = torch.arange(24).view(2, 12)
    torch.testing.assert_close(our_logits(trainer.model, tokens), adapted(tokens).logits, atol=2e-5, rtol=1e-5)
    with pytest.raises(UserError, match=r"lora\.alpha=7\.0: .* has 6\.0"):
        lora_run(tmp_path, dora=True, alpha=7.0, init_from=directory)
    with pytest.raises(UserError, match=r"lora\.targets=\[q\]: .*other layers, .*; nearest: \[all-linear\]"):
        lora_run(tmp_path, dora=True, train=["norms"], targets=["q"], init_from=directory)
    with pytest.raises(UserError, match=r"lora\.train=\[\]: .* has changed norms, too"):
        lora_run(tmp_path, dora=True, init_from=directory)
    with pytest.raises(UserError, match=r"lora\.init_from=.*: needs the adapter's model"):
        Trainer(parse({**configs.tiny_config().model_dump(mode="json"), "lora": {"init_from": directory}}))


def test_the_adapter_of_a_run_is_that_of_its_last_checkpoint(tmp_path: Path) -> None:
    directory = lora_run(tmp_path, every=3).run().directory
    opened_run, adapter = (open_weights(directory / name) for name in ("", "adapter"))
    assert (opened_run.format, adapter.format) == ("native", "peft")
    assert first_difference(*(weights_only_state(each.weights, None) for each in (opened_run, adapter)), None) is None
    write_adapter(tmp_path / "again", opened_run.weights, base=base_name(opened_run.weights))
    for file in ("adapter_config.json", "adapter_model.safetensors", "README.md"):
        assert (tmp_path / "again" / file).read_bytes() == (directory / "adapter" / file).read_bytes()


def test_merged_logits_are_those_of_base_and_adapter(tmp_path: Path) -> None:
    for name, variant in (("dora", "llama-gqa"), ("gpt2", "gpt2"), ("tied", "llama-tied")):
        adapted = opened(save(peft_model(variant, **ADAPTERS[name][1]), tmp_path / name), variant)
        write_hf(tmp_path / f"{name}-merged", MergedWeights(adapted))
        result = compare_logits(adapted, open_hf(tmp_path / f"{name}-merged"))
        assert 0 < result.max_difference < 2e-5 < result.max_logit


def test_merging_rounds_once(tmp_path: Path) -> None:
    """In bf16, updates that are far smaller than the weights would be lost one by one."""
    adapted = opened(save(peft_model(lora_alpha=0.05), tmp_path / "peft"))
    full, rounded = MergedWeights(adapted), MergedWeights(adapted, torch.bfloat16)
    for name, piece in unfused_tensors(full.model).items():
        assert rounded.dtype(name) == torch.bfloat16
        assert torch.equal(rounded.read(piece), full.read(piece).bfloat16()), name


def test_any_slice_of_a_merged_matrix_is_read(tmp_path: Path) -> None:
    merged = MergedWeights(opened(save(peft_model(use_dora=True), tmp_path / "peft")))
    for name in ("layers.1.attention.k.weight", "layers.0.mlp.down.weight"):
        piece = unfused_tensors(merged.model)[name]
        part = piece.narrow(0, 5, 17).narrow(1, 3, 40)
        torch.testing.assert_close(merged.read(part), merged.read(piece)[part.to_index()], atol=1e-7, rtol=1e-6)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "LOHA"}, "peft_type=LOHA: not supported; nearest: LORA"),
    ({"bias": "all"}, 'bias=all: not supported; nearest: "none"'),
    ({"layers_to_transform": [0]}, "layers_to_transform=[0]: not supported; nearest: null"),
    ({"target_parameters": ["experts"]}, "target_parameters=['experts']: not supported; nearest: null"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa: it needs the base weights as PEFT changed them"),
    ({"lora_bias": True}, "lora_bias=True: not supported; nearest: false"),
    ({"alpha_pattern": {"q_proj": 9}}, "alpha_pattern: model.layers.0.self_attn.q_proj has 9, "),
    ({"future": 1}, "future=1: not supported; remove it if it changes no numbers"),
    ({"r": 5}, "does not fit the model: base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight is [4, 48]"),
    ({"target_modules": ["q_proj"]}, "model.layers.0.mlp.down_proj is no target_module that can have one"),
    ({"use_dora": True}, "lora_magnitude_vector is missing"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_other_adapters_are_refused_in_one_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    directory = save(peft_model(), tmp_path / "peft")
    file = directory / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(UserError) as error:
        opened(directory)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_tied_head_in_conflict_is_refused(tmp_path: Path) -> None:
    for saved, name in ((["embed_tokens"], r"model\.embed_tokens"), (["embed_tokens", "lm_head"], "lm_head")):
        directory = save(peft_model("llama-tied", modules_to_save=saved), tmp_path / name)
        with pytest.raises(UserError, match=rf"trains {name}\.weight apart from the other one"):
            opened(directory, "llama-tied")


def test_layers_of_one_module_that_were_trained_apart_cannot_be_written(tmp_path: Path) -> None:
    """GPT-2's c_attn has one A for q, k and v. Their mean would be another adapter."""
    weights = random_weights("gpt2")
    with pytest.raises(UserError, match=r"PEFT has one A here, but .*q\.lora_A, .*v\.lora_A were trained apart"):
        write_adapter(tmp_path / "adapter", weights)
    assert not any(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"PEFT has one adapter for all layers of transformer\.h\.0\.attn\.c_attn"):
        check_export(weights.model)
    check_export(random_weights("gpt2", targets=["output"]).model)
