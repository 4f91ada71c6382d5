"""The constants of the planner, found again by running diffusers' own modules on the meta device.

No data, no arithmetic: every tensor that an operation makes is added up until it is freed.
"""

import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import FlopCounterMode

from videospark.pipelines.plan import EAGER_BYTES, PER_TOKEN_BYTES
from videospark.pipelines.plan_memory import (
    BLOCK_ATTENTION,
    BLOCK_FEED_FORWARD,
    PER_TOKEN_TIME,
    Clip,
    Settings,
    decode_activations,
)
from videospark.pipelines.plan_models import MODELS, VAES

VAE_22 = {
    "base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True, "patch_size": 2, "in_channels": 12,
    "out_channels": 12, "scale_factor_spatial": 16, "latents_mean": [0.0] * 48, "latents_std": [1.0] * 48,
}  # fmt: skip


class Alive(TorchDispatchMode):
    """Bytes of storages that are alive, their peak, and the bytes that operations other than products move."""

    def __init__(self, *before):
        """`before` are tensors that exist already: views of them are nothing new."""
        super().__init__()
        self.before = {tensor.untyped_storage()._cdata for tensor in before}
        self.known, self.alive, self.peak, self.moved = {}, 0, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        outputs = [t for t in tree_flatten(made)[0] if isinstance(t, torch.Tensor)]
        inputs = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        new = False
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.known and storage._cdata not in self.before:
                self.known[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self.alive += storage.nbytes()
                new = True
        for key, (reference, size) in list(self.known.items()):
            if reference.expired():
                del self.known[key]
                self.alive -= size
        if new and "addmm" not in str(func):
            self.moved += sum(t.numel() * t.element_size() for t in (*inputs, *outputs))
        self.peak = max(self.peak, self.alive)
        return made


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Attention and RMSNorm are one kernel each there; on the meta device they would fall into their parts."""

    def attention(query, *_, **__):
        return torch.empty_like(query)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(torch.nn.RMSNorm, "forward", lambda self, x: torch.empty_like(x))


@torch.no_grad()
def run_block(name, tokens=16384):
    shape = MODELS[name]
    dim = shape.dim
    image = dim if shape.image_dim is not None else None
    with torch.device("meta"):
        block = WanTransformerBlock(dim, shape.ffn, shape.heads, "rms_norm_across_heads", True, 1e-6, image)
        block.to(torch.bfloat16)
        for norm in (block.norm1, block.norm2, block.norm3):
            norm.float()
        block.scale_shift_table.data = block.scale_shift_table.data.float()
        x = torch.empty(1, tokens, dim, dtype=torch.bfloat16)
        times = (1, tokens, 6, dim) if shape.per_token_time else (1, 6, dim)
        context = torch.empty(1, shape.context_tokens, dim, dtype=torch.bfloat16)
        angles = torch.empty(1, tokens, 1, shape.head_dim)
        factors = torch.empty(times, dtype=torch.bfloat16)
        with Alive(*block.parameters(), x, context, factors, angles) as alive:
            block(x, context, factors, (angles, angles))
    return alive.peak / (tokens * dim), alive.moved / (tokens * dim)


@pytest.mark.parametrize("name", ["wan2.1-t2v-1.3b", "wan2.1-t2v-14b", "wan2.1-i2v-14b", "wan2.2-ti2v-5b"])
def test_block(name, as_on_a_gpu):
    shape = MODELS[name]
    peak, moved = run_block(name)
    expected = max(BLOCK_ATTENTION, BLOCK_FEED_FORWARD + 4 * shape.ffn / shape.dim)
    # The projection of the times is made before the blocks, so a block does not make it itself.
    expected += PER_TOKEN_TIME - 12 if shape.per_token_time else 0
    assert expected == pytest.approx(peak, rel=0.01)
    assert EAGER_BYTES + (PER_TOKEN_BYTES if shape.per_token_time else 0) == pytest.approx(moved, rel=0.06)


@torch.no_grad()
def run_vae(kind, clip, encode=False, tiling=False):
    vae = VAES[kind]
    latent = (
        1,
        vae.channels,
        (clip.frames - 1) // vae.temporal + 1,
        clip.height // vae.spatial,
        clip.width // vae.spatial,
    )
    with torch.device("meta"):
        model = AutoencoderKLWan(**({} if kind == "wan2.1" else VAE_22))
        if tiling:
            model.enable_tiling()
        x = torch.empty(1, 3, clip.frames, clip.height, clip.width) if encode else torch.empty(latent)
        with Alive() as alive:
            (model.encode if encode else model.decode)(x)
    return alive.peak


@pytest.mark.parametrize("kind", VAES)
@pytest.mark.parametrize("frames", [9, 17])
def test_decoding(kind, frames):
    clip = Clip(256, 256, frames)
    name = "wan2.1-t2v-14b" if kind == "wan2.1" else "wan2.2-ti2v-5b"
    assert decode_activations(MODELS[name], clip, Settings()) == pytest.approx(run_vae(kind, clip), rel=0.03)


@pytest.mark.parametrize("kind", VAES)
def test_encoding(kind):
    peak = run_vae(kind, Clip(256, 256, 17), encode=True)
    elements = VAES[kind].encode_elements + VAES[kind].encode_elements_per_frame * 17
    assert elements * 4 * 256**2 == pytest.approx(peak, rel=0.02)


def test_decoding_in_tiles():
    clip = Clip(640, 384, 17)
    planned = decode_activations(MODELS["wan2.1-t2v-14b"], clip, Settings(vae_tiling=True))
    assert planned == pytest.approx(run_vae("wan2.1", clip, tiling=True), rel=0.1)


@pytest.mark.parametrize("kind", VAES)
def test_operations_of_decoding(kind):
    vae = VAES[kind]
    with torch.device("meta"), torch.no_grad():
        model = AutoencoderKLWan(**({} if kind == "wan2.1" else VAE_22))
        counter = FlopCounterMode(display=False)
        with counter:
            model.decode(torch.empty(1, vae.channels, 3, 256 // vae.spatial, 256 // vae.spatial))
    assert counter.get_total_flops() / (256 * 256 * 9) == pytest.approx(vae.decode_flops, rel=0.05)
