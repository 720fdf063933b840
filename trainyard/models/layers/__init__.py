"""Layers that the model families share. Shapes: B batch, T tokens, D hidden, H heads, G kv heads, K head size."""

from trainyard.models.layers.activation import BiasActivation, ClampedSwiGLU, MlpActivation
from trainyard.models.layers.attention import CoreAttention, PackedSequences
from trainyard.models.layers.dropout import Dropout, add_uniform_noise, dropout_site, token_seeds
from trainyard.models.layers.embedding import Embedding, OutputProjection, VocabEmbedding
from trainyard.models.layers.latent_attention import LatentAttention
from trainyard.models.layers.norm import LayerNorm, ResidualSum, RMSNorm, RMSNormOfAllHeads
from trainyard.models.layers.rope import PositionTable, PositionTables
from trainyard.parallel.tensor_parallel import Linear

__all__ = [
    "BiasActivation",
    "ClampedSwiGLU",
    "CoreAttention",
    "Dropout",
    "Embedding",
    "LatentAttention",
    "LayerNorm",
    "Linear",
    "MlpActivation",
    "OutputProjection",
    "PackedSequences",
    "PositionTable",
    "PositionTables",
    "RMSNorm",
    "RMSNormOfAllHeads",
    "ResidualSum",
    "VocabEmbedding",
    "add_uniform_noise",
    "dropout_site",
    "token_seeds",
]
