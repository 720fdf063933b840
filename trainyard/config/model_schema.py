"""The `model` section: one class per family, told apart by `family`."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from trainyard.config.base import Section, nearest_divisor, nearest_multiples

PositiveInt = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(ge=0, lt=1)]


class LinearRopeScaling(Section):
    """Positions divided by a factor (position interpolation), as DeepSeek-Coder uses it."""

    kind: Literal["linear"] = "linear"
    """Which scaling this is."""
    factor: float = Field(ge=1)
    """Times the trained context; 1 or more."""


class Llama3RopeScaling(Section):
    """Low frequencies divided by a factor, high ones kept, a smooth step between (Llama 3.1)."""

    kind: Literal["llama3"] = "llama3"
    """Which scaling this is."""
    factor: float = Field(8.0, ge=1)
    """Divisor of the low frequencies; 1 or more."""
    low_freq_factor: float = Field(1.0, gt=0)
    """Wavelengths longer than original_max_positions / this are scaled in full."""
    high_freq_factor: float = Field(4.0, gt=0)
    """Wavelengths shorter than original_max_positions / this are kept."""
    original_max_positions: PositiveInt = 8192
    """Tokens of context that the unscaled model was trained with."""


class _Transformer(Section):
    vocab: int = Field(ge=2)
    """Entries of the vocabulary, as the checkpoint has them (padding for tensor parallel comes on top)."""
    hidden: PositiveInt
    """Width of the residual stream."""
    layers: PositiveInt
    """Transformer blocks."""
    heads: PositiveInt
    """Query heads; must divide by layout.tp."""
    max_positions: PositiveInt
    """Longest sequence in tokens the model is made for."""
    init_std: float = Field(0.02, gt=0)
    """Standard deviation of the initial weights."""
    scaled_init: bool = True
    """Divide the standard deviation of the two output projections of a block by sqrt(2 * layers) (GPT-2)."""
    fuse_qkv: bool = True
    """Keep query, key and value as parts of one matrix: one product instead of three."""

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> Self:
        if self.hidden % self.heads and getattr(self, "head_dim", None) is None:
            near = nearest_divisor(self.heads, self.hidden)
            raise ValueError(f"heads={self.heads}: does not divide hidden={self.hidden}; nearest: {near}")
        return self

    @property
    def head_size(self) -> int:
        return getattr(self, "head_dim", None) or self.hidden // self.heads

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads."""
        return self.heads


class LlamaConfig(_Transformer):
    """Llama 2, 3, 3.1 and DeepSeek-Coder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases."""

    family: Literal["llama"]
    """The model family."""
    kv_heads: PositiveInt | None = None
    """Key and value heads; default: as many as heads."""
    head_dim: PositiveInt | None = None
    """Width of a head; default: hidden / heads. Even."""
    ffn: PositiveInt
    """Width of the SwiGLU layer."""
    rope_theta: float = Field(10000.0, gt=1)
    """Base of the rotary frequencies."""
    rope_scaling: Annotated[LinearRopeScaling | Llama3RopeScaling, Field(discriminator="kind")] | None = None
    """How the context was stretched; default: not."""
    tie_embeddings: bool = False
    """Output head and embedding are one matrix."""
    norm_eps: float = Field(1e-5, gt=0)
    """Added to the mean square in RMSNorm."""
    fuse_gate_up: bool = True
    """Keep gate and up projections as parts of one matrix."""

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def ffn_size(self) -> int:
        return self.ffn

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.heads % self.num_kv_heads:
            near = nearest_divisor(self.num_kv_heads, self.heads)
            raise ValueError(f"kv_heads={self.num_kv_heads}: does not divide heads={self.heads}; nearest: {near}")
        if self.head_size % 2:
            near_dim = nearest_multiples(self.head_size, 2)
            raise ValueError(f"head_dim={self.head_size}: rotary positions need an even one; nearest: {near_dim}")
        return self


class GptConfig(_Transformer):
    """GPT-2 and GPT-3: learned positions, LayerNorm before each part, GELU, biases everywhere."""

    family: Literal["gpt"]
    """The model family."""
    ffn: PositiveInt | None = None
    """Width of the MLP; default: 4 * hidden."""
    activation: Literal["gelu", "gelu_tanh"] = "gelu_tanh"
    """gelu is exact (erf), gelu_tanh the approximation GPT-2 was trained with (gelu_new)."""
    tie_embeddings: bool = True
    """Output head and embedding are one matrix."""
    embedding_dropout: Probability = 0.0
    """Dropout after the embeddings; 0 to below 1."""
    hidden_dropout: Probability = 0.0
    """Dropout of each part's output before the residual sum; 0 to below 1."""
    attention_dropout: Probability = 0.0
    """Dropout of the attention weights; 0 to below 1."""
    norm_eps: float = Field(1e-5, gt=0)
    """Added to the variance in LayerNorm."""

    @property
    def ffn_size(self) -> int:
        return self.ffn or 4 * self.hidden


class BertConfig(_Transformer):
    """BERT: LayerNorm after each part, masked-token head and next-sentence head."""

    family: Literal["bert"]
    """The model family."""
    ffn: PositiveInt | None = None
    """Width of the MLP; default: 4 * hidden."""
    segments: PositiveInt = 2
    """Kinds of segment (token types)."""
    activation: Literal["gelu", "gelu_tanh"] = "gelu"
    """gelu is exact (erf), gelu_tanh its tanh approximation."""
    hidden_dropout: Probability = 0.1
    """Dropout after the embeddings and of each part's output; 0 to below 1."""
    attention_dropout: Probability = 0.1
    """Dropout of the attention weights; 0 to below 1."""
    norm_eps: float = Field(1e-12, gt=0)
    """Added to the variance in LayerNorm."""
    scaled_init: bool = False
    """Divide the standard deviation of the two output projections of a block by sqrt(2 * layers)."""

    @property
    def ffn_size(self) -> int:
        return self.ffn or 4 * self.hidden


ModelSection = Annotated[LlamaConfig | GptConfig | BertConfig, Field(discriminator="family")]
