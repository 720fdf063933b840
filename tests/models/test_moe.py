"""Mixtures of experts against transformers, and their losses against a plain computation over the full batch."""

import json
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import configs
from tests.support.forkserver import ForkServer
from tests.support.hf_reference import MOE_VARIANTS, hf_forward, hf_model
from trainyard import Trainer, models
from trainyard.checkpoint.weights import local_values
from trainyard.config.schema import RecomputeSection
from trainyard.core.errors import UserError
from trainyard.families.hf_config import from_hf, to_hf
from trainyard.formats.hf import open_hf, save_hf
from trainyard.kernels.grouped_linear import grouped_linear
from trainyard.models.init import initial_values
from trainyard.models.moe import MoeMLP
from trainyard.parallel.recompute import apply_recompute
from trainyard.run.records import expert_load
from trainyard.train.losses.causal_lm import CausalLoss


@pytest.mark.parametrize("variant", MOE_VARIANTS)
def test_logits_loss_and_gradients(variant: str, tmp_path: Path) -> None:
    hf, family = hf_model(variant), MOE_VARIANTS[variant][0]
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


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "qwen2_moe", "olmoe"])
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
    actual = model.layers["0"].mlp.router.weight.grad
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
    actual = torch.autograd.grad(layer(x), (x, layer.router.weight), dy)

    layer.eval()  # without router losses
    logits = x @ layer.router.weight.T
    probabilities = logits.softmax(-1)
    chosen = torch.zeros_like(logits).scatter_(2, probabilities.topk(c.top_k, -1).indices, 1.0)
    balance = c.experts * (chosen.mean(1) * probabilities.mean(1)).sum(-1).mean() / c.layers
    z = logits.logsumexp(-1).square().mean()
    loss = (layer(x) * dy).sum() + 0.3 * balance + 0.2 * z
    expected = torch.autograd.grad(loss, (x, layer.router.weight))
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
    used = set((x[:1, 3:4] @ layer.router.weight.T).topk(c.top_k, -1).indices.flatten().tolist())
    with torch.no_grad():
        for expert in set(range(c.experts)) - used:
            layer.experts.down.view(c.experts, -1)[expert] = torch.nan
    torch.testing.assert_close(layer(x[:1, 3:4]), y[:1, 3:4])


@pytest.mark.parametrize("factor", [0.5, 0.7, 1.0, 9.0])
def test_tokens_beyond_the_capacity_skip_an_expert(factor: float) -> None:
    """Equal to a loop over the tokens of each sample; with enough slots, to a layer without a capacity. Part of a slot
    is a slot (0.7: 2.8 slots), as in megatron-core."""
    layer, c = moe_layer(capacity_factor=factor, balance_loss=0.0, z_loss=0.0)
    B, T = 2, 8
    x, dy = torch.randn(B, T, c.hidden, requires_grad=True), torch.randn(B, T, c.hidden)
    weight, expert = (x @ layer.router.weight.T).softmax(-1).topk(c.top_k, -1)
    weight = weight / weight.sum(-1, keepdim=True)
    gate_up = layer.experts.gate_up.view(c.experts, -1, c.hidden)
    down = layer.experts.down.view(c.experts, -1, c.ffn)
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
    layer.has_grouped_gemm = False
    torch.testing.assert_close(layer(x), whole(x), atol=1e-6, rtol=1e-5)
    layer.train()
    for a, b in zip(*(torch.autograd.grad(out, parameters, dy) for out in (layer(x), y)), strict=True):
        torch.testing.assert_close(a, b)  # the same tokens without sorting


@pytest.mark.parametrize("grouped", [True, False])
def test_a_bias_decides_which_experts_but_not_their_weights(grouped: bool) -> None:
    layer, c = moe_layer(router_bias=True, balance_loss=0.0, z_loss=0.0)
    layer.has_grouped_gemm = grouped
    bias = torch.tensor([0.4, -0.3, 0.0, 0.1])
    with torch.no_grad():
        layer.router.bias.copy_(bias)
    logits = torch.randn(2, 8, c.experts, requires_grad=True)
    probability = logits.softmax(-1).flatten(0, 1)
    chosen = (probability + bias).topk(c.top_k, -1).indices
    expected = probability.gather(-1, chosen)
    assert not torch.equal(chosen, probability.topk(c.top_k, -1).indices)
    weight, expert = layer.router.choose(logits.flatten(0, 1), grouped)
    torch.testing.assert_close(expert.long(), chosen)
    torch.testing.assert_close(weight, expected / expected.sum(-1, keepdim=True))


def test_the_gradient_of_a_bias_is_the_load() -> None:
    layer, c = moe_layer(router_bias=True, balance_loss=0.0, z_loss=0.0)
    x = torch.randn(2, 8, c.hidden, requires_grad=True)
    chosen = (x @ layer.router.weight.T).topk(c.top_k, -1).indices
    load = torch.bincount(chosen.flatten(), minlength=c.experts).float()
    (gradient,) = torch.autograd.grad(layer(x), layer.router.bias, torch.randn(2, 8, c.hidden))
    assert gradient.tolist() == (c.experts * (load - load.mean())).tolist()


@pytest.mark.parametrize("kind", ["fp32", pytest.param("bf16", marks=pytest.mark.nightly), "bf16_sr"])
def test_a_bias_balances_the_load(kind: str) -> None:
    """A bias that prefers two experts of four goes away. The gradient norm does not have the load in it."""
    model = {**configs.MOE, "balance_loss": 0.0, "z_loss": 0.0, "bias_update_rate": 0.005}
    precision = {"kind": kind}
    plain, trainer = (
        Trainer(configs.tiny_config({**model, "router_bias": bias}, precision=precision)) for bias in (False, True)
    )
    batch = trainer.loader.batch(0, trainer.batch_slice)
    norms = [each.train_step(batch, 1, 1e-3).grad_norm for each in (trainer, plain)]
    # The bias moves what follows it in the flat buffer, so that the squares are added in other groups.
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-6, atol=0.0)
    state, name = trainer.optimizer.state, "layers.0.mlp.router.bias"
    for weights in (state.weights, state.master_weights):
        state.flat.view(weights, name).copy_(torch.tensor([0.05, 0.05, -0.05, -0.05]))
    layer = trainer.model.layers["0"].mlp
    assert isinstance(layer, MoeMLP)
    loads = []
    for step in range(2, 22):
        layer.pair_counts.zero_()
        trainer.train_step(batch, step, 1e-3)
        loads.append(float(layer.pair_counts.max() / layer.pair_counts.mean()))
    assert loads[0] == 2.0
    assert min(loads[-3:]) < 1.3
    assert trainer.full_parameter(name).abs().max() < 0.03
    assert not state.shard_view(state.exp_avg, name).any()


def test_the_step_of_a_bias_equals_megatron_core() -> None:
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias

    config = configs.tiny_config({**configs.MOE, "router_bias": True}, train={"steps": 3})
    trainer = Trainer(config)
    names = [f"layers.{layer}.mlp.router.bias" for layer in (0, 1)]
    expected = {name: torch.zeros(4) for name in names}
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        for step in (1, 2, 3):
            trainer.train_step(trainer.loader.batch(step, trainer.batch_slice), step, 1e-3)
            for layer, name in enumerate(names):
                mlp = trainer.model.layers[str(layer)].mlp
                assert isinstance(mlp, MoeMLP)
                expected[name] = get_updated_expert_bias(mlp.pair_counts.clone(), expected[name], 0.001)
                mlp.pair_counts.zero_()
                torch.testing.assert_close(trainer.full_parameter(name), expected[name])
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def test_a_job_that_could_not_export_is_refused(cli: ForkServer, tmp_path: Path) -> None:
    command = ["submit", "mixtral-8x7b", "--smoke", "--nproc", "1", "--dry-run", "model.router_bias=true"]
    done = cli.run(command, cwd=tmp_path)
    assert done.returncode == 2
    assert "checkpoint.export_hf=true: Hugging Face's format has no place for model.router_bias" in done.stderr
    assert cli.run([*command, "checkpoint.export_hf=false"], cwd=tmp_path).returncode == 0


def test_a_bias_has_no_place_in_other_formats(tmp_path: Path) -> None:
    """It starts at 0 from the weights of another stack, is refused where it would be lost, and is resumed exactly."""
    model = {**configs.MOE, "router_bias": True}
    log = {"directory": str(tmp_path)}
    exporting = configs.tiny_config(model, log=log, checkpoint={"export_hf": True})
    with pytest.raises(UserError, match=r"export_hf=true: .* no place for model.router_bias; nearest: false"):
        Trainer(exporting).run()
    assert not list(tmp_path.iterdir())
    plain = Trainer(configs.tiny_config(configs.MOE, log=log, checkpoint={"export_hf": True, "every": 4}))
    plain.run()
    assert plain.directory
    for source in (plain.directory / "model", plain.directory):
        from_source = {"resume": str(source), "weights_only": True}
        trainer = Trainer(configs.tiny_config(model, log=log | {"name": "bias"}, checkpoint=from_source))
        assert not trainer.full_parameter("layers.1.mlp.router.bias").any()
        name = "layers.1.mlp.router.weight"
        assert trainer.full_parameter(name).equal(plain.full_parameter(name))
    trainer = Trainer(configs.tiny_config(model, log=log | {"name": "bias"}, checkpoint={"every": 4}))
    trainer.run()
    bias = trainer.full_parameter("layers.1.mlp.router.bias")
    assert bias.any()
    assert trainer.directory
    faster = {**model, "bias_update_rate": 0.01}
    resume = {"resume": str(trainer.directory)}
    resumed = Trainer(configs.tiny_config(faster, log=log | {"name": "bias"}, checkpoint=resume, train={"steps": 8}))
    assert resumed.full_parameter("layers.1.mlp.router.bias").equal(bias)
    with pytest.raises(UserError, match=r"its Hugging Face names have none for layers.0.mlp.router.bias"):
        save_hf(tmp_path / "lost", trainer.config.model, trainer.full_parameter)
    assert not (tmp_path / "lost").exists()


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
    with pytest.raises(UserError, match=r"decoder_sparse_step=0: must be 1 or more; nearest: 1"):
        from_hf({**config, "decoder_sparse_step": 0})


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


@pytest.mark.parametrize("recompute", [False, True])
def test_blocks_compile_into_one_graph(recompute: bool) -> None:
    layer, c = moe_layer(balance_loss=0.3)
    if recompute:
        assert apply_recompute([torch.nn.Sequential(layer)], RecomputeSection(kind="selective", modules=["mlp"])) == 1
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, dy = torch.randn(2, 8, c.hidden, requires_grad=True), torch.randn(2, 8, c.hidden)
    for a, b in zip(*(torch.autograd.grad(f(x), (x, layer.router.weight), dy) for f in (compiled, layer)), strict=True):
        torch.testing.assert_close(a, b)
