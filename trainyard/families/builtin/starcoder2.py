"""StarCoder2: LayerNorm, grouped-query attention with a sliding window, an MLP without a gate, biases everywhere."""

from trainyard.core.section import PositiveInt
from trainyard.families.decoder import (
    DECODER_MODULE,
    Activation,
    DecoderConfig,
    DecoderStyle,
    decoder_blueprint,
    decoder_hf_format,
    decoder_hf_keys,
    decoder_hf_names,
    read_default_head_dim,
    renamed_hf,
)
from trainyard.families.decoder_keys import activation_keys
from trainyard.families.family import Family


class Starcoder2Config(DecoderConfig):
    """StarCoder2: LayerNorm, RoPE, grouped-query attention, an MLP without a gate."""

    tie_embeddings: bool = True
    """Share one matrix between the input embedding and the output head."""
    sliding_window: PositiveInt | None = None
    """Number of tokens, its own included, that a token attends to at most. Default: all tokens before it."""
    bias: bool = True
    """Biases in the linear layers of attention and MLP."""
    activation: Activation = "gelu_tanh"
    """Activation of the MLP."""

    @property
    def style(self) -> DecoderStyle:
        biases = ("qkv", "output", "mlp") if self.bias else ()
        return DecoderStyle(norm="layer_bias", biases=biases, gated=False, activation=self.activation)

    def attention_window(self, layer: int) -> int | None:
        return self.sliding_window


FAMILY = Family(
    name="starcoder2",
    config_class=Starcoder2Config,
    module=DECODER_MODULE,
    blueprint=decoder_blueprint,
    hf=decoder_hf_format(
        "starcoder2",
        "Starcoder2ForCausalLM",
        keys={
            **decoder_hf_keys(
                kv_heads=2,
                max_positions=4096,
                rope_theta=10000.0,
                tie_embeddings=True,
                init_std=0.018042,
                bos_token_id=50256,
                eos_token_id=50256,
            ),
            "norm_eps": ("norm_epsilon", 1e-5),
            "sliding_window": ("sliding_window", None),
            "bias": ("use_bias", True),
        },
        groups=(activation_keys(default="gelu_pytorch_tanh"),),
        names=lambda c: renamed_hf(decoder_hf_names(c), {"up_proj": "c_fc", "down_proj": "c_proj"}),
        fixed={"attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0},
        read=read_default_head_dim,
    ),
)
