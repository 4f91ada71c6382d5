"""The averages that the autoencoder's encoder is taught."""

import pytest
import torch

from videospark.tiny.dataset import render, sample_scene
from videospark.tiny.latents import LATENT_CHANNELS, latent_statistics, normalise, space_time_averages


def _video(seed, size=128):
    clip = render(sample_scene(seed), num_frames=17, height=size, width=size)
    return clip.permute(3, 0, 1, 2)[None].float() / 127.5 - 1


def test_a_cell_is_the_mean_of_its_pixels_and_frames():
    video = _video(3)
    latents = space_time_averages(video)
    assert latents.shape == (1, LATENT_CHANNELS, 5, 16, 16)
    assert torch.allclose(latents[0, :3, 0, 2, 5], video[0, :, 0, 16:24, 40:48].mean((1, 2)), atol=1e-6)
    assert torch.allclose(latents[0, :3, 2, 2, 5], video[0, :, 5:9, 16:24, 40:48].mean((1, 2, 3)), atol=1e-6)


def test_the_last_channel_tells_the_direction_of_time():
    video = torch.linspace(-1, 1, 17).view(1, 1, 17, 1, 1).expand(1, 3, 17, 16, 16)
    change = space_time_averages(video)[:, 3]
    assert torch.all(change[:, 0] == 0) and torch.all(change[:, 1:] > 0)
    assert torch.allclose(space_time_averages(video.flip(2))[:, 3, 1:], -change[:, 1:], atol=1e-6)


@pytest.mark.parametrize("frames", [1, 5, 17])
def test_a_still_clip_of_any_length_does_not_change(frames):
    image = torch.rand(1, 3, 1, 24, 40, generator=torch.Generator().manual_seed(0)).expand(-1, -1, frames, -1, -1)
    latents = space_time_averages(image)
    assert latents.shape == (1, 4, 1 + (frames - 1) // 4, 3, 5)
    assert latents[:, 3].abs().max() < 1e-6


def test_normalised_colours_have_unit_scale_over_the_world():
    values = torch.cat([normalise(space_time_averages(_video(seed))) for seed in range(40)])[:, :3]
    assert abs(float(values.std()) - 1) < 0.15 and abs(float(values.mean())) < 0.3
    mean, scale = latent_statistics()
    assert mean[3] == 0 and scale[3] == pytest.approx(sum(scale[:3]) / 3, abs=1e-3)
