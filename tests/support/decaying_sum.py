"""A family from outside the package without attention: its layers add up tokens, and forget a share at every token."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainyard.families import Blueprint, Family, ParamSpec
from trainyard.families.decoder import DecoderConfig, decoder_blueprint, decoder_hf_format, decoder_hf_keys
from trainyard.families.family import HfNameMap
from trainyard.families.model_config import Recurrence
from trainyard.models.llama import Llama, LlamaBlock
from trainyard.models.module_factory import ModuleFactory
from trainyard.parallel.recompute import Recomputable

SUM = "layers.*.attention."


class DecayingSumConfig(DecoderConfig):
    """Llama with sums in the place of attention."""

    def recurrence(self, layer: int) -> Recurrence:
        return Recurrence(state_size=self.hidden, flops=2 * self.hidden)


class DecayingSum(Recomputable):
    recompute_name = "attention"

    def __init__(self, c: DecayingSumConfig, make: ModuleFactory, name: str) -> None:
        super().__init__()
        self.tp = make.tp
        self.input, self.output = (make.linear(f"{name}.{x}") for x in ("input", "output"))
        self.rate = make.parameter(f"{name}.rate")
        self.state = make.layer_state((c.hidden // self.tp.size,))

    def forward(self, x_BTD: Tensor, *block_inputs: Any) -> Tensor:
        (x,) = self.tp.column_parallel(x_BTD, self.input)
        tokens, (total,) = self.state.read(len(x)) if self.state else (None, (torch.zeros_like(x[:, 0]),))
        sums = []
        for index, new in enumerate(x.unbind(1)):
            added = total * self.rate.sigmoid() + new
            total = added if tokens is None else torch.where((index < tokens)[:, None], added, total)
            sums.append(added)
        if self.state:
            self.state.write(total)
        return self.tp.reduce_output(self.output(torch.stack(sums, 1)))


class DecayingSumBlock(LlamaBlock):
    attention_class = DecayingSum


class DecayingSumModel(Llama):
    block_class = DecayingSumBlock


def blueprint(c: DecayingSumConfig) -> Blueprint:
    table, D = decoder_blueprint(c), c.hidden
    rows = (
        ParamSpec(f"{SUM}input.weight", (D, D), 0, init_std=c.init_std, flops_tokens="tokens"),
        ParamSpec(f"{SUM}rate", (D,), 0, init_value=1.0),
        ParamSpec(f"{SUM}output.weight", (D, D), 1, init_std=c.output_init_std, flops_tokens="tokens"),
    )
    return replace(table, specs=(*(spec for spec in table.specs if not spec.name.startswith(SUM)), *rows))


FAMILY = Family(
    name="decaying_sum",
    config_class=DecayingSumConfig,
    module=DecayingSumModel,
    blueprint=blueprint,
    hf=decoder_hf_format(
        "decaying_sum",
        "DecayingSumForCausalLM",
        keys=decoder_hf_keys(kv_heads=2, max_positions=64, rope_theta=10000.0, norm_eps=1e-5),
        names=lambda c: HfNameMap({}),
    ),
)
