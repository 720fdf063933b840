"""Recipes have the sizes of the published models, and each trains as a smoke trial on one CPU process."""

from pathlib import Path

import pytest

from trainyard import models
from trainyard.config.load import load, parse
from trainyard.config.recipes import recipe_names
from trainyard.config.schema import Config
from trainyard.config.smoke import smoke_config
from trainyard.parallel.layout import Layout
from trainyard.run.trainer import Trainer

# Parameters of the published models (BERT with both heads, the GPT-2 vocabulary without padding).
PARAMETERS = {
    "bert-large-16-nodes": 336_226_108,
    "bert-large-phase1": 336_226_108,
    "bert-large-phase1-lamb": 336_226_108,
    "bert-large-phase2": 336_226_108,
    "deepseek-coder-1.3b": 1_346_471_936,
    "deepseek-coder-6.7b": 6_740_512_768,
    "deepseek-coder-33b": 33_342_991_360,
    "gpt3-6.7b": 6_658_404_352,
    "gpt3-6.7b-16-nodes": 6_658_404_352,
    "llama3.1-8b-dpo": 8_030_261_248,
    "llama3.1-8b-lora": 8_030_261_248,
    "qwen3-8b-grpo": 8_190_735_360,
    "qwen3-8b-sft": 8_190_735_360,
    "llama2-7b": 6_738_415_616,
    "llama3-70b": 70_553_706_496,
    "llama3-70b-trn2": 70_553_706_496,
    "llama3-70b-cp": 70_553_706_496,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-70b-trn2": 70_553_706_496,
    "llama3.1-70b-cp": 70_553_706_496,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v3-3b": 3_023_280_128,  # no published model
}
# Each family, optimizer, kind of recompute and RoPE scaling trains in the fast tier.
TRAINED_IN_FAST_TIER = {
    "deepseek-v3-3b",
    "tiny-long-context",
    "qwen3-30b-a3b",
    "tiny-llama",
    "bert-large-phase1-lamb",
    "gpt3-6.7b",
    "deepseek-coder-1.3b",
}


def parameter_count(config: Config) -> int:
    return models.family_of(config.model).blueprint(config.model).parameter_count()


def test_every_recipe_is_listed() -> None:
    assert set(recipe_names()) == {*PARAMETERS, "tiny-llama", "tiny-chat", "tiny-dpo", "tiny-grpo", "tiny-long-context"}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_count_matches_the_published_model(name: str) -> None:
    assert parameter_count(load(name)) == PARAMETERS[name]


@pytest.mark.parametrize("name", recipe_names())
def test_layout_fits_the_intended_number_of_ranks(name: str) -> None:
    config = load(name)
    layout = Layout.from_config(config, config.layout.ranks or 1)
    assert layout.micro_batches * layout.dp * config.train.micro_batch == config.train.global_batch


@pytest.mark.parametrize("name", recipe_names())
def test_smoke_trial_keeps_the_features(name: str) -> None:
    config = load(name)
    small = smoke_config(config)
    for section in ("recompute", "precision"):
        assert getattr(small, section) == getattr(config, section)
    assert (small.optimizer.kind, small.schedule.kind) == (config.optimizer.kind, config.schedule.kind)
    features = ("family", "fuse_qkv", "fuse_gate_up", "tie_embeddings", "activation", "hidden_dropout", "scaled_init")
    assert all(getattr(small.model, key, None) == getattr(config.model, key, None) for key in features)
    scaling = getattr(config.model, "rope_scaling", None)
    assert type(getattr(small.model, "rope_scaling", None)) is type(scaling)
    assert small.model.heads // small.model.num_kv_heads == config.model.heads // config.model.num_kv_heads


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in TRAINED_IN_FAST_TIER else [pytest.mark.nightly])
        for name in recipe_names()
    ],
)
def test_smoke_trial_trains(name: str, tmp_path: Path) -> None:
    small = smoke_config(load(name))
    overrides = [f"log.directory={tmp_path}", "device.name=cpu"]
    summary = Trainer(parse(small.model_dump(mode="json"), overrides)).run()
    assert (summary.steps, summary.skipped_steps) == (small.train.steps, 0)
    assert summary.exported_weights
    assert summary.exported_weights.is_dir()


def test_smoke_intervals_follow_the_number_of_steps() -> None:
    small = smoke_config(load("tiny-llama"), overrides=["train.steps=60", "evaluate.every=10", "samples.every=5"])
    assert (small.checkpoint.every, small.evaluate.every, small.samples.every) == (30, 10, 5)
    assert smoke_config(load("tiny-llama"), overrides=["train.steps=60"]).evaluate.every == 30
    assert smoke_config(load("tiny-llama"), overrides=["train.steps=1"]).checkpoint.every == 1


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_smoke_layout_fits_the_number_of_ranks(ranks: int) -> None:
    for name in recipe_names():
        small = smoke_config(load(name), ranks)
        assert ranks % (small.layout.tp * small.layout.pp * small.layout.cp) == 0
        assert Layout.from_config(small, ranks).world_size == ranks


def test_documentation_lists_every_recipe_with_its_size() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "recipes.md").read_text()
    for name in recipe_names():
        config = load(name)
        count = parameter_count(config)
        line = next(line for line in page.splitlines() if line.startswith(f"| `{name}` | "))
        assert (f"{count / 1e9:.2f}B" if count > 1e9 else f"{count / 1e6:.1f}M") in line
        assert config.hardware in line
