"""The latents that the autoencoder's encoder is taught."""

import pytest
import torch

from videospark.tiny.dataset import SHAPES, moment, render, sample_scene
from videospark.tiny.latents import (
    FORM_CODES,
    FORM_SCALE,
    LATENT_CHANNELS,
    MOTION_SCALE,
    SLOW,
    brightness_change,
    form_video,
    latent_statistics,
    motion,
    normalise,
    scene_latents,
    space_time_means,
)


def _video(seed, size=128):
    clip = render(sample_scene(seed), num_frames=17, height=size, width=size)
    return clip.permute(3, 0, 1, 2)[None].float() / 127.5 - 1


def _latents(seed, size=128):
    scene = sample_scene(seed)
    return scene_latents(_video(seed, size), form_video(scene, num_frames=17, height=size, width=size))


def test_a_cell_is_the_mean_of_its_pixels_and_frames():
    video = _video(3)
    latents = _latents(3)
    assert latents.shape == (1, LATENT_CHANNELS, 5, 16, 16)
    assert torch.allclose(latents[0, :3, 0, 2, 5], video[0, :, 0, 16:24, 40:48].mean((1, 2)), atol=1e-6)
    assert torch.allclose(latents[0, :3, 2, 2, 5], video[0, :, 5:9, 16:24, 40:48].mean((1, 2, 3)), atol=1e-6)


def test_the_fourth_channel_tells_the_direction_of_time():
    video = torch.linspace(-1, 1, 17).view(1, 1, 17, 1, 1).expand(1, 3, 17, 16, 16)
    change = brightness_change(video)[:, 0]
    assert torch.all(change[:, 0] == 0) and torch.all(change[:, 1:] > 0)
    assert torch.allclose(brightness_change(video.flip(2))[:, 0, 1:], -change[:, 1:], atol=1e-6)


@pytest.mark.parametrize("frames", [1, 5, 17])
def test_a_still_clip_of_any_length_does_not_change(frames):
    image = torch.rand(1, 3, 1, 24, 40, generator=torch.Generator().manual_seed(0)).expand(-1, -1, frames, -1, -1)
    assert space_time_means(image).shape == (1, 3, 1 + (frames - 1) // 4, 3, 5)
    assert brightness_change(image).abs().max() < 1e-6


@pytest.mark.parametrize("seed", range(6))
def test_where_a_shape_is_the_latents_say_its_form_and_size(seed):
    scene = sample_scene(seed)
    latents = normalise(_latents(seed))[0, 4:]
    for shape in scene.shapes:
        column, row = (int(16 * v) for v in shape.positions(17)[0])
        here = latents[:, 0, row, column]
        size = torch.tensor([1.0 if shape.size == "large" else -1.0])
        code = torch.cat([FORM_CODES[SHAPES.index(shape.shape)], size])
        assert torch.allclose(here[:4], FORM_SCALE * code, atol=1e-3)
        assert torch.all(here[4:] == 0)  # a first frame does not move
    covered = latents.norm(dim=0) > 1e-3
    assert 0.02 < covered.float().mean() < 0.6  # and nothing where none is


@pytest.mark.parametrize("seed", range(12))
def test_where_a_shape_is_the_latents_say_where_it_goes(seed):
    scene = sample_scene(seed)
    latents = normalise(_latents(seed))[0, 8:]
    for shape in scene.shapes:
        places = shape.positions(17)
        for frame in range(1, 5):
            column, row = (int(16 * v) for v in places[4 * frame - 2])
            moved = torch.from_numpy(places[4 * frame] - places[4 * frame - 4]).float() / SLOW
            assert torch.allclose(latents[:, frame, row, column], MOTION_SCALE * moved, atol=0.02)


@pytest.mark.parametrize("frames", [1, 5, 9])
def test_motion_is_the_distance_of_four_frames(frames):
    steps = motion(sample_scene(3).shapes[0], frames)
    places = sample_scene(3).shapes[0].positions(frames)
    assert steps.shape == (frames, 2)
    assert torch.allclose(steps[1:].sum(0) / 4 * SLOW, torch.from_numpy(places[-1] - places[0]).float(), atol=1e-6)


def test_normalised_colours_have_unit_scale_over_the_world():
    values = torch.cat([normalise(_latents(seed)) for seed in range(40)])[:, :3]
    assert abs(float(values.std()) - 1) < 0.15 and abs(float(values.mean())) < 0.3
    mean, scale = latent_statistics()
    assert mean[3] == 0 and scale[3] == pytest.approx(sum(scale[:3]) / 3, abs=1e-3)


@pytest.mark.parametrize("seed", [0, 1, 5, 9, 14])
def test_a_moment_is_the_clip_at_that_time(seed):
    scene = sample_scene(seed)
    clip = render(scene, num_frames=17, height=64, width=64)
    still = render(moment(scene, 0.5), num_frames=1, height=64, width=64)
    assert torch.equal(still[0], clip[8])
