"""The training forwards give what the stock modules give."""

import pytest
import torch

from videospark.tiny import components, fast_forward
from videospark.tiny.train_teacher import encode_captions


@pytest.fixture(scope="module")
def transformer():
    torch.manual_seed(0)
    model = components.build_transformer()
    for p in model.parameters():
        if p.ndim == 1:
            torch.nn.init.normal_(p, std=0.3)
    torch.nn.init.normal_(model.proj_out.weight, std=0.05)
    return model


@pytest.mark.parametrize(("frames", "side"), [(17, 32), (5, 48), (1, 32)])
def test_autoencoder_over_the_whole_clip_equals_the_chunked_one(frames, side):
    torch.manual_seed(0)
    vae = components.build_vae()
    video = torch.rand(2, 3, frames, side, side) * 2 - 1
    with torch.no_grad():
        expected = vae.encode(video).latent_dist
        mean, log_variance = fast_forward.encode_moments(vae, video)
        torch.testing.assert_close(mean, expected.mean, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(log_variance, expected.logvar, atol=1e-5, rtol=1e-4)
        decoded = fast_forward.decode_latents(vae, mean).clamp(-1, 1)
        torch.testing.assert_close(decoded, vae.decode(mean).sample, atol=1e-5, rtol=1e-4)
    assert decoded.shape == video.shape and decoded.std() > 0


@pytest.mark.parametrize("grid", [(5, 8, 8), (3, 5, 7)])
def test_denoiser_equals_the_stock_transformer(transformer, grid):
    frames, height, width = grid
    latents = torch.randn(2, components.LATENT_CHANNELS, frames, 2 * height, 2 * width)
    text = torch.randn(2, 24, components.TEXT_WIDTH)
    times = torch.full((2, frames), 700.0)
    times[0, 0] = 0.0
    with torch.no_grad():
        expected = transformer(
            hidden_states=latents,
            timestep=times.repeat_interleave(height * width, 1),
            encoder_hidden_states=text,
            return_dict=False,
        )[0]
        table = fast_forward.rotary_table(transformer, grid)
        actual = fast_forward.denoise(transformer, latents, times, text, None, table)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)
    assert expected.std() > 0.1


def test_one_weighted_slot_stands_for_all_the_padding(transformer):
    """Training sees 25 text slots where the pipeline pads to 512: the outputs must agree."""
    torch.manual_seed(1)
    tokenizer, encoder = components.build_tokenizer(), components.build_text_encoder()
    prompts = ["a small red circle moving left on a plain black background", "a shape"]
    latents = torch.randn(2, components.LATENT_CHANNELS, 2, 8, 8)
    times = torch.full((2, 2), 500.0)
    with torch.no_grad():
        batch = tokenizer(prompts, padding="max_length", max_length=512, return_tensors="pt")
        states = encoder(batch.input_ids, batch.attention_mask).last_hidden_state * batch.attention_mask[..., None]
        expected = transformer(
            hidden_states=latents,
            timestep=times.repeat_interleave(16, 1),
            encoder_hidden_states=states,
            return_dict=False,
        )[0]
        text, bias = encode_captions(tokenizer, encoder, prompts, [512, 512])
        table = fast_forward.rotary_table(transformer, (2, 4, 4))
        actual = fast_forward.denoise(transformer, latents, times, text, bias, table)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)
