"""Recipes have the true sizes, and each runs tiny on one CPU process."""

from pathlib import Path

import pytest

from trainyard import models
from trainyard.config.load import load, parse
from trainyard.config.recipes import recipe_names
from trainyard.config.smoke import smoke_config
from trainyard.parallel.layout import Layout
from trainyard.train.trainer import Trainer

# Weights of the published models (BERT with both heads, GPT-2's tokenizer unpadded).
WEIGHTS = {
    "bert-large-phase1": 336_226_108,
    "bert-large-phase1-lamb": 336_226_108,
    "bert-large-phase2": 336_226_108,
    "deepseek-coder-1.3b": 1_346_471_936,
    "deepseek-coder-6.7b": 6_740_512_768,
    "deepseek-coder-33b": 33_342_991_360,
    "gpt3-6.7b": 6_658_404_352,
    "gpt3-6.7b-16-nodes": 6_658_404_352,
    "llama2-7b": 6_738_415_616,
    "llama3-70b": 70_553_706_496,
    "llama3-70b-trn2": 70_553_706_496,
    "llama3-70b-cp": 70_553_706_496,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-70b-trn2": 70_553_706_496,
    "llama3.1-70b-cp": 70_553_706_496,
}


def test_the_list_is_complete() -> None:
    assert set(recipe_names()) == {*WEIGHTS, "tiny-llama"}


@pytest.mark.parametrize("name", WEIGHTS)
def test_sizes_are_the_published_ones(name: str) -> None:
    model = load(name).model
    assert models.family_of(model).blueprint(model).parameter_count() == WEIGHTS[name]


@pytest.mark.parametrize("name", recipe_names())
def test_layout_divides_on_the_ranks_it_is_meant_for(name: str) -> None:
    config = load(name)
    layout = Layout.from_config(config, config.layout.ranks or 1)
    assert layout.micro_batches * layout.dp * config.train.micro_batch == config.train.global_batch


@pytest.mark.parametrize("name", recipe_names())
def test_smoke_runs_with_the_same_features(name: str, tmp_path: Path) -> None:
    config = load(name)
    small = smoke_config(config)
    for section in ("recompute", "precision"):
        assert getattr(small, section) == getattr(config, section)
    assert (small.optimizer.kind, small.schedule.kind) == (config.optimizer.kind, config.schedule.kind)
    kept = ("family", "fuse_qkv", "fuse_gate_up", "tie_embeddings", "activation", "hidden_dropout", "scaled_init")
    assert all(getattr(small.model, key, None) == getattr(config.model, key, None) for key in kept)
    scaling = getattr(config.model, "rope_scaling", None)
    assert type(getattr(small.model, "rope_scaling", None)) is type(scaling)
    if kv := getattr(config.model, "kv_heads", None):
        assert small.model.heads // small.model.kv_heads == config.model.heads // kv
    data = small.model_dump(mode="json")
    summary = Trainer(parse(data, [f"log.directory={tmp_path}", "device.name=cpu"])).run()
    assert summary.steps == small.train.steps
    assert summary.skipped_steps == 0
    assert summary.exported_weights
    assert summary.exported_weights.is_dir()


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_smoke_layout_fits_the_ranks_at_hand(ranks: int) -> None:
    for name in recipe_names():
        small = smoke_config(load(name), ranks)
        assert ranks % (small.layout.tp * small.layout.pp * small.layout.cp) == 0
        assert Layout.from_config(small, ranks).world_size == ranks


def test_the_readme_lists_every_recipe_with_its_size() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    for name in recipe_names():
        model = load(name).model
        weights = models.family_of(model).blueprint(model).parameter_count()
        size = f"{weights / 1e9:.2f}B" if weights > 1e9 else f"{weights / 1e6:.1f}M"
        assert f"| `{name}` | " in readme
        line = next(line for line in readme.splitlines() if line.startswith(f"| `{name}` | "))
        assert size in line
        assert load(name).hardware in line
