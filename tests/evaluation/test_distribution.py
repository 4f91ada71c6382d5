"""Distances of distributions: their closed forms, what they see and do not see, and their intervals."""

import json

import numpy as np
import pytest
import torch

from videospark.evaluation import distribution as d
from videospark.evaluation.run import compare, evaluate
from videospark.tiny.dataset import held_out_captions, render, sample_scene


def normal(count, dim, *, mean=0.0, std=1.0, seed=0):
    return mean + std * np.random.default_rng(seed).standard_normal((count, dim))


def test_the_frechet_distance_of_normal_samples_is_the_closed_form():
    a, b = normal(4000, 3, mean=0.5, std=2.0), normal(4000, 3, seed=1)
    # |m - m'|^2 + D (s - t)^2 = 3 * 0.25 + 3 * 1
    assert d.frechet_distance(a, b) == pytest.approx(3.75, rel=0.1)
    assert d.frechet_distance(b, b) == pytest.approx(0, abs=1e-8)
    correlated = b @ np.array([[1, 0.9, 0], [0, 0.5, 0], [0, 0, 1.0]])
    own = d.frechet_distance(correlated, correlated[::-1])
    assert d.frechet_distance(b, correlated) > 0.1 and own == pytest.approx(0, abs=1e-8)


def test_the_frechet_distance_agrees_with_a_matrix_root_written_out():
    a, b = normal(50, 4, std=1.5), normal(60, 4, seed=3)
    scale = b.std(axis=0)
    x, y = torch.from_numpy(a / scale), torch.from_numpy(b / scale)
    covs = [torch.cov(t.T, correction=0) for t in (x, y)]
    values = torch.linalg.eigvals(covs[0] @ covs[1]).real.clamp(min=0)
    expected = (x.mean(0) - y.mean(0)).square().sum() + covs[0].trace() + covs[1].trace() - 2 * values.sqrt().sum()
    assert d.frechet_distance(a, b) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("counts", [(3000, 3000), (3000, 1700)])
def test_the_sliced_wasserstein_distance_of_normal_samples(counts):
    a, b = normal(counts[0], 5, std=2.0), normal(counts[1], 5, seed=1)
    assert d.sliced_wasserstein(a, b) == pytest.approx(1.0, abs=0.08)
    assert d.sliced_wasserstein(a + 3, a) == pytest.approx(3, rel=0.35)  # |mean of unit directions| varies
    assert d.sliced_wasserstein(a, a[::-1]) == pytest.approx(0, abs=1e-12)


def test_mmd_has_no_bias_and_sees_a_difference():
    same = [d.squared_mmd(normal(30, 4, seed=2 * s), normal(30, 4, seed=2 * s + 1)) for s in range(40)]
    assert abs(np.mean(same)) < 3 * np.std(same) / np.sqrt(40) and min(same) < 0
    assert d.squared_mmd(normal(30, 4, mean=1.0), normal(30, 4, seed=1)) > 10 * np.std(same)
    a, b = normal(6, 2), normal(5, 2, seed=1)
    kernel = [[np.exp(-np.square(x - y).sum() / 2) for y in rows] for rows in (a, b) for x in a]
    first = sum(kernel[i][j] for i in range(6) for j in range(6) if i != j) / 30
    second = sum(np.exp(-np.square(b[i] - b[j]).sum() / 2) for i in range(5) for j in range(5) if i != j) / 20
    assert d.squared_mmd(a, b, 1.0) == pytest.approx(first + second - 2 * np.mean(kernel[6:]))


def test_the_vendi_score_counts_directions():
    assert d.vendi_score(np.eye(5)) == pytest.approx(5)
    assert d.vendi_score(np.ones((5, 3))) == pytest.approx(1)
    assert d.vendi_score(np.repeat(np.eye(2), 3, axis=0)) == pytest.approx(2)
    assert d.mean_pairwise_distance(np.array([[0.0, 0.0], [3.0, 3.0], [0.0, 0.0]])) == pytest.approx(2)
    assert d.mean_pairwise_distance(np.ones((1, 4))) == 0


def test_the_interval_covers_the_truth_and_is_around_the_value():
    hits = 0
    for seed in range(40):
        values = normal(40, 1, mean=2.0, seed=seed)[:, 0]
        found = d.bootstrap(lambda i, v=values: float(v[i].mean()), 40)
        assert found.low < found.value < found.high and found.count == 40
        hits += found.low < 2.0 < found.high
    assert 33 <= hits <= 40
    assert d.bootstrap(lambda i: 1.0, 1) == d.Measure(1.0, None, None, 1)
    with pytest.raises(ValueError, match="count: got 0"):
        d.bootstrap(lambda i: 1.0, 0)


def test_the_feature_of_a_clip_is_what_its_names_say():
    rng = np.random.default_rng(0)
    clip = rng.integers(0, 256, (5, 12, 10, 3), dtype=np.uint8)
    named = dict(zip(d.FEATURE_NAMES, d.clip_features(clip), strict=True))
    values = clip / 255
    assert named["mean_g"] == pytest.approx(values[..., 1].mean(), abs=1e-6)
    assert named["std_space_r"] == pytest.approx(values[..., 0].std(axis=(1, 2)).mean(), abs=1e-6)
    assert named["std_time_b"] == pytest.approx(values[..., 2].std(axis=0).mean(), abs=1e-6)
    light = values.mean(axis=3)
    assert named["change_x"] == pytest.approx(np.abs(np.diff(light, axis=2)).mean(), abs=1e-6)
    assert named["change_t"] == pytest.approx(np.abs(np.diff(light, axis=0)).mean(), abs=1e-6)
    side = np.zeros((3, 16, 16, 3), np.uint8)
    side[0, :, :8] = side[2, :, 8:] = 255  # light goes from left to right
    named = dict(zip(d.FEATURE_NAMES, d.clip_features(side), strict=True))
    assert named["first_x"] > 0.2 and named["move_x"] < -0.4 and abs(named["move_y"]) < 1e-6
    with pytest.raises(ValueError, match="clip: got float64"):
        d.clip_features(values)


def test_motion_is_that_of_regions_and_not_of_pixels():
    still = np.full((6, 32, 32, 3), 100, np.uint8)
    assert d.motion_magnitude(still) == 0
    slow, fast = (np.stack([np.roll(np.pad(np.full((8, 8, 3), 255, np.uint8), ((4, 20), (4, 20), (0, 0))), step * i, 1)
                            for i in range(6)]) for step in (1, 3))  # fmt: skip
    assert d.motion_magnitude(fast) > 2 * d.motion_magnitude(slow) > 0
    noise = (128 + np.random.default_rng(0).integers(-8, 9, (6, 32, 32, 3))).astype(np.uint8)
    pixels = np.abs(np.diff(noise.astype(float) / 255, axis=0)).mean()
    assert d.motion_magnitude(noise) < pixels / 3


def states_of(prompts, spread):
    generator = torch.Generator().manual_seed(len(prompts))
    return torch.randn(len(prompts), 2, 3, generator=generator) * spread


def makers(spread):
    """Clips of the world with random latents beside them."""
    states = d.SampleStates(0.9)

    def make_clips(prompts, seeds):
        states.final.append(states_of(prompts, spread))
        states.on_the_way.append(states_of(prompts, 1.0))
        return [render(sample_scene(s), num_frames=5, height=64, width=64).numpy() for s in seeds]

    return make_clips, states


def test_the_evaluation_reports_distances_to_the_teacher():
    results = []
    for spread in (1.0, 2.0):
        make_clips, states = makers(spread)
        results.append(evaluate(make_clips, num_captions=6, diversity_captions=2, diversity_seeds=3, states=states))
    ours, teacher = results[1], results[0]
    assert ours.samples.varied_space == "latents" and len(ours.samples.varied) == 2
    found = compare(ours, teacher)["distribution_to_teacher"]
    assert found["motion_over_teacher"]["value"] == pytest.approx(1)
    assert found["frechet"]["value"] == pytest.approx(0, abs=1e-6)
    assert found["pairwise_distance_over_teacher"]["value"] == pytest.approx(2)
    assert found["vendi_over_teacher"]["value"] == pytest.approx(1)
    assert found["sliced_wasserstein"]["value"] > 0.3
    assert found["end_distance"]["value"] == pytest.approx(1, abs=0.2)
    assert found["crossover_distance"]["value"] == pytest.approx(0, abs=1e-9)
    assert all(m["low"] <= m["value"] <= m["high"] for m in found.values())
    report = ours.to_dict()["distribution"]
    assert set(report) == {"motion", "vendi", "pairwise_distance"}
    assert "NaN" not in json.dumps([report, found]) and "Distribution" in ours.markdown()


def test_without_latents_diversity_is_that_of_the_features():
    scenes = {c.text: s for s, c in held_out_captions(4)}

    def make_clips(prompts, seeds):  # the same clip for every seed
        return [render(scenes[p], num_frames=5, height=64, width=64).numpy() for p in prompts]

    result = evaluate(make_clips, num_captions=4, diversity_captions=2, diversity_seeds=3)
    assert result.samples.varied_space == "features"
    assert result.samples.describe()["vendi"].value == pytest.approx(1)
    found = compare(result, result)["distribution_to_teacher"]
    assert "sliced_wasserstein" not in found and found["frechet"]["value"] == pytest.approx(0, abs=1e-9)


def test_latents_of_other_clips_are_refused():
    states = d.SampleStates(final=[torch.zeros(3, 2)])
    with pytest.raises(ValueError, match="states.final: got 3 latents; must be 2"):
        d.ClipSamples.collect([np.zeros(2)] * 2, [0.0] * 2, num_captions=2, seeds=1, states=states)
    one = d.ClipSamples(np.zeros((2, 3)), np.ones(2))
    with pytest.raises(ValueError, match="teacher: got 3 captions"):
        d.compare_samples(one, d.ClipSamples(np.zeros((3, 3)), np.ones(3)))


def test_a_picture_model_is_a_feature_too(tmp_path):
    from transformers import Dinov2Config, Dinov2Model, ViTImageProcessor

    torch.manual_seed(0)
    config = Dinov2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
    Dinov2Model(config).save_pretrained(tmp_path)
    ViTImageProcessor(size={"height": 28, "width": 28}).save_pretrained(tmp_path)
    feature = d.ImageModelFeature(str(tmp_path), num_frames=3)
    clips = [np.random.default_rng(s).integers(0, 256, (5, 40, 40, 3), dtype=np.uint8) for s in (0, 1)]
    found = [feature(clip) for clip in clips]
    assert found[0].shape == (16,) and np.isfinite(found[0]).all() and not np.allclose(found[0], found[1])
    assert np.array_equal(feature(clips[0]), found[0])


def test_the_state_at_a_level_is_taken_on_the_way():
    from types import SimpleNamespace

    from videospark.app.clip_maker import Crossing

    def walk(sigmas, level):
        crossing, pipe = Crossing(level), SimpleNamespace(scheduler=SimpleNamespace(sigmas=torch.tensor(sigmas)))
        for index in range(len(sigmas) - 1):
            assert crossing(pipe, index, None, {"latents": torch.full((2,), 10 * sigmas[index + 1])}) == {}
        return crossing.state

    assert torch.allclose(walk([1.0, 0.8, 0.4, 0.0], 0.8), torch.tensor([8.0, 8.0]))
    assert torch.allclose(walk([1.0, 0.8, 0.4, 0.0], 0.5), torch.tensor([5.0, 5.0]))
    assert walk([1.0, 0.4, 0.0], 0.5) is None
