"""Where documents start in packed samples, and the variable-length kernel that reads it."""

from itertools import pairwise

import pytest
import torch

from trainyard.core.batch import Batch
from trainyard.kernels.reference import AttentionScores
from trainyard.parallel import attention_blocks, packed_documents
from trainyard.train.micro_batches.split import count_documents


def random_documents(samples: int, tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.rand(samples, tokens, generator=generator) < 8 / tokens
    starts[0], starts[-1, 0] = False, True
    return starts.cumsum(1, dtype=torch.int32)


def test_starts_are_those_of_a_walk_over_the_tokens() -> None:
    for seed in range(20):
        documents = random_documents(3, 64, seed)
        bound = count_documents(Batch(document_ids=documents), 3)
        row = [(sample, int(number)) for sample in range(3) for number in documents[sample]]
        walked = [0, *(index + 1 for index, (a, b) in enumerate(pairwise(row)) if a != b)]
        starts = packed_documents.sequence_starts(documents, bound)
        assert starts.dtype == torch.int32
        assert starts.tolist() == walked + [3 * 64] * (bound + 1 - len(walked))
    full = torch.arange(16, dtype=torch.int32).expand(2, 16)
    assert count_documents(Batch(document_ids=full), 2) == 32
    assert count_documents(Batch(document_ids=full), 1) == 16
    assert packed_documents.sequence_starts(full, 32).tolist() == list(range(33))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel runs on NVIDIA GPUs")
@pytest.mark.parametrize(("packed", "window"), [(True, 0), (True, 20), (False, 20)])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("value_size", [64, 40])
def test_kernel_equals_masked_attention(kv_heads: int, packed: bool, window: int, value_size: int) -> None:
    documents = random_documents(3, 256).cuda() if packed else None
    q, k, v, dout = (
        torch.randn(3, 256, heads, width, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for heads, width in ((4, 64), (kv_heads, 64), (kv_heads, value_size), (4, value_size))
    )
    scores = AttentionScores(0.2, None, torch.randn(4, device="cuda"))
    positions = torch.arange(256, dtype=torch.int32, device="cuda")
    mask = attention_blocks.BlockMask(documents, documents, None, positions, positions, window)
    expected, expected_lse = attention_blocks.forward(*(x.float() for x in (q, k, v)), True, mask, scores)
    attention_blocks.add_sinks(expected, expected_lse, scores)
    out, lse = packed_documents.forward(q, k, v, documents, 32, window, scores)
    assert (out.float() - expected).abs().max() < 0.02
    assert (lse - expected_lse).abs().max() < 0.02
    gradients = packed_documents.backward(dout, q, k, v, out, lse, documents, 32, window, scores)
    inputs = (x.float() for x in (dout, q, k, v, expected))
    wanted = attention_blocks.backward(*inputs, expected_lse, True, mask, scores)
    for gradient, other in zip(gradients, wanted, strict=True):
        assert (gradient.float() - other).abs().max() < 0.02 * other.abs().max()
