"""Mixtures of experts against transformers, and their losses against a plain computation over the full batch."""

import json
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import configs
from tests.support.hf_reference import MOE_VARIANTS, hf_forward, hf_model
from trainyard import Trainer, models
from trainyard.checkpoint.formats.hf import open_hf, save_hf
from trainyard.checkpoint.formats.tensor_map import local_values
from trainyard.core.errors import UserError
from trainyard.families.hf_config import from_hf, to_hf
from trainyard.kernels.grouped_linear import grouped_linear
from trainyard.models.init import initial_values
from trainyard.models.moe import MoeMLP
from trainyard.train.losses import CausalLoss
from trainyard.train.records import expert_load


@pytest.mark.parametrize("family", MOE_VARIANTS)
def test_logits_loss_and_gradients(family: str, tmp_path: Path) -> None:
    hf = hf_model(family)
    hf.save_pretrained(tmp_path / "hf")
    weights = open_hf(tmp_path / "hf")
    section = weights.model
    assert section.family == family
    assert from_hf(to_hf(section)) == section
    values = local_values(weights)
    section = section.model_copy(update={"balance_loss": 0.0})
    model = models.fill_parameters(models.build_model(section), lambda name: values(name).clone())
    batch = configs.tiny_batch("llama")
    hf_logits, hf_loss = hf_forward(family, hf, batch)
    output = model(batch)
    torch.testing.assert_close(output.logits(), hf_logits, atol=1e-5, rtol=1e-5)
    total, count = CausalLoss().terms(output, batch)["lm"]
    torch.testing.assert_close(total / count, hf_loss, atol=1e-5, rtol=1e-5)
    (total / count).backward()
    hf_loss.backward()
    # The gradients, written and read as weights: transformers itself brings the names of files and modules together.
    parameters = dict(model.named_parameters())
    save_hf(tmp_path / "gradients", section, lambda name: parameters[name].grad)
    gradients, report = type(hf).from_pretrained(tmp_path / "gradients", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    expected = dict(hf.named_parameters())
    for name, gradient in gradients.named_parameters():
        torch.testing.assert_close(gradient, expected[name].grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", MOE_VARIANTS)
def test_balance_loss_of_one_sample_and_layer(family: str, tmp_path: Path) -> None:
    """The router's gradient is that of transformers, whose loss takes all samples and layers together."""
    hf = hf_model(family, num_hidden_layers=1, router_aux_loss_coef=0.5)
    hf.save_pretrained(tmp_path)
    weights = open_hf(tmp_path)
    assert weights.model.balance_loss == 0.5  # type: ignore[attr-defined]
    batch = {name: value[:1] for name, value in configs.tiny_batch("llama").items()}
    model = models.fill_parameters(models.build_model(weights.model), lambda name: local_values(weights)(name).clone())
    total, count = CausalLoss().terms(model(batch), batch)["lm"]
    (total / count).backward()
    out = hf(input_ids=batch["tokens"].long(), output_router_logits=True)
    loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), batch["labels"].long().flatten())
    without = torch.autograd.grad(loss, hf.model.layers[0].mlp.gate.weight, retain_graph=True)[0]
    expected = torch.autograd.grad(loss + 0.5 * out.aux_loss, hf.model.layers[0].mlp.gate.weight)[0]
    actual = model.layers["0"].mlp.router["weight"].grad
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-4)
    assert (expected - without).abs().max() > 100 * (expected - actual).abs().max()


def moe_layer(**changes: Any) -> tuple[MoeMLP, Any]:
    section = configs.tiny_config({**configs.MOE, **changes}).model
    blueprint = models.family_of(section).blueprint(section)
    model = models.fill_parameters(models.build_model(section), initial_values(blueprint, 0))
    layer = model.layers["0"].mlp
    assert isinstance(layer, MoeMLP)
    return layer, section


def test_router_losses_equal_a_plain_computation() -> None:
    """Autograd of the sum of the loss and both router losses, each a mean over samples, gives the same gradients."""
    layer, c = moe_layer(balance_loss=0.3, z_loss=0.2)
    layer.samples_per_step = 3
    x, dy = torch.randn(3, 8, c.hidden, requires_grad=True), torch.randn(3, 8, c.hidden)
    actual = torch.autograd.grad(layer(x), (x, layer.router["weight"]), dy)

    layer.eval()  # without router losses
    logits = x @ layer.router["weight"].T
    probabilities = logits.softmax(-1)
    chosen = torch.zeros_like(logits).scatter_(2, probabilities.topk(c.top_k, -1).indices, 1.0)
    balance = c.experts * (chosen.mean(1) * probabilities.mean(1)).sum(-1).mean() / c.layers
    z = logits.logsumexp(-1).square().mean()
    loss = (layer(x) * dy).sum() + 0.3 * balance + 0.2 * z
    expected = torch.autograd.grad(loss, (x, layer.router["weight"]))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("sizes", [(0, 5, 0, 3), (8, 0, 0, 0), (0, 0, 0, 0)])
def test_grouped_linear(sizes: tuple[int, ...]) -> None:
    """Groups may be empty. Equal to a loop, forward and backward."""
    rows, ends = sum(sizes), torch.tensor(sizes).cumsum(0, dtype=torch.int32)
    x = torch.randn(rows, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 7, 6, dtype=torch.float64, requires_grad=True)
    expected = torch.cat([part @ w.T for part, w in zip(x.split(sizes), weight, strict=True)])
    actual = grouped_linear(x, weight, ends)
    dy = torch.randn_like(expected)
    torch.testing.assert_close(actual, expected)
    pairs = zip(
        torch.autograd.grad(actual, (x, weight), dy), torch.autograd.grad(expected, (x, weight), dy), strict=True
    )
    for a, b in pairs:
        torch.testing.assert_close(a, b)
    torch.library.opcheck(grouped_linear, (x, weight, ends))


def test_tokens_choose_only_their_experts() -> None:
    """A token's output does not depend on other tokens, nor on experts that it does not use."""
    layer, c = moe_layer()
    x = torch.randn(2, 8, c.hidden)
    y = layer(x)
    torch.testing.assert_close(layer(x[:1, 3:4]), y[:1, 3:4])
    used = set((x[:1, 3:4] @ layer.router["weight"].T).topk(c.top_k, -1).indices.flatten().tolist())
    with torch.no_grad():
        for expert in set(range(c.experts)) - used:
            layer.experts["down"].view(c.experts, -1)[expert] = torch.nan
    torch.testing.assert_close(layer(x[:1, 3:4]), y[:1, 3:4])


@pytest.mark.parametrize("factor", [0.5, 1.0, 9.0])
def test_tokens_beyond_the_capacity_skip_an_expert(factor: float) -> None:
    """Equal to a loop over the tokens of each sample; with enough slots, to a layer without a capacity."""
    layer, c = moe_layer(capacity_factor=factor, balance_loss=0.0, z_loss=0.0)
    B, T = 2, 8
    x, dy = torch.randn(B, T, c.hidden, requires_grad=True), torch.randn(B, T, c.hidden)
    weight, expert = (x @ layer.router["weight"].T).softmax(-1).topk(c.top_k, -1)
    weight = weight / weight.sum(-1, keepdim=True)
    gate_up = layer.experts["gate_up"].view(c.experts, -1, c.hidden)
    down = layer.experts["down"].view(c.experts, -1, c.ffn)
    rows, dropped = [], 0
    for sample in range(B):
        slots = [ceil(factor * T * c.top_k / c.experts)] * c.experts
        for token in range(T):
            row = torch.zeros(c.hidden)
            for w, e in zip(weight[sample, token], expert[sample, token].tolist(), strict=True):
                if slots[e]:
                    slots[e] -= 1
                    gate, up = (gate_up[e] @ x[sample, token]).chunk(2)
                    row = row + w * (down[e] @ (torch.nn.functional.silu(gate) * up))
                else:
                    dropped += 1
            rows.append(row)
    assert bool(dropped) == (factor < 9)
    expected = torch.stack(rows).view(B, T, -1)
    y = layer(x)
    torch.testing.assert_close(y, expected, atol=1e-6, rtol=1e-5)
    parameters = (x, *layer.parameters())
    for a, b in zip(*(torch.autograd.grad(out, parameters, dy, True) for out in (y, expected)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    layer.eval()
    whole, _ = moe_layer()
    torch.testing.assert_close(layer(x), whole(x))  # evaluation drops nothing
    layer.has_grouped_products = False
    torch.testing.assert_close(layer(x), whole(x), atol=1e-6, rtol=1e-5)
    layer.train()
    for a, b in zip(*(torch.autograd.grad(out, parameters, dy) for out in (layer(x), y)), strict=True):
        torch.testing.assert_close(a, b)  # the same tokens without sorting


def test_active_flops_count() -> None:
    section = configs.tiny_config(configs.MOE).model
    specs: dict[str, Tensor | Any] = {s.name: s for s in models.family_of(section).blueprint(section).specs}
    assert specs["layers.*.mlp.experts.down"].flops_share == section.top_k / section.experts  # type: ignore[attr-defined]
    assert specs["layers.*.mlp.router.weight"].flops_share == 1


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model.top_k=9: more than experts=4; nearest: 4"):
        configs.tiny_config({**configs.MOE, "top_k": 9})
    with pytest.raises(UserError, match=r"train.loss=a:b: its count divides all gradients"):
        configs.tiny_config({**configs.MOE, "balance_loss": 0.1}, train={"loss": "a:b"})
    hf_model("qwen3_moe").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(UserError, match=r"mlp_only_layers=\[0\]: not supported"):
        from_hf({**config, "mlp_only_layers": [0]})


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_run_reports_the_load_of_experts(recompute: str, tmp_path: Path) -> None:
    """The shares of all experts have the mean 1; a router that knows one expert gives it all tokens."""
    config = configs.tiny_config(configs.MOE, recompute={"kind": recompute}, log={"directory": str(tmp_path)})
    trainer = Trainer(config)
    trainer.run()
    record = trainer.last_record
    assert 0 <= record["expert_load/min"] < 1 < record["expert_load/max"] <= 2  # 4 experts, of which a token uses 2
    load = expert_load(trainer.models, trainer.mesh)
    assert all(value != value for value in load.values())  # nothing was counted since the last record


def test_blocks_compile_into_one_graph() -> None:
    layer, c = moe_layer(balance_loss=0.3)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, dy = torch.randn(2, 8, c.hidden, requires_grad=True), torch.randn(2, 8, c.hidden)
    for a, b in zip(
        *(torch.autograd.grad(f(x), (x, layer.router["weight"]), dy) for f in (compiled, layer)), strict=True
    ):
        torch.testing.assert_close(a, b)
