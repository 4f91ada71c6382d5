"""A small random Wan with sizes that 16 divides, and what it is fed."""

from __future__ import annotations

import pytest
import torch


def build_wan(seed=0, **changes):
    """Two layers, two heads of 32; weights large enough that every part matters."""
    from diffusers import WanTransformer3DModel

    settings = {
        "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 32, "in_channels": 4,
        "out_channels": 4, "text_dim": 48, "freq_dim": 32, "ffn_dim": 160, "num_layers": 2, "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 32,
    }  # fmt: skip
    torch.manual_seed(seed)
    transformer = WanTransformer3DModel(**(settings | changes)).eval().requires_grad_(False)
    for name, parameter in transformer.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.1)
        elif parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
    return transformer


def wan_inputs(frames=3, height=10, width=6, batch=2, per_token=False, dtype=torch.float32, seed=1):
    """Latents of 45 tokens by default, text of 11, and times."""
    generator = torch.Generator().manual_seed(seed)
    tokens = frames * height * width // 4
    times = torch.rand(*((batch, tokens) if per_token else (batch,)), generator=generator) * 1000
    return {
        "hidden_states": torch.randn(batch, 4, frames, height, width, generator=generator).to(dtype),
        "encoder_hidden_states": torch.randn(batch, 11, 48, generator=generator).to(dtype),
        "timestep": times,
    }


@torch.no_grad()
def run_wan(transformer, **inputs):
    """The denoiser's output."""
    return transformer(**(inputs or wan_inputs()), return_dict=False)[0]


@pytest.fixture
def wan():
    return build_wan()
