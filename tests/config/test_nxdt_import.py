"""Import of NxD Training files: dense examples import, others are refused by key, no input causes a traceback."""

import copy
import json
import re
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.config.conftest import RunMain
from tests.config.nxdt_documented_keys import DOCUMENTED
from tests.support.examples import examples
from trainyard import models
from trainyard.cli.run_config import load_source
from trainyard.config.load import load, parse
from trainyard.config.schema import Config
from trainyard.config.schema_docs import schema_keys, without_tags
from trainyard.config.smoke import smoke_config
from trainyard.core.errors import UserError
from trainyard.core.yaml_io import read_yaml
from trainyard.importers.key_table import ImportedConfig
from trainyard.importers.nxdt import is_nxdt
from trainyard.importers.nxdt.convert import import_nxdt
from trainyard.importers.nxdt.interpolation import resolve
from trainyard.importers.nxdt.keys import NXDT_KEYS
from trainyard.parallel.layout import Layout
from trainyard.preflight.plan.hardware.spec import needed_hardware, parse_hardware
from trainyard.run.trainer import Trainer

HERE = Path(__file__).parent / "nxdt"
# Published parameter count, and the layout (tp, pp, cp, dp) on the file's devices and nodes.
EXAMPLES: dict[str, tuple[int, tuple[int, int, int, int]]] = {
    "hf_llama3.1_405B_trn1": (405_853_388_800, (32, 32, 1, 2)),
    "hf_llama3.1_70B": (70_553_706_496, (32, 8, 1, 4)),
    "hf_llama3.1_8B": (8_030_261_248, (32, 1, 1, 32)),
    "hf_llama3_70B": (70_553_706_496, (32, 8, 1, 2)),
    "hf_llama3_70B_CP": (70_553_706_496, (32, 8, 2, 1)),
    "hf_llama3_70B_trn2": (70_553_706_496, (32, 4, 1, 4)),
    "hf_llama3_8B": (8_030_261_248, (32, 1, 1, 4)),
    "hf_llama3_8B_trn2": (8_030_261_248, (16, 1, 1, 4)),
    "hf_llama3_8B_SFT": (8_030_261_248, (32, 1, 1, 1)),
    "hf_llama3_8B_SFT_lora": (8_030_261_248, (32, 1, 1, 1)),
    "hf_llama_7B": (1_071_681_536, (8, 1, 1, 4)),  # 4 of 32 layers
    "megatron_gpt": (6_658_404_352, (8, 1, 1, 4)),
    "megatron_llama2_7B_SFT": (6_607_343_616, (32, 1, 1, 1)),  # tied embeddings
    "hf_llama3_8B_DPO": (8_030_261_248, (32, 1, 1, 1)),
    "hf_llama3_8B_ORPO": (8_030_261_248, (32, 1, 1, 1)),
    "megatron_llama_70b": (68_976_648_192, (8, 16, 1, 2)),
    "megatron_llama_7B": (6_738_415_616, (8, 1, 1, 4)),
    "megatron_mistral": (7_241_732_096, (8, 1, 1, 4)),
    "hf_mixtral_8x7b": (46_702_792_704, (32, 4, 1, 2)),
    "hf_mixtral_8x7b_dropless": (46_702_792_704, (32, 4, 1, 2)),
    "megatron_mixtral_8x7b": (47_377_027_072, (32, 4, 1, 4)),  # one kv head for each head, tied embeddings
    "megatron_mixtral_8x7b_dropless": (47_377_027_072, (32, 4, 1, 4)),
}
VOCAB = {name: ["model.vocab=32000"] for name in ("megatron_mixtral_8x7b", "megatron_mixtral_8x7b_dropless")}
"""Keys of files whose tokenizer decides."""
PEFT = "model_alignment_strategy__peft__"


@pytest.fixture(autouse=True)
def _empty_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The examples refer to files in the home directory."""
    monkeypatch.setenv("HOME", str(tmp_path))


def tree(example: str = "hf_llama3_8B", /, **changes: object) -> dict[str, Any]:
    """Return an example as plain data with some keys changed, such as model__num_layers=4."""
    data = read_yaml(HERE / f"{example}.yaml")
    for dotted, value in changes.items():
        node = data
        *parents, leaf = dotted.split("__")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return data


def ignore_warning(line: str) -> None:
    """Discards notes of the import."""


def imported(data: dict[str, Any]) -> tuple[Config, ImportedConfig]:
    result = import_nxdt(data, "f.yaml", HERE)
    return parse(copy.deepcopy(result.data)), result


def refusal(data: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        imported(data)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith("f.yaml: ") or ": " in line
    return line


def test_every_example_file_is_listed() -> None:
    assert {path.stem for path in HERE.glob("*.yaml")} == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_imports_with_its_layout(name: str) -> None:
    config = load_source(HERE / f"{name}.yaml", VOCAB.get(name, ()), warn=ignore_warning)
    assert config.layout.ranks
    layout = Layout.from_config(config, config.layout.ranks)
    assert (layout.tp, layout.pp, layout.cp, layout.dp) == EXAMPLES[name][1]
    assert layout.micro_batches * layout.dp * config.train.micro_batch == config.train.global_batch
    assert models.family_of(config.model).blueprint(config.model).parameter_count() == EXAMPLES[name][0]


@pytest.mark.parametrize("dropless", [False, True])
def test_experts_of_mixtral(dropless: bool) -> None:
    name = "hf_mixtral_8x7b_dropless" if dropless else "hf_mixtral_8x7b"
    config, result = imported(tree(name, distributed_strategy__expert_model_parallel_size=2))
    model: Any = config.model
    assert (model.family, model.experts, model.top_k, model.balance_loss) == ("mixtral", 8, 2, 0.02)
    assert model.capacity_factor == (None if dropless else 2.0)
    assert config.layout.ep == 2
    assert any("of each sample" in line for line in result.warnings) != dropless


@pytest.mark.parametrize("name", EXAMPLES)
def test_hardware_comes_from_devices_and_nodes(name: str) -> None:
    """`plan` of an imported file used this CPU, because the file named no hardware."""
    config = load_source(HERE / f"{name}.yaml", VOCAB.get(name, ()), warn=ignore_warning)
    assert re.fullmatch(r"\d+ x trn\S+xlarge", config.hardware)
    assert (
        parse_hardware(needed_hardware(config.hardware, config.layout, config.device.lnc)).ranks == config.layout.ranks
    )


def flat(config: Config) -> dict[str, object]:
    """Values by dotted key."""
    sections = {name: section for name, section in config.model_dump().items() if isinstance(section, dict)}
    return {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}


def differences(config: Config, recipe: Config) -> dict[str, tuple[object, object]]:
    values, recipe_values = flat(config), flat(recipe)
    return {key: (values[key], value) for key, value in recipe_values.items() if values[key] != value}


@pytest.mark.parametrize(
    ("name", "recipe", "also"),
    [
        ("hf_llama3_70B", "llama3-70b", {"checkpoint.every": (10, 1000)}),
        ("hf_llama3_70B_CP", "llama3-70b-cp", {"checkpoint.every": (10, 1000)}),
        (
            "hf_llama3_70B_trn2",
            "llama3-70b-trn2",
            {"recompute.modules": (("norm", "activation"), ("norm", "activation", "core_attention"))},
        ),
    ],
)
def test_70b_example_matches_the_recipe(name: str, recipe: str, also: dict[str, object]) -> None:
    changed = differences(load_source(HERE / f"{name}.yaml", warn=ignore_warning), load(recipe))
    assert changed == {"layout.bucket_mib": (1024, 256), "log.name": ("hf_llama", recipe), **also}


@pytest.mark.parametrize(
    "name",
    [
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("hf_llama3_8B", "megatron_gpt", "hf_llama3_8B_DPO")
        ),
        "hf_llama3_8B_SFT_lora",
    ],
)
def test_imported_config_trains_as_smoke_trial(name: str, tmp_path: Path) -> None:
    small = smoke_config(load_source(HERE / f"{name}.yaml", warn=ignore_warning))
    overrides = [f"log.directory={tmp_path}", "device.name=cpu", "train.steps=3"]
    summary = Trainer(parse(small.model_dump(mode="json"), overrides)).run()
    assert (summary.steps, summary.skipped_steps) == (3, 0)


def test_key_table_has_every_documented_key() -> None:
    missing = [key for key in DOCUMENTED.split() if key not in NXDT_KEYS]
    assert not missing
    assert len(DOCUMENTED.split()) > 180


def test_key_table_targets_exist_in_the_schema() -> None:
    keys = {without_tags(key.name) for key in schema_keys()} | {"model.rope_scaling"}
    for name, rule in NXDT_KEYS.items():
        if rule.action in ("copied", "maps"):
            assert set(rule.target.split(", ")) <= keys, name


MAPPED = [
    # changes, our keys
    ({}, {"train.seed": 1234, "optimizer.kind": "adamw", "schedule.kind": "linear", "schedule.warmup_steps": 100}),
    ({"precision__type": "fp32"}, {"precision.kind": "fp32"}),
    ({"precision__type": "bf16SR"}, {"precision.kind": "bf16_sr"}),
    ({"precision__type": "autocast"}, {"precision.kind": "bf16"}),
    ({"precision__type": "mixed_precisionSR"}, {"precision.kind": "bf16"}),
    ({"precision__type": "mixed_precision_SR"}, {"precision.kind": "bf16"}),
    ({"precision__type": "manual"}, {"precision.kind": "fp32"}),
    (
        {
            "precision__type": "manual",
            "precision__xla_use_bf16": "1",
            "precision__neuron_rt_stochastic_rounding_en": "1",
        },
        {"precision.kind": "bf16_sr", "precision.grad_dtype": "bf16"},
    ),
    (
        {"precision__type": "manual", "precision__xla_downcast_bf16": 1, "precision__master_weights": True},
        {"precision.kind": "bf16", "precision.grad_dtype": "bf16"},
    ),
    ({"distributed_strategy__zero1": False}, {"layout.zero": 0}),
    ({"distributed_strategy__zero1": None}, {"layout.zero": 1}),
    ({"distributed_strategy__tensor_model_parallel_size": 1}, {"layout.sequence_parallel": False}),
    ({"distributed_strategy__virtual_pipeline_model_parallel_size": None}, {"layout.vpp": 1}),
    ({"distributed_strategy__context_parallel_size": 2}, {"layout.cp": 2, "layout.cp_method": "all_gather"}),
    ({"model__activations_checkpoint_granularity": "full"}, {"recompute.kind": "full"}),
    (
        {"model__activations_checkpoint_recompute": ["ActivationMultiplyMLP", "LlamaRMSNorm", "LlamaMLP"]},
        {"recompute.kind": "selective", "recompute.modules": ("activation", "norm", "mlp")},
    ),
    ({"model__activations_checkpoint_granularity": None}, {"recompute.kind": "none"}),
    (
        {"model__activations_checkpoint_granularity": None, "model__fusions": {"flash_attention": False}},
        {"recompute.kind": "attention"},
    ),
    (
        {"model__activations_checkpoint_recompute": None, "model__activations_checkpoint_recompute_mlp": True},
        {"recompute.modules": ("core_attention", "mlp")},
    ),
    ({"trainer__gradient_clip_val": None}, {"optimizer.max_grad_norm": 0.0}),
    ({"model__optim__sched": None}, {"schedule.kind": "constant"}),
    (
        {
            "model__optim__sched": {
                "name": "CosineAnnealing",
                "warmup_ratio": 0.1,
                "min_lr": 1e-5,
                "constant_steps": 500,
            }
        },
        {
            "schedule.kind": "cosine",
            "schedule.warmup_steps": 1000,
            "schedule.min_lr": 1e-5,
            "schedule.decay_steps": 9500,
        },
    ),
    (
        {"model__optim__sched": {"name": "WarmupPolicy", "warmup_steps": 7}},
        {"schedule.kind": "constant", "schedule.warmup_steps": 7},
    ),
    ({"exp_manager__checkpoint_callback_params__save_top_k": -1}, {"checkpoint.keep": 0, "checkpoint.every": 10}),
    ({"exp_manager__checkpoint_callback_params__save_top_k": 0}, {"checkpoint.every": 0}),
    ({"exp_manager__create_checkpoint_callback": False}, {"checkpoint.every": 0}),
    (
        {"exp_manager__checkpoint_callback_params__train_time_interval": {"hours": 1, "minutes": 30}},
        {"checkpoint.every_minutes": 90.0},
    ),
    ({"exp_manager__resume_if_exists": False}, {"checkpoint.resume": "none"}),
    (
        {"exp_manager__resume_from_checkpoint": "/a/ckpt"},
        {"checkpoint.init_from": "/a/ckpt", "checkpoint.resume": "auto"},
    ),
    ({"exp_manager__explicit_log_dir": "/logs/my run"}, {"log.directory": "/logs", "log.name": "my-run"}),
    ({"exp_manager__exp_dir": "/logs"}, {"log.directory": "/logs", "log.name": "hf_llama"}),
]


@pytest.mark.parametrize(("changes", "expected"), MAPPED, ids=[str(case[0]) for case in MAPPED])
def test_keys_map_to_ours(changes: dict[str, object], expected: dict[str, object]) -> None:
    config, _ = imported(tree(**changes))
    for dotted, value in expected.items():
        section, name = dotted.split(".")
        assert getattr(getattr(config, section), name) == value, dotted


MEGATRON = [
    (
        {"data__data_prefix": "/d/one"},
        {"paths": ("/d/one",), "weights": (), "order": "megatron-2023", "split": "980,10,10"},
    ),
    (
        {"data__data_prefix": [0.3, "/a", 0.7, "/b"]},
        {"paths": ("/a", "/b"), "weights": (0.3, 0.7), "order": "megatron-2023"},
    ),
    ({"data__data_prefix": {"train": [1.0, "/a"], "validation": ["/b"]}}, {"paths": ("/a",), "split": None}),
    ({"data__dataloader_type": "cyclic"}, {"order": "shuffled"}),
    ({"data__reset_position_ids": True, "data__reset_attention_mask": True}, {"document_mask": True}),
    ({"data__eod_mask_loss": True}, {"mask_eod_loss": True}),
]


@pytest.mark.parametrize(("changes", "expected"), MEGATRON, ids=[str(case[0]) for case in MEGATRON])
def test_megatron_data_keys_map_to_ours(changes: dict[str, object], expected: dict[str, object]) -> None:
    config, _ = imported(tree("megatron_llama_7B", **changes))
    assert {name: getattr(config.data, name) for name in expected} == expected


def test_megatron_model_uses_tokenizer_vocabulary_and_rope_keys(tmp_path: Path) -> None:
    (tmp_path / "llama_tokenizer").mkdir()
    tokenizer = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 298}, {"id": 299}]}
    (tmp_path / "llama_tokenizer" / "tokenizer.json").write_text(json.dumps(tokenizer))
    config, _ = imported(
        tree(
            "megatron_llama_7B",
            model__position_freq_base=20000,
            model__position_abf_factor=2,
            model__positition_interpolation_factor=4.0,
        )
    )
    assert config.model.vocab == 300
    assert config.model.rope_theta == 40000.0
    assert config.model.rope_scaling.factor == 4.0


MISTAKES = [
    # example, changes, parts of the error line
    ("hf_llama3_8B", {"trainer__max_stesp": 3}, ["trainer.max_stesp=3", "unknown key", "nearest: trainer.max_steps"]),
    (
        "hf_llama3_8B",
        {"tensor_model_parallel_size": 3},
        ["unknown key", "distributed_strategy.tensor_model_parallel_size"],
    ),
    ("hf_llama3_8B", {"trainer__devices": "many"}, ["trainer.devices=many", "not a whole number"]),
    ("hf_llama3_8B", {"trainer__devices": True}, ["trainer.devices=true", "not a whole number"]),
    ("hf_llama3_8B", {"trainer__devices": 10**400}, ["trainer.devices", "sensible size"]),
    ("hf_llama3_8B", {"precision": 7}, ["precision=7", "not a mapping"]),
    ("hf_llama3_8B", {"model_source": "nemo"}, ["model_source=nemo", "hf, megatron"]),
    ("hf_llama3_8B", {"precision__type": "fp16"}, ["precision.type=fp16", "mixed_precision"]),
    (
        "hf_llama3_8B",
        {"precision__type": "manual", "precision__xla_use_bf16": "1"},
        ["precision.type=manual", "nearest: master_weights True"],
    ),
    ("hf_llama3_8B", {"model__optim__name": "sgd"}, ["model.optim.name=sgd", "nearest: adamw"]),
    ("hf_llama3_8B", {"model__optim__lr": None}, ["model.optim.lr: missing"]),
    ("hf_llama3_8B", {"model__optim__sched__name": "NoamAnnealing"}, ["NoamAnnealing", "nearest: CosineAnnealing"]),
    ("hf_llama3_8B", {"model__activations_checkpoint_recompute": ["Foo"]}, ["recompute=Foo", "CoreAttention"]),
    ("hf_llama3_8B", {"model__pipeline_cuts": ["middle"]}, ["pipeline_cuts", "model.layers.18"]),
    ("hf_llama3_8B", {"exp_manager__ema": {"enable": True}}, ["exp_manager.ema.enable=true", "average of the weights"]),
    ("hf_llama3_8B", {"model_alignment_strategy": {"sft": {}}}, ["strategy.sft: empty", "packing=false"]),
    ("hf_llama3_8B", {"model__model_config": None}, ["model.model_config: missing"]),
    ("hf_llama3_8B", {"name": "my_mixtral"}, ["name=my_mixtral", "model.moe.num_experts is missing"]),
    (
        "hf_mixtral_8x7b",
        {"model__moe__routing_algorithm": "sinkhorn"},
        ["algorithm=sinkhorn", "nearest: top_k"],
    ),
    ("hf_mixtral_8x7b", {"model__moe__capacity_factor": 0.0}, ["capacity_factor=0.0", "nearest: 2.0"]),
    ("megatron_mixtral_8x7b", {"model__activation": "gelu"}, ["model.normalization=rmsnorm"]),
    ("hf_llama3_8B", {"model__hidden_size": 4321}, ["model.vocab: missing"]),
    ("hf_llama3_8B", {"defaults": ["base"]}, ["defaults", "several files"]),
    ("hf_llama3_8B", {"model_alignment_strategy": {"peft": {}}}, ["strategy.peft: empty", "lora_rank=16"]),
    ("hf_llama3_8B", {"model__lora_rank": 8}, ["peft.lora_alpha: missing", "nearest: 32"]),
    ("hf_llama3_8B_SFT_lora", {f"{PEFT}lora_bias": "all"}, ["lora_bias=all", "nearest: none"]),
    ("hf_llama3_8B_SFT_lora", {f"{PEFT}load_lora_from_ckpt": True}, ["load_lora_from_ckpt=true", "lora.init_from"]),
    ("hf_llama3_8B_SFT_lora", {f"{PEFT}target_modules": ["embed"]}, ["target_modules=embed", "nearest: qkv_proj"]),
    ("hf_llama3_8B_SFT", {"data__seq_length": 9000}, ["data.seq_length=9000", "nearest: 8192"]),
    ("hf_llama3_8B_SFT", {"data__prompt_name": "x"}, ["data.prompt_name=x", "promptsource"]),
    ("megatron_gpt", {"model__sliding_window_size": 1024}, ["sliding_window_size=1024", "nearest: null"]),
    ("megatron_gpt", {"model__transformer_block_type": "normformer"}, ["transformer_block_type=normformer", "pre_ln"]),
    ("megatron_gpt", {"model__activation": "geglu"}, ["model.activation=geglu", "swiglu"]),
    ("megatron_gpt", {"model__normalization": "rmsnorm"}, ["model.normalization=rmsnorm", "nearest: layernorm"]),
    ("megatron_gpt", {"model__num_kv_heads": 4}, ["model.num_kv_heads=4", "nearest: 32"]),
    ("megatron_gpt", {"model__rotary_percentage": 0.5}, ["rotary_percentage=0.5", "nearest: 1.0"]),
    ("megatron_llama_7B", {"model__hidden_dropout": 0.1}, ["model.hidden_dropout=0.1", "nearest: 0.0"]),
    ("megatron_llama_7B", {"data__data_prefix": [0.5, "/a", "/b"]}, ["data.data_prefix", "[0.5, A, 0.5, B]"]),
    ("megatron_llama_7B", {"data__reset_position_ids": True}, ["reset_attention_mask", "data.document_mask"]),
    ("megatron_llama_7B", {"data__data_impl": "lazy"}, ["data.data_impl=lazy", "mmap"]),
    ("megatron_llama_7B", {"data__seq_length": 1}, ["data.seq_length=1"]),
]


@pytest.mark.parametrize(("name", "changes", "parts"), MISTAKES, ids=[str(case[1])[:60] for case in MISTAKES])
def test_mistake_is_reported_on_one_line(name: str, changes: dict[str, object], parts: list[str]) -> None:
    line = refusal(tree(name, **changes))
    for part in parts:
        assert part in line, line


def test_missing_key_error_tells_where_its_value_comes_from(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(tree(model__hidden_size=4352, model__num_layers=3)))
    with pytest.raises(UserError, match=r"model\.vocab: missing.*config\.json is missing.*vocab_size"):
        load_source(path, warn=ignore_warning)
    overrides = ["model.vocab=300", "model.heads=34", "model.ffn=64", "layout.tp=1"]
    assert load_source(path, overrides, warn=ignore_warning).model.vocab == 300


def test_config_json_next_to_the_file_is_read(tmp_path: Path) -> None:
    sizes = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 9}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16384}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "initializer_range": 0.01, **sizes}))
    data = tree(model__num_layers=2, model__hidden_size=-1)
    model = parse(import_nxdt(data, "f.yaml", tmp_path).data).model
    assert (model.vocab, model.layers, model.hidden, model.num_kv_heads, model.init_std) == (500, 2, 64, 2, 0.01)
    assert model.max_positions == 16384  # the larger of the two, as in NxDT
    assert model.rope_theta == 500000.0
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(UserError, match="model_type=mamba"):
        import_nxdt(data, "f.yaml", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral", **sizes}))
    with pytest.raises(UserError, match=r"a mixtral model, but NxDT's model_source=hf without model.moe trains llama"):
        import_nxdt(data, "f.yaml", tmp_path)


def test_names_found_at_any_depth_are_used_with_a_warning() -> None:
    data = tree(model__context_parallel_size=2, trainer__ring_attention=True)
    config, result = imported(data)
    assert config.layout.cp == 2
    assert any("keys and values are all-gathered" in line for line in result.warnings)
    assert any("model.context_parallel_size=2" in line and "at any depth" in line for line in result.warnings)
    _, result = imported(tree("hf_llama3_70B_CP", model__context_parallel_size=4))
    assert any("=2, which wins" in line for line in result.warnings)


def test_defects_of_nxdt_are_warned_about() -> None:
    for name, changes, message in (
        ("hf_llama3_8B", {"model__do_layer_norm_weight_decay": False}, "inverts this key"),
        ("megatron_llama_7B", {"model__do_layer_norm_weight_decay": True}, "never decay here"),
        ("hf_llama3_8B", {"precision__type": "mixed_precisionSR"}, "spells this value in two ways"),
        ("hf_llama3_8B", {}, "after a resume"),
        ("hf_llama3_8B", {"distributed_strategy__zero1": False}, "has no fp32 master weights without zero1"),
        ("megatron_gpt", {}, "after the warm-up the learning rate is min_lr"),
        ("megatron_gpt", {}, "model.ffn_dropout=0.1"),
        ("hf_llama3_8B", {"distributed_strategy__kv_replicator": 2}, "held by 4 of 32"),
        ("hf_llama3_8B", {"exp_manager__resume_from_checkpoint": "/x"}, "trainyard convert"),
        ("hf_llama3.1_405B_trn1", {}, "126 on 32 stages"),
        ("hf_llama3_8B", {"exp_manager__save_bf16": True}, "exp_manager.save_bf16=true: no effect here"),
    ):
        _, result = imported(tree(name, **changes))
        assert any(message in line for line in result.warnings), (message, result.warnings)


def test_alignment_files_become_conversations_and_adapters() -> None:
    data = tree(
        "hf_llama3_8B_SFT_lora",
        trainer__val_check_interval=500,
        trainer__limit_val_batches=4,
        data__seq_length=4096,
        data__train_dir="/sft/data-00000-of-00001.arrow",
        **{f"{PEFT}target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], f"{PEFT}merge_lora": True},
    )
    config, result = imported(data)
    assert (config.data.source, config.data.paths) == ("chat", ("/sft",))
    assert (config.data.seq_len, config.data.packing, config.data.tokenizer) == (4096, True, "~/llama3_tokenizer")
    assert (config.data.chat.format, config.data.chat.too_long) == ("input_output", "drop")
    assert (config.evaluate.every, config.evaluate.sets) == (500, {"validation": ("~/validation.jsonl",)})
    assert config.checkpoint.init_from == "~/pretrained_ckpt"
    ((_, values),) = cast(Any, config.model.linear.wrappers())
    assert (values.rank, values.alpha, values.dropout) == (16, 32.0, 0.05)
    assert values.targets == ("q", "k", "v", "output", "gate", "up", "down")
    for defect in ("trains the tokens of the input", "holds token ids", "loses a record", "twice", "one A for a fused"):
        (line,) = [line for line in result.warnings if defect in line]
        assert "here" in line
        assert "\n" not in line
    assert any("merge_lora=true: no effect here" in line and "--merge" in line for line in result.warnings)


@pytest.mark.parametrize("name", ["dpo", "orpo"])
def test_preferences_become_an_objective(name: str) -> None:
    config, result = imported(tree(f"hf_llama3_8B_{name.upper()}"))
    assert (config.train.objective, config.data.source, config.data.chat.too_long) == (name, "preference", "drop")
    assert config.data.seq_len == 2 * 8192
    assert config.preference.beta == (0.01 if name == "dpo" else 0.1)
    assert config.preference.variant == ("sigmoid" if name == "dpo" else None)
    assert config.train.global_batch == 64
    lines = [line for line in result.warnings if line.startswith(f"model_alignment_strategy.{name}: NxDT ")]
    assert lines
    assert all("here" in line for line in lines)


def test_unpacked_records_have_no_warning_about_packing() -> None:
    config, result = imported(tree("hf_llama3_8B_SFT", model_alignment_strategy__sft__packing=False))
    assert not config.data.packing
    assert not [line for line in result.warnings if "packing" in line]
    by_name, _ = imported(tree("hf_llama3_8B", data__train_dir="/a.jsonl"))
    assert (by_name.data.source, by_name.data.packing) == ("chat", False)


INTERPOLATIONS = [
    ("${trainer.num_nodes}", 4),
    ("${.log_every_n_steps}", 10),
    ("${..data.micro_batch_size}", 1),
    ("${multiply:${trainer.num_nodes}, ${.devices}}", 128),
    ("${multiply:2, 3, 4}", 24),
    ("${model.optim.betas[1]}", 0.999),
]


@pytest.mark.parametrize(("text", "value"), INTERPOLATIONS)
def test_interpolation_is_resolved(text: str, value: float) -> None:
    assert resolve(tree(trainer__x=text))["trainer"]["x"] == value


def test_interpolation_inside_text_stays_text() -> None:
    config, _ = imported(tree(exp_manager__name="run-${trainer.devices}-${seed}"))
    assert config.log.name == "run-32-1234"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("${trainer.max_steps}", "refers to itself"),
        ("${nowhere.x}", "nowhere.x does not exist"),
        ("${oc.env:HOME}", "resolver oc.env is not supported"),
        ("${multiply:a, 2}", "takes numbers"),
        ("${trainer.devices", "unclosed brace"),
    ],
)
def test_invalid_interpolation_is_reported_on_one_line(text: str, message: str) -> None:
    assert message in refusal(tree(trainer__max_steps=text))


def test_exponential_aliases_and_interpolations_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("model_source: hf\ntrainer: &a {devices: 1, more: *a}\n")
    with pytest.raises(UserError, match="an anchor contains itself"):
        load_source(path)
    lines = ["a0: &a0 {x: 1}"] + [f"a{n}: &a{n} {{l: *a{n - 1}, r: *a{n - 1}}}" for n in range(1, 40)]
    path.write_text("model_source: hf\n" + "\n".join(lines))
    with pytest.raises(UserError, match="its aliases stand for more than"):
        load_source(path)
    lines = ["a0: x"] + [f"a{n}: ${{a{n - 1}}}${{a{n - 1}}}" for n in range(1, 40)]
    path.write_text("model_source: hf\n" + "\n".join(lines))
    with pytest.raises(UserError, match="too many or too deeply"):
        load_source(path)


def test_our_files_are_not_recognized_as_nxdt() -> None:
    assert not is_nxdt({"model": {"family": "llama"}, "trainer": {}, "exp_manager": {}})
    assert not is_nxdt({"trainer": {"steps": 3}, "model": {}})
    assert is_nxdt({"model_source": "hf"})


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        ["${seed}", "${.x}", "${multiply:${seed}, 2}", "hf", "~x/y", "a\0b", "x" * 300, "GPT2BPETokenizer"]
    ),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


def assert_imports_or_fails_on_one_line(data: dict[str, Any]) -> None:
    lines: list[str] = []
    try:
        lines = imported(data)[1].warnings
    except UserError as error:
        lines = [str(error)]
    assert not any("\n" in line for line in lines)


@examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["hf_llama3_8B", "hf_llama3_70B_CP", "megatron_gpt", "megatron_mistral"]),
    changes=st.dictionaries(st.sampled_from(sorted(NXDT_KEYS)), VALUES, min_size=1, max_size=3),
)
def test_any_value_of_any_key_imports_or_fails_on_one_line(name: str, changes: dict[str, object]) -> None:
    data = tree(name)
    for dotted, value in changes.items():
        node = data
        *parents, leaf = dotted.split(".")
        for parent in parents:
            node = node.setdefault(parent, {}) if isinstance(node.setdefault(parent, {}), dict) else {}
        node[leaf] = value
    assert_imports_or_fails_on_one_line(data)


@examples(80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.dictionaries(
        st.sampled_from(["model_source", "trainer", "model", "data", "exp_manager", "precision", "seed", "x"]), VALUES
    )
)
def test_any_tree_imports_or_fails_on_one_line(data: dict[str, Any]) -> None:
    assert_imports_or_fails_on_one_line({"model_source": "hf", **data})


@examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.sampled_from(list("{}[]&*!|>'\"%#-:, \n\tabc0123.eE+_~<=\0\x85")), max_size=40))
def test_any_yaml_text_fails_on_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "fuzz.yaml"
    path.write_text(f"model_source: hf\nx: {text}\n", encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_source(path, warn=ignore_warning)
    assert "\n" not in str(caught.value)


def test_import_command_prints_our_yaml_and_reports_every_key(tmp_path: Path, run_main: RunMain) -> None:
    file = str(HERE / "hf_llama3_8B.yaml")
    done = run_main(["import", file, "train.steps=5"])
    assert done.returncode == 0
    config = load_source(file, ["train.steps=5"], warn=ignore_warning)
    (tmp_path / "ours.yaml").write_text(done.stdout)
    assert load(tmp_path / "ours.yaml") == config
    assert "trainer.num_nodes = 4" in done.stderr
    assert "layout.ranks = 128" in done.stderr
    assert "no effect: norms and biases never decay here" in done.stderr
    assert done.stderr.index("warning: ") > done.stderr.index("layout.ranks")
    target = tmp_path / "written.yaml"
    done = run_main(["import", file, "train.steps=5", "-o", str(target)])
    assert (done.returncode, done.stdout) == (0, "")
    assert str(target) in done.stderr
    assert target.read_text().startswith("# ")
    assert load(target) == config


def test_other_commands_accept_nxdt_files(run_main: RunMain) -> None:
    file = str(HERE / "megatron_gpt.yaml")
    done = run_main(["config", file])
    assert done.returncode == 0
    assert yaml.safe_load(done.stdout)["model"]["family"] == "gpt"
    assert "note: model.ffn_dropout=0.1" in done.stderr
    assert f"trainyard import {file}" in done.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["import", "nowhere.yaml"], "no such file"),
        (["import", str(HERE / "hf_llama3_8B.yaml"), "-o", "/nowhere/x.yaml"], "--output /nowhere/x.yaml"),
        (["import", str(HERE / "hf_llama3_8B.yaml"), "STEPS=3"], "STEPS: "),
        (["import", str(Path(__file__).parents[2] / "recipes" / "tiny-llama.yaml")], "tiny-llama.yaml: not "),
        (["import", "a=b"], "name a file"),
        (["import"], "FILE"),
    ],
)
def test_mistake_in_the_import_command_is_one_line(args: list[str], message: str, run_main: RunMain) -> None:
    done = run_main(args)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
