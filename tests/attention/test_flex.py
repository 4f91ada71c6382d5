"""flex_attention as a backend: the mask it is given, what it computes, and what it refuses."""

import os
import shutil

import pytest
import torch

from videospark.attention import AttentionConfig
from videospark.attention.backends import checked_backend
from videospark.attention.block_sparse.flex import flex_block_attention, flex_block_mask
from videospark.attention.block_sparse.reference import reference_attention
from videospark.attention.block_sparse.triton_backend import invert_map
from videospark.attention.routing import block_map
from videospark.attention.testing import check_backend
from videospark.core.config import ConfigError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_COMPILER = DEVICE == "cuda" or any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="flex_attention on a CPU needs a C++ compiler")


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Each test compiles for its own shapes; together they would reach the limit of recompilations."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(length, *, dim=64, dtype=torch.float32):
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(2, length, 2, dim, generator=generator).to(DEVICE, dtype) for _ in range(3)]


@pytest.mark.parametrize("sizes", [(16, 16), (64, 16), (16, 128)])
@pytest.mark.parametrize("length", [5, 64, 105])
def test_mask_holds_the_very_blocks_of_the_map(length, sizes):
    query, key, _ = inputs(length)
    chosen = block_map(query, key, keep_ratio=0.4, block_size_q=sizes[0], block_size_k=sizes[1])
    mask = flex_block_mask(chosen, with_transpose=True)
    assert mask.shape == (2, 2, length, length)
    blocks = mask.to_dense().bool()
    wanted = torch.zeros_like(blocks).scatter_(-1, chosen.indices, True)
    assert torch.equal(blocks, wanted)
    inverted = invert_map(chosen)
    assert torch.equal(mask.q_num_blocks, inverted.first.diff(dim=-1))
    first_block = mask.q_indices[0, 1, 0, : mask.q_num_blocks[0, 1, 0]]
    assert torch.equal(first_block, inverted.queries[0, 1, : inverted.first[0, 1, 1]])
    assert flex_block_mask(chosen, with_transpose=False).q_indices is None


@needs_compiler
def test_equals_the_reference():
    query, key, value = inputs(105)
    chosen = block_map(query, key, keep_ratio=0.4, block_size_q=32, block_size_k=16)
    out = flex_block_attention(query, key, value, chosen)
    assert torch.allclose(out, reference_attention(query, key, value, chosen), atol=2e-6)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("dim", "sizes"), [(64, (16, 16)), (128, (64, 32)), (32, (128, 128))])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_conforms(dtype, dim, sizes):
    if DEVICE == "cuda" and dtype != "float32":
        sizes = (128, 128)
    with torch._dynamo.config.patch(recompile_limit=64):
        check_backend("flex", device=DEVICE, dtypes=(dtype,), head_dims=(dim,), block_sizes=(sizes,))


def test_gradients_that_it_does_not_have_are_refused():
    query, key, value = inputs(40, dtype=torch.bfloat16)
    chosen = block_map(query, key, keep_ratio=0.4, block_size_q=16, block_size_k=16)
    with pytest.raises(NotImplementedError, match="gather"):
        flex_block_attention(query.requires_grad_(), key, value, chosen)


def test_refused_with_reasons_and_alternatives():
    config = AttentionConfig(backend="flex", block_size_q=48)
    with pytest.raises(ConfigError, match=r"block_size_q is 48.*Backends that can: .*gather"):
        checked_backend(config, device="cpu", dtype="float32", head_dim=64)
    with pytest.raises(ConfigError, match="device is mps, it needs cuda or cpu"):
        checked_backend(AttentionConfig(backend="flex"), device="mps", dtype="float32", head_dim=64)
