"""Against PEFT and diffusers' own loader, where PEFT is installed."""

import pytest
import torch

from videospark.pipelines.acceleration import accelerate, restore
from videospark.pipelines.lora import load_lora, unload_lora
from videospark.tiny.components import LATENT_CHANNELS

pytest.importorskip("peft")


@torch.no_grad()
def run(transformer):
    generator = torch.Generator().manual_seed(5)
    return transformer(
        torch.randn(1, LATENT_CHANNELS, 2, 8, 8, generator=generator), torch.tensor([400.0]),
        torch.randn(1, 16, 128, generator=generator), return_dict=False,
    )[0]  # fmt: skip


def native_file(transformer, path):
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    state = {}
    for i in range(len(transformer.blocks)):
        for part, dims in (("self_attn.q", (192, 192)), ("cross_attn.v", (192, 192)), ("ffn.0", (512, 192))):
            stem = f"diffusion_model.blocks.{i}.{part}"
            state[f"{stem}.lora_down.weight"] = torch.randn(4, dims[1], generator=generator) * 0.1
            state[f"{stem}.lora_up.weight"] = torch.randn(dims[0], 4, generator=generator) * 0.1
            state[f"{stem}.alpha"] = torch.tensor(2.0)
    save_file(state, path)
    return path


def test_same_as_diffusers_and_beside_it(pipe, tmp_path):
    path = native_file(pipe.transformer, tmp_path / "a.safetensors")
    before = run(pipe.transformer)
    load_lora(pipe, path)
    ours = run(pipe.transformer)
    unload_lora(pipe)
    pipe.load_lora_weights(path)
    theirs = run(pipe.transformer)
    assert torch.allclose(ours, theirs, atol=1e-5 * theirs.abs().max().item() + 1e-6)
    assert not torch.allclose(ours, before, atol=1e-3)
    # One loaded by PEFT stays at work under sparse attention, and ours adds to it.
    accelerate(pipe, "tiny-sparse-50")
    sparse = run(pipe.transformer)
    load_lora(pipe, path)
    assert not torch.equal(run(pipe.transformer), sparse)
    unload_lora(pipe)
    assert torch.equal(run(pipe.transformer), sparse)
    restore(pipe)
    pipe.unload_lora_weights()
    assert torch.equal(run(pipe.transformer), before)
