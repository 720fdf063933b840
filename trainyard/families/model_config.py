"""ModelConfig: the keys of the `model` section that every family has. Each family adds its own in a subclass."""

from collections.abc import Hashable
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BeforeValidator, Field, Strict, model_validator

from trainyard.core.section import ONE_OR_MORE, PositiveInt, Section, nearest_divisor
from trainyard.core.yaml_io import format_value
from trainyard.families.linear_wrapper import LinearSection

Probability = Annotated[float, Field(ge=0, lt=1)]
TokenIds = Annotated[tuple[int, ...], Strict(False), BeforeValidator(lambda ids: (ids,) if type(ids) is int else ids)]
NewTokens = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Strict(False), ONE_OR_MORE]
TRAINING_KEYS = ("init_std", "scaled_init", "balance_loss", "z_loss", "capacity_factor", "bias_update_rate", "mtp_loss")
"""Keys of the model section that matter to training only, besides dropout and fused matrices."""


class Recurrence(NamedTuple):
    """A layer that keeps a state of fixed size of a sequence instead of the keys and values of all tokens."""

    state_size: int
    """Numbers (fp32) in the state of a sequence, over all tensor-parallel ranks."""
    flops: int
    """Forward FLOP of a token with the state: all but those of matrices in the blueprint."""


class ModelConfig(Section):
    """Sizes of a transformer."""

    family: str
    """Model family: a built-in one, one of an installed package, or `module:NAME` of a Family object."""
    vocab: int = Field(ge=2, le=2**27)
    """Vocabulary size of the checkpoint, without the padding that tensor parallelism adds."""
    new_tokens: NewTokens = ()
    """Special tokens to add to the tokenizer, such as <|im_start|>. Those that it has add nothing; others take free
    rows of the embeddings first, then `vocab` grows, and new rows start as the mean of the existing ones."""
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
    score_head: bool = False
    """The head gives each token one score instead of the logits of a vocabulary, as in a reward model. Set by
    train.objective=reward."""
    linear: LinearSection = LinearSection()
    """What is put around the linear layers of blocks, by name, such as an adapter of an installed package."""
    bos_token_id: int | None = None
    """Token id that begins a text, for the exported config.json. Default: none."""
    eos_token_id: TokenIds | None = None
    """Token id, or several, that end a text, for the exported config.json. Default: none."""
    pad_token_id: int | None = None
    """Token id of padding, for the exported config.json. Default: none."""

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        is_default = getattr(self, "head_dim", None) is None and self.head_size == self.hidden // self.heads
        if self.hidden % self.heads and is_default:
            nearest = nearest_divisor(self.heads, self.hidden)
            raise ValueError(f"heads={self.heads}: does not divide hidden={self.hidden}; nearest: {nearest}")
        return self

    @property
    def head_size(self) -> int:
        """Width of an attention head: of its query and its key."""
        return getattr(self, "head_dim", None) or self.hidden // self.heads

    @property
    def value_size(self) -> int:
        """Width of the value of an attention head."""
        return self.head_size

    @property
    def num_kv_heads(self) -> int:
        """Number of key and value heads."""
        return getattr(self, "kv_heads", None) or self.heads

    @property
    def ffn_size(self) -> int:
        """Intermediate size of the MLP."""
        return getattr(self, "ffn", None) or 4 * self.hidden

    @property
    def ffn_sizes(self) -> dict[str, int]:
        """Intermediate sizes of the MLPs of all layers, by the keys that set them."""
        return {"ffn": self.ffn_size}

    def attention_window(self, layer: int) -> int | None:
        """Number of tokens, its own included, that a token of this layer attends to at most; None: all that it may."""
        return None

    def recurrence(self, layer: int) -> Recurrence | None:
        """What this layer has instead of attention; None: attention."""
        return None

    def attention_widths(self, layer: int) -> tuple[int, int]:
        """Widths of a key and of a value of each head in this layer, for FLOP counts; zeros without attention."""
        return (0, 0) if self.recurrence(layer) else (self.head_size, self.value_size)

    def cache_width(self, layer: int, tp: int) -> int:
        """Numbers that generation keeps of a token in this layer, on each of `tp` ranks."""
        return max(self.num_kv_heads // tp, 1) * sum(self.attention_widths(layer))

    def layer_kind(self, layer: int) -> Hashable:
        """What tells a layer from others. Layers of one kind have the same rows in the blueprint and compute the same,
        so that one of them stands for all where a plan traces."""
        return self.attention_window(layer), self.recurrence(layer)

    @property
    def mtp_blocks(self) -> tuple[str, ...]:
        """Names of the blocks after the last layer that predict further tokens in training (`families/mtp.py`)."""
        count = 0 if self.score_head else getattr(self, "mtp_layers", 0)
        return tuple(f"mtp_{distance}" for distance in range(1, count + 1))

    @property
    def without_mtp(self) -> Self:
        """The model that generates."""
        return self.model_copy(update={"mtp_layers": 0}) if self.mtp_blocks else self

    @property
    def context_keys(self) -> tuple[str, ...]:
        """Keys that a run may change when it starts from the weights of another one: they have no weights."""
        return ()

    @property
    def num_experts(self) -> int:
        """Number of experts in a layer with experts; 0 without a mixture of experts."""
        return getattr(self, "experts", 0)

    @property
    def has_static_shapes(self) -> bool:
        """True if the shapes of activations do not depend on values, as compilers of Trainium require."""
        return True

    @property
    def without_router_bias(self) -> Self:
        """The model as other stacks can hold it: experts without a bias that balances them, unless their files do."""
        is_lost = getattr(self, "router_bias", False) and not self.moe_style.stores_router_bias  # type: ignore[attr-defined]
        return self.model_copy(update={"router_bias": False}) if is_lost else self

    @property
    def without_wrappers(self) -> Self:
        """The model without what is put around its linear layers."""
        return self.model_copy(update={"linear": LinearSection()}) if self.linear.wrappers() else self

    @property
    def without_score_head(self) -> Self:
        """The model that predicts tokens."""
        return self.model_copy(update={"score_head": False}) if self.score_head else self

    @property
    def without_additions(self) -> Self:
        """The model that a run may start from: what it lacks is new."""
        return self.without_router_bias.without_wrappers.without_score_head

    @property
    def output_init_std(self) -> float:
        """Standard deviation of the initial weights of a block's two output projections."""
        return self.init_std / (2 * self.layers) ** 0.5 if self.scaled_init else self.init_std


def first_model_difference(model_a: ModelConfig, model_b: ModelConfig) -> tuple[str, Any, Any] | None:
    """The first key that makes two models differ in weights or logits, and its two values.

    Defaults are resolved first. Keys that matter to training only (dropout, initialization, fused matrices, balance of
    experts), or to text only (special tokens), do not count.
    """
    a, b = _compared_keys(model_a), _compared_keys(model_b)
    for key in a | b:
        ignored = key.endswith(("dropout", "_token_id", "new_tokens")) or key.startswith("fuse") or key in TRAINING_KEYS
        if not ignored and a.get(key) != b.get(key):
            return key, a.get(key), b.get(key)
    return None


def with_context_of(model: ModelConfig, stored: ModelConfig) -> ModelConfig:
    """A model with the `context_keys` of another one, whose weights it takes."""
    changed = {key: getattr(stored, key) for key in model.context_keys if getattr(model, key) != getattr(stored, key)}
    return model.model_copy(update=changed) if changed else model


def context_notes(stored: ModelConfig, model: ModelConfig) -> tuple[str, ...]:
    """One line about `context_keys` that differ from those of the model whose weights are taken. A shorter context
    needs none."""
    found, before = (each.model_dump(mode="json") for each in (model, stored))
    shorter = ("max_positions",) if model.max_positions <= stored.max_positions else ()
    keys = [key for key in model.context_keys if key in before and key not in shorter]
    changed = [key for key in keys if found[key] != before[key]]
    texts = [f"model.{key}={format_value(found[key])} (before: {format_value(before[key])})" for key in changed]
    return (f"other positions than the weights were trained with: {', '.join(texts)}",) if texts else ()


def _compared_keys(model: ModelConfig) -> dict[str, Any]:
    keys = {"family": model.family, **model.model_dump(mode="json"), "dense_ffn": None, **model.ffn_sizes}
    keys |= {"kv_heads": model.num_kv_heads, "head_dim": model.head_size}
    keys |= {"dense_layers": set(range(model.layers)).difference(getattr(model, "expert_layers", ()))}
    keys |= {"attention_layers": [layer for layer in range(model.layers) if model.recurrence(layer) is None]}
    for (wrapper, _), (name, options) in zip(model.linear.wrappers(), keys.pop("linear").items(), strict=True):
        keys |= {f"linear.{name}.{key}": options[key] for key in options if key not in wrapper.training_keys}
    return keys
