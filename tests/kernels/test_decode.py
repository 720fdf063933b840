"""The kernels of token-by-token decoding against plain torch: in Triton's interpreter on a CPU, compiled on a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kernels.test_triton_ops import DEVICE, DTYPES, close, random
from tests.support.pairwise import each_value, pairwise
from trainyard import models
from trainyard.families.builtin.gpt import GptConfig
from trainyard.families.builtin.llama import LlamaConfig
from trainyard.kernels import reference
from trainyard.kernels.fp8_weight import Fp8Weight
from trainyard.kernels.reference import PLAIN_SCORES, Activation, AttentionScores, Kernels
from trainyard.kernels.triton.decode import decode_attention as attention
from trainyard.kernels.triton.decode import skinny_linear as products
from trainyard.kernels.triton.decode.decode_attention import DecodeAttentionConfig, decode_attention
from trainyard.kernels.triton.decode.greedy_tokens import greedy_tokens
from trainyard.kernels.triton.decode.ops import DecodeKernels
from trainyard.kernels.triton.decode.rope_angles import rope_angles
from trainyard.kernels.triton.decode.skinny_linear import LinearConfig, scaled_linear, skinny_linear
from trainyard.models.rank_model import fill_parameters

needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the interpreter would take minutes")
EPS = 1e-5


@pytest.fixture(autouse=True)
def _no_gradients(monkeypatch: pytest.MonkeyPatch) -> Any:
    """In the interpreter, a program costs much more than an element: use few programs."""
    if DEVICE == "cpu":
        monkeypatch.setattr(products, "linear_config", lambda *_: LinearConfig(32, 64, 4, 3))
        monkeypatch.setattr(attention, "attention_config", lambda *_: DecodeAttentionConfig(2, 16, 4, 1))
    with torch.inference_mode():
        yield


def check_linear(rows: int, columns: int, K: int, dtype: torch.dtype, activation: Activation, parts: str) -> None:
    """`parts` names what the product absorbs: norm, bias, residual."""
    x, weight = random(rows, 1, K, dtype=dtype), K**-0.5 * random(columns, K, dtype=dtype)
    out_columns = columns // 2 if activation == "swiglu" else columns
    bias = random(columns, dtype=dtype) if "bias" in parts else None
    residual = random(rows, 1, out_columns, dtype=dtype, seed=1) if "residual" in parts else None
    norm_weight = 1 + 0.1 * random(K, dtype=dtype) if "norm" in parts else None
    actual = skinny_linear(x, weight, bias, residual, norm_weight, EPS, activation)
    args = (None if t is None else t.float() for t in (x, weight, bias, residual, norm_weight))
    close(actual, reference.skinny_linear(*args, EPS, activation).to(dtype), dtype)  # type: ignore[arg-type]


@pairwise(
    dtype=DTYPES, rows=[1, 3], shape=[(64, 64), (86, 172), (24, 40)], activation=["none", "swiglu", "gelu", "gelu_tanh"]
)
def test_linear(dtype: torch.dtype, rows: int, shape: tuple[int, int], activation: Activation) -> None:
    check_linear(rows, *shape, dtype, activation, "norm" if activation == "swiglu" else "bias")


@pairwise(rows=[1, 2], parts=["", "norm", "bias", "residual", "norm bias residual"])
def test_linear_absorbs(rows: int, parts: str) -> None:
    check_linear(rows, 40, 72, torch.float32, "none", parts)


@pairwise(dtype=DTYPES, rows=[1, 3], activation=["none", "swiglu"])
def test_linear_with_fp8_weight(dtype: torch.dtype, rows: int, activation: Activation) -> None:
    x = random(rows, 1, 72, dtype=dtype)
    weight = Fp8Weight.quantize(random(40, 72, dtype=dtype) * torch.logspace(-3, 3, 40, device=DEVICE)[:, None])
    actual = skinny_linear(x, weight, activation=activation)
    expected = reference.skinny_linear(x.float(), weight.to_dtype(torch.float32), activation=activation)
    close(actual, expected.to(dtype), dtype)


@pytest.mark.parametrize("split_k", [1, 2, 3])
def test_linear_split_over_columns_is_used_twice(split_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call finds the counters at zero again."""
    monkeypatch.setattr(products, "linear_config", lambda *_: LinearConfig(24, 16, 4, 3, split_k))
    for _ in range(2):
        check_linear(5, 40, 72, torch.float32, "none", "residual")


@pairwise(dtype=DTYPES, rows=[2, 17])
def test_product_prepares_the_next_norm(dtype: torch.dtype, rows: int) -> None:
    x, first, second = random(rows, 48, dtype=dtype), random(40, 48, dtype=dtype), 0.1 * random(64, 40, dtype=dtype)
    residual, norm_weight = random(rows, 40, dtype=dtype, seed=2), 1 + 0.1 * random(40, dtype=dtype)
    total, scaled = scaled_linear(x, first, None, residual, (norm_weight, EPS))
    assert scaled is not None
    actual, _ = scaled_linear(scaled, second, activation="swiglu")
    expected = reference.skinny_linear(x.float(), first.float(), residual=residual.float())
    close(total, expected.to(dtype), dtype)
    args = (total.float(), second.float(), None, None, norm_weight.float())
    close(actual, reference.skinny_linear(*args, EPS, "swiglu").to(dtype), dtype)


@needs_gpu
@pytest.mark.parametrize("rows", [1, 2, 8, 32, 64])
@pytest.mark.parametrize(
    ("columns", "K", "activation", "parts"),
    [
        (6144, 2048, "none", "norm"), (2048, 2048, "none", "residual"), (11008, 2048, "swiglu", "norm"),
        (2048, 5504, "none", "residual"), (2048, 688, "none", "residual"), (1376, 256, "swiglu", "norm"),
        (32256, 2048, "none", "norm"), (3072, 768, "gelu_tanh", "bias"),
    ],
)  # fmt: skip
def test_linear_of_real_shapes(rows: int, columns: int, K: int, activation: Activation, parts: str) -> None:
    for dtype in DTYPES if columns < 32256 else [torch.bfloat16]:
        check_linear(rows, columns, K, dtype, activation, parts)


@needs_gpu
@pytest.mark.parametrize("rows", [1, 2, 8, 32, 64])
@pytest.mark.parametrize(("columns", "K"), [(6144, 2048), (2048, 2048), (11008, 2048), (2048, 5504), (22016, 4096)])
def test_fp8_weights_of_real_shapes(rows: int, columns: int, K: int) -> None:
    x, weight = random(rows, 1, K, dtype=torch.bfloat16), Fp8Weight.quantize(random(columns, K, seed=1))
    expected = x.float() @ weight.to_dtype(torch.float32).T
    close(skinny_linear(x, weight), expected.bfloat16(), torch.bfloat16)


@pytest.mark.parametrize("size", [6, 64])
def test_rope_angles(size: int) -> None:
    position = torch.tensor([[0], [5], [131071]], dtype=torch.int32, device=DEVICE)
    frequency = 1e4 ** -torch.linspace(0, 1, size, device=DEVICE)
    for actual, expected in zip(
        rope_angles(position, frequency, 1.25), Kernels().rope_angles(position, frequency, 1.25), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def check_attention(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, rope: bool,
    max_seq_len: int, config: DecodeAttentionConfig | None = None, window: int | None = None,
    scores: AttentionScores = PLAIN_SCORES, value_dim: int | None = None,
) -> None:  # fmt: skip
    batch, value_dim = len(lengths), value_dim or head_dim
    qkv = random(batch, 1, heads + 2 * kv_heads, head_dim, dtype=dtype).transpose(1, 2)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
    if value_dim != head_dim:
        v = random(batch, 1, kv_heads, value_dim, dtype=dtype).transpose(1, 2)
    widths = (head_dim, value_dim)
    k_cache, v_cache = (
        random(batch, kv_heads, max_seq_len, width, dtype=dtype, seed=seed + 1) for seed, width in enumerate(widths)
    )
    for slot, length in enumerate(lengths):  # what a slot has not written may be anything
        v_cache[slot, :, length:] = torch.nan
        k_cache[slot, :, length:] = torch.nan
    angle = random(batch, 1, 1, head_dim // 2).repeat(1, 1, 1, 2)
    cos, sin = (angle.cos(), angle.sin()) if rope else (None, None)
    length_tensor = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    expected_caches = k_cache.float(), v_cache.float()
    expected = reference.decode_attention(
        q.float(), k.float(), v.float(), *expected_caches, length_tensor, cos, sin, window, scores
    )
    actual = decode_attention(q, k, v, k_cache, v_cache, length_tensor, cos, sin, window, scores, config)
    close(actual, expected.to(dtype), dtype)
    for cache, expected_cache in zip((k_cache, v_cache), expected_caches, strict=True):
        for slot, length in enumerate(lengths):
            close(cache[slot, :, : length + 1], expected_cache[slot, :, : length + 1].to(dtype), dtype)


@each_value(group=[1, 2], splits=[1, 2], window=[1, 16, 20])
def test_attention_in_a_window(group: int, splits: int, window: int) -> None:
    config = DecodeAttentionConfig(splits, 16, 4, 2)
    check_attention([0, 37, 17], 2 * group, 2, 24, torch.float32, True, 38, config, window)


@pairwise(
    group=[1, 3], splits=[1, 2], ring={"ring": 16, "full": 38}, scale=[None, 0.3], soft_cap=[None, 1.5],
    sinks=[True, False], value_dim=[24, 10, 40],
)  # fmt: skip
def test_attention_with_other_scores(
    group: int, splits: int, ring: int, scale: float | None, soft_cap: float | None, sinks: bool, value_dim: int
) -> None:
    """Also in rings: caches as long as the window, of slots that have more tokens."""
    config = DecodeAttentionConfig(splits, 16, 4, 2)
    scores = AttentionScores(scale, soft_cap, random(2 * group) if sinks else None)
    arguments = (2 * group, 2, 24, torch.float32, True, ring, config, 16, scores, value_dim)
    check_attention([0, 37, 17, 15, 16], *arguments)


@each_value(
    dtype=DTYPES, group=[1, 2, 4, 8], head_dim=[64, 128, 24], splits=[1, 2], rope={"rope": True, "plain": False}
)
def test_attention_over_ragged_lengths(dtype: torch.dtype, group: int, head_dim: int, splits: int, rope: bool) -> None:
    config = DecodeAttentionConfig(splits, 16, 4, 2)
    check_attention([0, 37, 17], 2 * group, 2, head_dim, dtype, rope, 38, config)


@needs_gpu
@pytest.mark.parametrize("lengths", [[576], [0, 1, 511, 640, 1023, 16, 17, 300], list(range(0, 1024, 32))])
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 16), (16, 8), (16, 4), (16, 2), (32, 1)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention_of_real_shapes(lengths: list[int], heads: int, kv_heads: int, head_dim: int) -> None:
    for dtype in DTYPES:
        for _ in range(2):
            check_attention(lengths, heads, kv_heads, head_dim, dtype, True, 1024)


@pairwise(dtype=DTYPES, vocab=[100, 20_000])
def test_greedy_tokens(dtype: torch.dtype, vocab: int) -> None:
    logits = random(3, vocab + 8, dtype=dtype)[:, :vocab]
    logits[1, [7, vocab - 3]] = 9.0  # of equal logits, the first
    assert torch.equal(greedy_tokens(logits), logits.float().cpu().argmax(-1).to(DEVICE))
    assert greedy_tokens(logits)[1] == 7


LLAMA = LlamaConfig(
    family="llama", vocab=48, hidden=32, layers=2, heads=4, kv_heads=2, ffn=44, max_positions=16, norm_eps=EPS
)
GPT = GptConfig(family="gpt", vocab=48, hidden=32, layers=2, heads=4, max_positions=16)


class CachedAttention(nn.Module):
    """Stands in for the attention of an engine with a KV cache."""

    def __init__(self, kernels: Kernels, cache: tuple[Tensor, Tensor], lengths: Tensor) -> None:
        super().__init__()
        self.kernels, self.cache, self.lengths = kernels, cache, lengths

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: None) -> Tensor:
        return self.kernels.decode_attention(q, k, v, *self.cache, self.lengths)

    def forward_qkv(self, projections: tuple[Tensor, ...], head_size: int, documents: None, seeds: object) -> Tensor:
        batch = len(projections[0])
        q, k, v = (y.view(batch, 1, -1, head_size).transpose(1, 2) for y in projections[0].chunk(3, -1))
        return self(q, k, v, None).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("config", "batch"),
    [pytest.param(LLAMA, 1, marks=pytest.mark.nightly), (LLAMA, 2), pytest.param(GPT, 2, marks=pytest.mark.nightly)],
    ids=["llama-1", "llama-2", "gpt-2"],
)
def test_decoding_gives_the_logits_of_a_full_pass(config: LlamaConfig | GptConfig, batch: int) -> None:
    tokens = torch.arange(2 * batch, device=DEVICE).view(batch, 2) * 7 % 48
    zeros = {
        name: torch.zeros(2, dtype=torch.int32, device=DEVICE)[:size]
        for name, size in (("sample_ids", batch), ("rng_key", 2))
    }

    def values(name: str) -> Tensor:
        shape = shapes[name]
        return (
            0.1 * random(*shape)
            if len(shape) > 1
            else (1 if name.endswith("norm.weight") else 0) + 0.1 * random(*shape)
        )

    shapes = {name: p.shape for name, p in models.build_model(config).named_parameters()}
    full = fill_parameters(models.build_model(config, DEVICE), values).eval()
    expected = full({"tokens": tokens, **zeros}).logits()
    kernels = DecodeKernels()
    model: Any = fill_parameters(models.build_model(config, DEVICE, kernels=kernels), values).eval()
    lengths = torch.zeros(batch, dtype=torch.int32, device=DEVICE)
    for block in model.layers.values():
        kv_heads = getattr(config, "num_kv_heads", config.heads)
        cache = tuple(random(batch, kv_heads, 8, config.head_size) for _ in range(2))
        block.attention.core_attention = CachedAttention(kernels, cache, lengths)  # type: ignore[arg-type]
    for position in range(2):
        inputs = {"tokens": tokens[:, position : position + 1], "position_ids": lengths[:, None], **zeros}
        close(model(inputs).logits()[:, 0], expected[:, position], torch.float32)
        lengths += 1


def test_pending_results_are_ordinary_tensors_elsewhere() -> None:
    """Model code may do anything with a product before the kernel that would absorb it."""
    kernels, x, weight = DecodeKernels(), random(2, 1, 32), random(48, 32)
    expected = x @ weight.T
    pending = kernels.linear(x, weight, None)
    assert pending.shape == expected.shape
    close(pending.transpose(1, 2), expected.transpose(1, 2), torch.float32)
    close(torch.cat([pending, kernels.linear(x, weight, None)], -1), torch.cat([expected] * 2, -1), torch.float32)
    close(kernels.linear(x, weight, None) + 1, expected + 1, torch.float32)
    close(
        2 * kernels.add_rms_norm(x, None, weight[0], EPS)[1],
        2 * Kernels().add_rms_norm(x, None, weight[0], EPS)[1],
        torch.float32,
    )
