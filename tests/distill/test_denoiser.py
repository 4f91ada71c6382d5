"""The velocity field of stock transformers: times, first frames, two experts, averaged weights, recorded layers."""

import pytest
import torch

from videospark.attention.config import AttentionConfig
from videospark.attention.processors import install
from videospark.core.config import ConfigError
from videospark.distill.denoiser import Denoiser, LayerRecorder, as_averaged_field, as_field
from videospark.distill.flow import Condition


def transformer(seed, **changes):
    from diffusers import WanTransformer3DModel

    torch.manual_seed(seed)
    settings = {
        "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 24, "in_channels": 4,
        "out_channels": 4, "text_dim": 16, "freq_dim": 32, "ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 32,
    } | changes  # fmt: skip
    return WanTransformer3DModel(**settings).eval()


def inputs(batch=3, first=False):
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(batch, 4, 3, 6, 10, generator=generator)
    prompt, negative = torch.randn(batch, 5, 16, generator=generator), torch.zeros(1, 5, 16)
    frame = torch.randn(batch, 4, 1, 6, 10, generator=generator)
    condition = Condition(prompt, negative)
    if first:
        condition = Condition(prompt, negative, frame, torch.arange(batch) % 2 == 0)
    return latents, torch.tensor([0.9, 0.5, 0.2])[:batch], condition


def single(model, **options):
    settings = {"boundary_ratio": None, "expand_timesteps": True} | options
    return Denoiser({"transformer": model}, **settings)


@torch.no_grad()
def test_the_field_is_what_the_pipeline_would_compute():
    model = transformer(0)
    latents, sigma, condition = inputs()
    got = as_field(single(model))(latents, sigma, condition)
    expected = model(latents, sigma * 1000, condition.prompt_embeds, return_dict=False)[0]
    assert torch.equal(got, expected)
    # A pipeline with one time per token repeats it for every token.
    per_token = (sigma * 1000)[:, None].expand(-1, 3 * 3 * 5)
    assert torch.allclose(got, model(latents, per_token, condition.prompt_embeds, return_dict=False)[0], atol=1e-5)


@torch.no_grad()
def test_a_first_frame_stands_clean_at_time_0():
    model = transformer(0)
    latents, sigma, condition = inputs(first=True)
    got = as_field(single(model))(latents, sigma, condition)
    # As the image-to-video pipeline with `expand_timesteps` does it, clip by clip.
    for i in range(3):
        mask = torch.ones(3, 6, 10)
        x = latents[i : i + 1].clone()
        if condition.keeps_first[i]:
            mask[0] = 0
            x[:, :, :1] = condition.first_frame[i : i + 1]
        time = (mask[:, ::2, ::2] * sigma[i] * 1000).flatten()[None]
        expected = model(x, time, condition.prompt_embeds[i : i + 1], return_dict=False)[0]
        if condition.keeps_first[i]:
            assert not got[i, :, 0].any()
            expected[:, :, 0] = 0
        assert torch.allclose(got[i], expected[0], atol=1e-5)
    with pytest.raises(ConfigError, match="image_share"):
        as_field(single(model, expand_timesteps=False))(latents, sigma, condition)


@torch.no_grad()
def test_each_noise_level_is_answered_by_its_expert():
    high, low = transformer(0), transformer(1)
    both = Denoiser({"transformer": high, "transformer_2": low}, boundary_ratio=0.5, expand_timesteps=False)
    latents, sigma, condition = inputs()
    got = as_field(both)(latents, sigma, condition)
    for i, model in enumerate((high, high, low)):  # at the boundary itself the first one is asked
        prompt = condition.prompt_embeds[i : i + 1]
        expected = model(latents[i : i + 1], sigma[i : i + 1] * 1000, prompt, return_dict=False)[0]
        assert torch.allclose(got[i], expected[0], atol=1e-5)
    with pytest.raises(ConfigError, match="boundary_ratio"):
        Denoiser({"transformer": high}, boundary_ratio=0.5, expand_timesteps=False)


def test_a_mixed_batch_trains_both_experts():
    both = Denoiser(
        {"transformer": transformer(0), "transformer_2": transformer(1)}, boundary_ratio=0.5, expand_timesteps=False
    )
    as_field(both)(*inputs()).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in both.parameters())


def test_experts_with_other_channels_are_refused():
    with pytest.raises(ConfigError, match="transformer.in_channels: got 3"):
        single(transformer(0, in_channels=3))
    both = {"transformer": transformer(0, in_channels=9), "transformer_2": transformer(1)}
    with pytest.raises(ConfigError, match="transformer_2.in_channels: got 4"):
        Denoiser(both, boundary_ratio=0.5, expand_timesteps=False)


def test_the_averaged_field_uses_other_values_and_leaves_the_network_alone():
    denoiser = single(transformer(0))
    arguments = inputs()
    before = as_field(denoiser)(*arguments)
    name = "experts.transformer.proj_out.bias"
    values = {name: dict(denoiser.named_parameters())[name].detach() + 1.0}
    averaged = as_averaged_field(denoiser, values)(*arguments)
    assert torch.allclose(averaged, before + 1, atol=1e-5) and not averaged.requires_grad
    assert torch.equal(as_field(denoiser)(*arguments), before)


@torch.no_grad()
def test_recorded_layers_are_in_raster_order():
    config = AttentionConfig(backend="gather", keep_ratio=1.0, block_size_q=16, block_size_k=16, tile=(1, 2, 2))
    dense, sparse = single(transformer(0)), single(transformer(0))
    install(sparse.experts["transformer"], config)
    recorders = LayerRecorder(dense), LayerRecorder(sparse, config)
    for denoiser in (dense, sparse):
        as_field(denoiser)(*inputs())
    assert list(recorders[0].outputs) == list(recorders[1].outputs) == ["transformer.0", "transformer.1"]
    for key, value in recorders[0].outputs.items():
        assert torch.allclose(value, recorders[1].outputs[key], atol=1e-5)
    recorders[0].remove()
    recorders[0].outputs.clear()
    as_field(dense)(*inputs())
    assert not recorders[0].outputs
