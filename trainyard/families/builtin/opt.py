"""OPT: GPT's block with ReLU, and learned positions whose first row is the third one of their matrix."""

from collections.abc import Mapping
from typing import Any, ClassVar

from trainyard.families.builtin.gpt import GptConfig, blueprint
from trainyard.families.decoder import Activation
from trainyard.families.decoder_keys import activation_keys
from trainyard.families.family import REQUIRED, Family, HfFormat, HfNameMap, HfTensor
from trainyard.families.model_config import Probability

HF_NAMES = {
    **{f"attention.{x}": f"self_attn.{x}_proj" for x in "qkv"},
    "attention.output": "self_attn.out_proj",
    "attention_norm": "self_attn_layer_norm",
    "mlp.up": "fc1",
    "mlp.down": "fc2",
    "mlp_norm": "final_layer_norm",
}
ACTIVATION = activation_keys("activation_function", "relu")


class OptConfig(GptConfig):
    """OPT: learned positions, LayerNorm before attention and MLP, ReLU, biases everywhere."""

    position_offset: ClassVar[int] = 2
    activation: Activation = "relu"  # type: ignore[assignment]
    """Activation of the MLP."""
    hidden_dropout: Probability = 0.1
    """Dropout of the attention and MLP outputs before the residual add; 0 to below 1."""


def hf_names(c: OptConfig) -> HfNameMap:
    top = "model.decoder."
    table = {"embedding.weight": HfTensor(f"{top}embed_tokens.weight")}
    table["position.weight"] = HfTensor(f"{top}embed_positions.weight")
    for kind in ("weight", "bias"):
        table |= {f"layers.*.{x}.{kind}": HfTensor(f"{top}layers.*.{hf}.{kind}") for x, hf in HF_NAMES.items()}
        table[f"norm.{kind}"] = HfTensor(f"{top}final_layer_norm.{kind}")
    if c.tie_embeddings:
        return HfNameMap(table, {"lm_head.weight": f"{top}embed_tokens.weight"})
    return HfNameMap({**table, "output.weight": HfTensor("lm_head.weight")})


def read(data: Mapping[str, Any]) -> dict[str, Any]:
    width, hidden = data.get("word_embed_proj_dim"), data["hidden_size"]
    if width not in (None, hidden):
        raise ValueError(f"word_embed_proj_dim={width}: not supported; nearest: {hidden}")
    return ACTIVATION.read(data)


FAMILY = Family(
    name="opt",
    config_class=OptConfig,
    module="trainyard.models.gpt:Gpt",
    blueprint=blueprint,
    hf=HfFormat(
        "opt",
        "OPTForCausalLM",
        {
            "vocab": ("vocab_size", REQUIRED),
            "hidden": ("hidden_size", REQUIRED),
            "layers": ("num_hidden_layers", REQUIRED),
            "heads": ("num_attention_heads", REQUIRED),
            "ffn": ("ffn_dim", REQUIRED),
            "max_positions": ("max_position_embeddings", 2048),
            "hidden_dropout": ("dropout", 0.1),
            "attention_dropout": ("attention_dropout", 0.0),
            "tie_embeddings": ("tie_word_embeddings", True),
            "init_std": ("init_std", 0.02),
            "bos_token_id": ("bos_token_id", 2),
            "eos_token_id": ("eos_token_id", 2),
            "pad_token_id": ("pad_token_id", 1),
        },
        hf_names,
        {
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "layerdrop": 0.0,
        },
        ignored=("activation_function", "word_embed_proj_dim"),
        read=read,
        write=lambda c: {**ACTIVATION.write(c), "ffn_dim": c.ffn_size, "word_embed_proj_dim": c.hidden},
    ),
    score_passes=4,  # as in GPT
)
