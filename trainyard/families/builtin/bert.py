"""BERT with its masked-token and next-sentence heads."""

from collections.abc import Collection
from typing import Any

from pydantic import Field

from trainyard.core.section import PositiveInt
from trainyard.families.biased_block import GELU_TO_HF, Gelu, biased_block_specs, read_gelu
from trainyard.families.blueprint import Blueprint, ParamSpec
from trainyard.families.family import REQUIRED, Family, HfFormat, HfNameMap, HfTensor
from trainyard.families.model_config import ModelConfig, Probability

BATCH_FIELDS = ("tokens", "labels", "attention_mask", "segment_ids", "masked_positions", "next_sentence_labels")


class BertConfig(ModelConfig):
    """BERT: LayerNorm after attention and MLP, a masked-token head and a next-sentence head."""

    ffn: PositiveInt | None = None
    """Intermediate size of the MLP. Default: 4 * hidden."""
    segments: PositiveInt = 2
    """Number of segment (token type) embeddings."""
    activation: Gelu = "gelu"
    """gelu: exact (erf); gelu_tanh: the tanh approximation."""
    hidden_dropout: Probability = 0.1
    """Dropout of the embeddings and of the attention and MLP outputs; 0 to below 1."""
    attention_dropout: Probability = 0.1
    """Dropout of the attention probabilities; 0 to below 1."""
    norm_eps: float = Field(1e-12, gt=0)
    """Epsilon added to the variance in LayerNorm."""
    scaled_init: bool = False
    """Divide the standard deviation of a block's two output projections by sqrt(2 * layers)."""

    pad_token_id: int | None = 0
    """Token id of padding, for the exported config.json."""


def blueprint(c: BertConfig) -> Blueprint:
    D, V, std = c.hidden, c.vocab, c.init_std

    def head(name: str, shape: tuple[int, ...], **options: Any) -> ParamSpec:
        return ParamSpec(name, shape, pipeline_stage="last", tp_gradient="equal", **options)

    return Blueprint(
        (
            ParamSpec("embedding.weight", (V, D), 0, pipeline_stage="both", init_std=std, padded=True),
            ParamSpec("position.weight", (c.max_positions, D), pipeline_stage="first", init_std=std),
            ParamSpec("segment.weight", (c.segments, D), pipeline_stage="first", init_std=std),
            ParamSpec("embedding_norm.weight", (D,), pipeline_stage="first", init_value=1.0),
            ParamSpec("embedding_norm.bias", (D,), pipeline_stage="first"),
            *biased_block_specs(c),
            head("mlm.dense.weight", (D, D), init_std=std, flops_tokens="masked"),
            head("mlm.dense.bias", (D,)),
            head("mlm.norm.weight", (D,), init_value=1.0),
            head("mlm.norm.bias", (D,)),
            ParamSpec("mlm.bias", (V,), 0, pipeline_stage="last", padded=True),
            head("pooler.weight", (D, D), init_std=std, flops_tokens="first"),
            head("pooler.bias", (D,)),
            head("nsp.weight", (2, D), init_std=std, flops_tokens="first"),
            head("nsp.bias", (2,)),
        ),
        c.layers,
        (V, D, "masked"),
    )


def hf_names(c: BertConfig) -> HfNameMap:
    layer, embeddings = "bert.encoder.layer.*.", "bert.embeddings."
    modules = {
        "embedding_norm": f"{embeddings}LayerNorm",
        **{f"layers.*.attention.{x[0]}": f"{layer}attention.self.{x}" for x in ("query", "key", "value")},
        "layers.*.attention.output": f"{layer}attention.output.dense",
        "layers.*.attention_norm": f"{layer}attention.output.LayerNorm",
        "layers.*.mlp.up": f"{layer}intermediate.dense",
        "layers.*.mlp.down": f"{layer}output.dense",
        "layers.*.mlp_norm": f"{layer}output.LayerNorm",
        "pooler": "bert.pooler.dense",
        "mlm.dense": "cls.predictions.transform.dense",
        "mlm.norm": "cls.predictions.transform.LayerNorm",
        "nsp": "cls.seq_relationship",
    }
    tables = {"embedding": "word_embeddings", "position": "position_embeddings", "segment": "token_type_embeddings"}
    names = {f"{ours}.weight": f"{embeddings}{hf}.weight" for ours, hf in tables.items()}
    names["mlm.bias"] = "cls.predictions.bias"
    names |= {f"{ours}.{kind}": f"{hf}.{kind}" for kind in ("weight", "bias") for ours, hf in modules.items()}
    tied = {
        "cls.predictions.decoder.weight": f"{embeddings}word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }
    return HfNameMap({ours: HfTensor(hf) for ours, hf in names.items()}, tied)


def current_name(name: str, names: Collection[str]) -> str:
    """The first BERT files call the weight and bias of a norm gamma and beta."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


FAMILY = Family(
    name="bert",
    config_class=BertConfig,
    module="trainyard.models.bert:Bert",
    blueprint=blueprint,
    hf=HfFormat(
        "bert",
        "BertForPreTraining",
        {
            "vocab": ("vocab_size", REQUIRED),
            "hidden": ("hidden_size", REQUIRED),
            "layers": ("num_hidden_layers", REQUIRED),
            "heads": ("num_attention_heads", REQUIRED),
            "ffn": ("intermediate_size", REQUIRED),
            "max_positions": ("max_position_embeddings", 512),
            "segments": ("type_vocab_size", 2),
            "hidden_dropout": ("hidden_dropout_prob", 0.1),
            "attention_dropout": ("attention_probs_dropout_prob", 0.1),
            "norm_eps": ("layer_norm_eps", 1e-12),
            "init_std": ("initializer_range", 0.02),
            "bos_token_id": ("bos_token_id", None),
            "eos_token_id": ("eos_token_id", None),
            "pad_token_id": ("pad_token_id", 0),
        },
        hf_names,
        {"position_embedding_type": "absolute", "is_decoder": False, "tie_word_embeddings": True},
        ignored=(
            *("hidden_act", "classifier_dropout", "directionality", "pooler_fc_size", "pooler_num_attention_heads"),
            *("pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"),
        ),
        read=lambda data: read_gelu(data, "hidden_act", "gelu"),
        write=lambda c: {"hidden_act": GELU_TO_HF[c.activation], "intermediate_size": c.ffn_size},
        current_name=current_name,
    ),
    loss="bert_pretraining",
    batch_fields=BATCH_FIELDS,
    score_passes=12,  # masks and dropout are passes of their own
)
