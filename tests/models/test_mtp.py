"""Multi-token prediction: the loss of DeepSeek-V3's report (arXiv 2412.19437, section 2.2) over the logits of
transformers' MtpModel, whose weights come from a file as DeepSeek publishes them."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpModel

from tests.support import configs
from tests.support.hf_reference import hf_model
from trainyard import models
from trainyard.checkpoint.weights import local_values
from trainyard.core.constants import IGNORE_INDEX
from trainyard.core.errors import UserError
from trainyard.formats.hf import hf_tensors, open_hf, write_hf
from trainyard.formats.registry import open_weights
from trainyard.models.mtp import later_tokens
from trainyard.parallel.context_parallel import ContextAxis
from trainyard.parallel.layout import Layout
from trainyard.train.losses.causal_lm import CausalLoss

DEPTHS, WEIGHT = 2, 0.3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A file with two further blocks, the model and the blocks."""
    path = tmp_path_factory.mktemp("hf")
    main = hf_model("deepseek_v3", num_nextn_predict_layers=DEPTHS, first_k_dense_replace=1)
    main.config.first_k_dense_replace = 0  # MtpModel counts its blocks from 0, and files those after the last layer
    further = MtpModel(main, DEPTHS).eval()
    main.config.first_k_dense_replace = 1
    with torch.no_grad():
        for name, parameter in further.named_parameters():
            if name.startswith("layers"):
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
    main.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in further.state_dict().items():
        if name.startswith("layers."):
            tensors |= stored(name, tensor, main.config.num_hidden_layers)
    shared = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    for layer in range(main.config.num_hidden_layers, main.config.num_hidden_layers + DEPTHS):
        tensors |= {f"model.layers.{layer}.{name}": tensors[original].clone() for name, original in shared.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return path, main, further


def stored(name: str, tensor: Tensor, layers: int) -> dict[str, Tensor]:
    """A tensor of MtpModel as files have it."""
    _, depth, rest = name.split(".", 2)
    layer = f"model.layers.{layers + int(depth)}."
    rest = rest.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm", rest.startswith("post_norm"))
    if match := re.fullmatch(r"mlp\.experts\.(gate_up|down)_proj", rest):
        parts = ("gate", "up") if match[1] == "gate_up" else ("down",)
        return {
            f"{layer}mlp.experts.{index}.{part}_proj.weight": piece
            for index, matrix in enumerate(tensor)
            for part, piece in zip(parts, matrix.chunk(len(parts)), strict=True)
        }
    return {f"{layer}{rest}": tensor}


def hf_loss(main: Any, further: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The loss of the next token, that of further ones with its weight, and the logits of these."""
    tokens, labels = batch["tokens"].long(), batch["labels"].long()
    hidden = main.model(input_ids=tokens).last_hidden_state
    positions = torch.arange(tokens.shape[1])[None].expand(len(tokens), -1)
    count = (labels != IGNORE_INDEX).sum()

    def total(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")

    loss, terms, found = total(main.lm_head(hidden), labels) / count, [], []
    for depth in range(1, DEPTHS + 1):
        shifted = F.pad(tokens[:, depth:], (0, depth))
        hidden = further.forward_layer(depth - 1, hidden, positions, None, input_ids=shifted)
        found.append(main.lm_head(hidden)[:, :-depth])
        terms.append(total(found[-1], labels[:, depth:]) / count)
    return loss, WEIGHT / DEPTHS * sum(terms), found


def our_model(path: Path, **changes: Any) -> tuple[Any, Any]:
    weights = open_hf(path)
    values, section = local_values(weights), weights.model.model_copy(update=changes)
    return section, models.fill_parameters(models.build_model(section), lambda name: values(name).clone())


def test_logits_loss_and_gradients_of_further_tokens(folder: tuple[Path, Any, Any]) -> None:
    path, main, further = folder
    section, model = our_model(path, mtp_loss=WEIGHT)
    assert section.mtp_layers == DEPTHS
    batch = configs.tiny_batch("llama")
    expected, added, logits = hf_loss(main, further, batch)
    output, loss_fn = model(batch), CausalLoss()
    for distance, ((actual, _), wanted) in enumerate(zip(output.further, logits, strict=True), 1):
        torch.testing.assert_close(actual.logits()[:, :-distance], wanted, atol=1e-5, rtol=1e-5)
    terms = loss_fn.terms(output, batch)
    total, count = terms["lm"]
    torch.testing.assert_close(total / count, expected, atol=1e-5, rtol=1e-5)
    further_total, _ = terms["mtp"]
    torch.testing.assert_close(further_total / count * WEIGHT / DEPTHS, added, atol=1e-5, rtol=1e-5)
    (total / count).backward()
    (expected + added).backward()
    gradients = dict(model.named_parameters())
    for ours, theirs in {
        "embedding.weight": main.model.embed_tokens.weight,
        "output.weight": main.lm_head.weight,
        "norm.weight": main.model.norm.weight,
        "layers.0.attention.kv_b.weight": main.model.layers[0].self_attn.kv_b_proj.weight,
        "layers.1.mlp.router.weight": main.model.layers[1].mlp.gate.weight,
        **{
            f"mtp_{depth}.{name}.weight": further.layers[depth - 1].get_submodule(theirs).weight
            for depth in (1, 2)
            for name, theirs in {
                "projection": "eh_proj",
                "hidden_norm": "hnorm",
                "embedding_norm": "enorm",
                "output_norm": "post_norm",
                "block.attention.output": "mtp_block.self_attn.o_proj",
                "block.mlp.router": "mtp_block.mlp.gate",
            }.items()
        },
    }.items():
        torch.testing.assert_close(
            gradients[ours].grad, theirs.grad, atol=1e-5, rtol=1e-5, msg=lambda text, ours=ours: f"{ours}: {text}"
        )


def test_files_keep_their_tensors(folder: tuple[Path, Any, Any], tmp_path: Path) -> None:
    """A file read and written has the same bits, those that transformers ignores included; it loads the rest."""
    path, _, _ = folder
    original = load_file(path / "model.safetensors")
    exported = dict(hf_tensors(open_hf(path)))
    assert set(exported) == set(original)
    assert all(torch.equal(exported[name], original[name]) for name in original)
    write_hf(tmp_path / "out", open_hf(path))
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert {name.split(".")[2] for name in info["unexpected_keys"]} == {"2", "3"}


def test_files_without_further_blocks(tmp_path: Path) -> None:
    """transformers writes num_nextn_predict_layers=1 and no such tensors: a run begins them, generation needs none."""
    hf_model("deepseek_v3", num_nextn_predict_layers=1).save_pretrained(tmp_path)
    opened = open_hf(tmp_path)
    assert opened.model.mtp_layers == 0
    wanted = opened.model.model_copy(update={"mtp_layers": 1})
    started = open_weights(tmp_path, wanted)
    assert "model.mtp_layers are new" in started.notes[-1]
    values = local_values(started.weights)
    model = models.fill_parameters(models.build_model(wanted), lambda name: values(name).clone())
    batch = configs.tiny_batch("llama")
    plain = models.fill_parameters(models.build_model(opened.model), lambda name: local_values(opened)(name).clone())
    assert torch.equal(model(batch).logits(), plain(batch).logits())
    assert len(model(batch).further) == 1
    assert not model({name: tensor for name, tensor in batch.items() if name != "labels"}).further


def test_further_blocks_are_left_out_where_the_model_has_none(folder: tuple[Path, Any, Any]) -> None:
    path, _, _ = folder
    model = open_hf(path).model.without_mtp
    assert not any("mtp" in name for name in open_weights(path, model).weights.model.mtp_blocks)


def test_no_label_crosses_the_end_of_a_document() -> None:
    batch: Any = {
        "tokens": torch.tensor([[1, 2, 3, 4, 5, 6]]),
        "labels": torch.tensor([[2, 3, IGNORE_INDEX, 5, 6, 7]]),
        "document_ids": torch.tensor([[0, 0, 0, 1, 1, 1]]),
    }
    tokens, labels = later_tokens(batch, 1, ContextAxis(), torch.arange(6))
    assert tokens.tolist() == [[2, 3, 4, 5, 6, 0]]
    assert labels.tolist() == [[3, IGNORE_INDEX, IGNORE_INDEX, 6, 7, IGNORE_INDEX]]
    assert later_tokens(batch, 2, ContextAxis(), torch.arange(6))[1].tolist() == [
        [IGNORE_INDEX] * 3 + [7, IGNORE_INDEX, IGNORE_INDEX]
    ]


def test_a_split_backward_pass_is_refused() -> None:
    config = configs.tiny_config(configs.DEEPSEEK, layout={"pp": 2, "pipeline_schedule": "zero_bubble"})
    with pytest.raises(UserError, match=r"zero_bubble: torch cannot split the backward pass of model.mtp_layers=2"):
        Layout.from_config(config, 2)


def test_objectives_without_further_tokens_are_refused() -> None:
    model = {**configs.DEEPSEEK, "mtp_layers": 1}
    with pytest.raises(UserError, match=r"mtp_layers=1: train.objective=dpo predicts no further tokens"):
        configs.tiny_config(model, train={"objective": "dpo"})
