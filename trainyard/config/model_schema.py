"""The `model` section: one class per model family, selected by the key `family`."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, Strict, model_validator

from trainyard.config.base import PositiveInt, Section, nearest_divisor, nearest_multiples

Probability = Annotated[float, Field(ge=0, lt=1)]
TokenIds = Annotated[tuple[int, ...], Strict(False), BeforeValidator(lambda ids: (ids,) if type(ids) is int else ids)]


class LinearRopeScaling(Section):
    """Position interpolation: positions are divided by a factor, as in DeepSeek-Coder."""

    kind: Literal["linear"] = "linear"
    """Kind of RoPE scaling."""
    factor: float = Field(ge=1)
    """Ratio of the extended context to the trained context; 1 or more."""


class Llama3RopeScaling(Section):
    """RoPE scaling of Llama 3.1: divides low frequencies by a factor, keeps high ones, interpolates in between."""

    kind: Literal["llama3"] = "llama3"
    """Kind of RoPE scaling."""
    factor: float = Field(8.0, ge=1)
    """Divisor of the low frequencies; 1 or more."""
    low_freq_factor: float = Field(1.0, gt=0)
    """Wavelengths longer than original_max_positions / low_freq_factor are scaled in full."""
    high_freq_factor: float = Field(4.0, gt=0)
    """Wavelengths shorter than original_max_positions / high_freq_factor are not scaled."""
    original_max_positions: PositiveInt = 8192
    """Context length in tokens before scaling."""


class _TransformerConfig(Section):
    vocab: int = Field(ge=2, le=2**27)
    """Vocabulary size of the checkpoint, without the padding that tensor parallelism adds."""
    hidden: int = Field(ge=1, le=2**20)
    """Hidden size (width of the residual stream)."""
    layers: int = Field(ge=1, le=10_000)
    """Number of transformer blocks."""
    heads: int = Field(ge=1, le=2**16)
    """Number of query heads; must be divisible by layout.tp."""
    max_positions: PositiveInt
    """Maximum sequence length in tokens."""
    init_std: float = Field(0.02, gt=0)
    """Standard deviation of the initial weights."""
    scaled_init: bool = True
    """Divide the standard deviation of a block's two output projections by sqrt(2 * layers), as in GPT-2."""
    fuse_qkv: bool = True
    """Store query, key and value projections as one matrix: one GEMM instead of three."""
    bos_token_id: int | None = None
    """Token id that begins a text, for the exported config.json. Default: none."""
    eos_token_id: TokenIds | None = None
    """Token id, or several, that end a text, for the exported config.json. Default: none."""
    pad_token_id: int | None = None
    """Token id of padding, for the exported config.json. Default: none."""

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.hidden % self.heads and getattr(self, "head_dim", None) is None:
            nearest = nearest_divisor(self.heads, self.hidden)
            raise ValueError(f"heads={self.heads}: does not divide hidden={self.hidden}; nearest: {nearest}")
        return self

    @property
    def head_size(self) -> int:
        """Width of an attention head."""
        return getattr(self, "head_dim", None) or self.hidden // self.heads

    @property
    def num_kv_heads(self) -> int:
        """Number of key and value heads."""
        return getattr(self, "kv_heads", None) or self.heads

    @property
    def ffn_size(self) -> int:
        """Intermediate size of the MLP."""
        return getattr(self, "ffn", None) or 4 * self.hidden

    @property
    def parameter_count(self) -> int:
        """Number of weights, known without torch; the blueprint in models/ has the tables behind it."""
        raise NotImplementedError

    def _biased_blocks_count(self) -> int:
        """Weights of the blocks of GPT and BERT: four attention matrices, two of the MLP, biases, two norms."""
        return self.layers * (self.hidden * (4 * self.hidden + 2 * self.ffn_size + 9) + self.ffn_size)


class LlamaConfig(_TransformerConfig):
    """Llama 2, 3, 3.1 and DeepSeek-Coder: RMSNorm, RoPE, grouped-query attention, SwiGLU, no biases."""

    family: Literal["llama"]
    """Model family."""
    kv_heads: PositiveInt | None = None
    """Number of key and value heads. Default: heads."""
    head_dim: PositiveInt | None = None
    """Width of a head, an even number. Default: hidden / heads."""
    ffn: PositiveInt
    """Intermediate size of the SwiGLU MLP."""
    rope_theta: float = Field(10000.0, gt=1)
    """Base of the RoPE frequencies."""
    rope_scaling: Annotated[LinearRopeScaling | Llama3RopeScaling, Field(discriminator="kind")] | None = None
    """RoPE scaling for a longer context. Default: none."""
    tie_embeddings: bool = False
    """Share one matrix between the input embedding and the output head."""
    norm_eps: float = Field(1e-5, gt=0)
    """Epsilon added to the mean square in RMSNorm."""
    fuse_gate_up: bool = True
    """Store gate and up projections as one matrix."""

    @property
    def parameter_count(self) -> int:
        attention = 2 * (self.heads + self.num_kv_heads) * self.head_size
        embeddings = self.vocab * (1 if self.tie_embeddings else 2)
        return self.hidden * (embeddings + self.layers * (attention + 3 * self.ffn + 2) + 1)

    @model_validator(mode="after")
    def _check_head_sizes(self) -> Self:
        if self.heads % self.num_kv_heads:
            nearest = nearest_divisor(self.num_kv_heads, self.heads)
            raise ValueError(f"kv_heads={self.num_kv_heads}: does not divide heads={self.heads}; nearest: {nearest}")
        if self.head_size % 2:
            multiples = nearest_multiples(self.head_size, 2)
            raise ValueError(f"head_dim={self.head_size}: RoPE needs an even head size; nearest: {multiples}")
        return self


class GptConfig(_TransformerConfig):
    """GPT-2 and GPT-3: learned positions, LayerNorm before attention and MLP, GELU, biases everywhere."""

    family: Literal["gpt"]
    """Model family."""
    ffn: PositiveInt | None = None
    """Intermediate size of the MLP. Default: 4 * hidden."""
    activation: Literal["gelu", "gelu_tanh"] = "gelu_tanh"
    """gelu: exact (erf); gelu_tanh: the tanh approximation that GPT-2 was trained with (gelu_new)."""
    tie_embeddings: bool = True
    """Share one matrix between the input embedding and the output head."""
    embedding_dropout: Probability = 0.0
    """Dropout after the embeddings; 0 to below 1."""
    hidden_dropout: Probability = 0.0
    """Dropout of the attention and MLP outputs before the residual add; 0 to below 1."""
    attention_dropout: Probability = 0.0
    """Dropout of the attention probabilities; 0 to below 1."""
    norm_eps: float = Field(1e-5, gt=0)
    """Epsilon added to the variance in LayerNorm."""

    @property
    def parameter_count(self) -> int:
        embeddings = self.vocab * (1 if self.tie_embeddings else 2) + self.max_positions
        return self.hidden * (embeddings + 2) + self._biased_blocks_count()


class BertConfig(_TransformerConfig):
    """BERT: LayerNorm after attention and MLP, a masked-token head and a next-sentence head."""

    family: Literal["bert"]
    """Model family."""
    ffn: PositiveInt | None = None
    """Intermediate size of the MLP. Default: 4 * hidden."""
    segments: PositiveInt = 2
    """Number of segment (token type) embeddings."""
    activation: Literal["gelu", "gelu_tanh"] = "gelu"
    """gelu: exact (erf); gelu_tanh: the tanh approximation."""
    hidden_dropout: Probability = 0.1
    """Dropout of the embeddings and of the attention and MLP outputs; 0 to below 1."""
    attention_dropout: Probability = 0.1
    """Dropout of the attention probabilities; 0 to below 1."""
    norm_eps: float = Field(1e-12, gt=0)
    """Epsilon added to the variance in LayerNorm."""
    scaled_init: bool = False
    """Divide the standard deviation of a block's two output projections by sqrt(2 * layers)."""

    @property
    def parameter_count(self) -> int:
        embeddings = self.vocab + self.max_positions + self.segments
        heads = self.hidden * (2 * self.hidden + 8) + self.vocab + 2  # masked tokens and next sentence, and their norms
        return self.hidden * embeddings + heads + self._biased_blocks_count()

    pad_token_id: int | None = 0
    """Token id of padding, for the exported config.json."""


ModelConfig = LlamaConfig | GptConfig | BertConfig
ModelSection = Annotated[ModelConfig, Field(discriminator="family")]
