"""The evaluation: what the detector reads back, what counts as right, and what collapse looks like."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan

from videospark.evaluation.diversity import entropy
from videospark.evaluation.matching import answers, match
from videospark.evaluation.motion import detect_motion
from videospark.evaluation.run import compare, evaluate, evaluate_image_to_video
from videospark.evaluation.shapes import MEASURES, detect
from videospark.tiny import checkpoint_path
from videospark.tiny.dataset import MovingShape, caption, held_out_captions, render, sample_scene


def read_back(seeds, pixels, noise=0.0, through=None):
    """Attribute -> right or wrong, over rendered scenes with all of their attributes captioned.

    `through` is a VAE that encodes and decodes the clip first.
    """
    rng = np.random.default_rng(0)
    right: dict[str, list[bool]] = {}
    for seed in seeds:
        scene = sample_scene(seed, held_out=True)
        frames = render(scene, num_frames=17, height=pixels, width=pixels).numpy()
        frames = (frames + rng.normal(0, noise, frames.shape)).clip(0, 255).astype(np.uint8)
        if through is not None:
            video = torch.from_numpy(frames).permute(3, 0, 1, 2)[None].float() / 127.5 - 1
            with torch.no_grad():
                decoded = through.decode(through.encode(video).latent_dist.mode()).sample[0]
            frames = ((decoded.clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 3, 0).numpy()
        for name, values in match(detect(frames), caption(scene, seed, drop_probability=0)).items():
            right.setdefault(name, []).extend(values)
    return right


@pytest.mark.parametrize(("pixels", "noise"), [(64, 0), (96, 0), (96, 6), (128, 0)])
def test_rendered_scenes_are_read_back(pixels, noise):
    right = read_back(range(24), pixels, noise)
    assert np.mean([v for values in right.values() for v in values]) >= 0.98


@pytest.mark.slow
@pytest.mark.parametrize("pixels", [96, 192])
def test_each_attribute_of_two_hundred_scenes_is_read_back(pixels):
    right = read_back(range(200), pixels)
    assert {name: np.mean(values) for name, values in right.items() if np.mean(values) < 0.99} == {}


@pytest.mark.slow
def test_each_attribute_of_a_hundred_scenes_is_read_back_through_the_vae():
    vae = AutoencoderKLWan.from_pretrained(checkpoint_path() / "vae", torch_dtype=torch.float32)
    right = read_back(range(100), 192, through=vae)
    print({name: round(float(np.mean(values)), 3) for name, values in right.items()})
    assert {name: np.mean(values) for name, values in right.items() if np.mean(values) < 0.97} == {}


def test_the_best_measures_are_those_of_the_renderer():
    scene = sample_scene(3, held_out=True)
    for shape in detect(render(scene, num_frames=17, height=96, width=96).numpy()).shapes:
        assert shape.shape_iou > 0.95 and shape.track_error < 0.01 and shape.area_unsteadiness < 0.03
        assert shape.color_unsteadiness < 0.01 and 0.9 < shape.sharpness < 1.1


def test_a_blurred_clip_is_less_sharp():
    scene = sample_scene(3, held_out=True)
    clip = render(scene, num_frames=9, height=96, width=96).float()
    blurred = sum(clip.roll((down, right), dims=(1, 2)) for down in range(-2, 3) for right in range(-2, 3)) / 25
    sharp, soft = (detect(c.byte().numpy()).shapes[0].sharpness for c in (clip, blurred))
    assert soft < 0.8 * sharp


def test_wrong_caption_is_wrong():
    scene = sample_scene(0, held_out=True)
    found = detect(render(scene, num_frames=17, height=96, width=96).numpy())
    said = caption(scene, 0, drop_probability=0)
    said.scene["background"] = "white" if scene.background != "white" else "black"
    assert match(found, said)["background"] == [False]


def test_a_missing_shape_is_wrong_and_counted():
    pair = next(s for s in (sample_scene(i, held_out=True) for i in range(99)) if len(s.shapes) == 2)
    said = caption(pair, 0, drop_probability=0)
    alone = type(pair)(pair.shapes[:1], pair.background, pair.pattern, pair.pattern_phase)
    found = match(detect(render(alone, num_frames=17, height=96, width=96).numpy()), said)
    assert found["count"] == [False] and sorted(found["color"]) == [False, True]


def test_empty_clip_has_no_shapes():
    assert detect(np.full((5, 64, 64, 3), 240, np.uint8)).shapes == ()


def test_noise_is_neither():
    noise = np.random.default_rng(0).integers(0, 255, (5, 64, 64, 3), dtype=np.uint8)
    assert detect(noise).background is None


@pytest.mark.parametrize("frames", [np.zeros((5, 64, 64, 3)), np.zeros((64, 64, 3), np.uint8)])
def test_wrong_frames_are_refused(frames):
    with pytest.raises(ValueError, match="frames: got"):
        detect(frames)


def test_anticlockwise_and_static_are_no_motion():
    circle = MovingShape("small", "red", "circle", "circling", 0.08, 0.5, 0.5, 0.15).positions(17)
    assert detect_motion(circle)[0] == "circling"
    assert detect_motion(circle[::-1])[0] is None
    assert detect_motion(np.full((17, 2), 0.5))[0] is None


def test_entropy_counts_neither_as_nothing():
    assert entropy(["a", "b"]) == pytest.approx(math.log(2))
    assert entropy(["a", "b", None, None]) == pytest.approx(math.log(2) / 2)
    assert entropy([None, None]) == 0 and entropy([]) == 0


def test_open_attributes_are_answered_without_being_right():
    scene = sample_scene(0, held_out=True)
    said = caption(scene, 0, drop_probability=1)
    found = answers(detect(render(scene, num_frames=17, height=96, width=96).numpy()), said)
    assert all(a.said is None and not a.right for a in found)
    assert {a.attribute: a.found for a in found}["background"] == scene.background


def test_evaluate_reports_accuracy_and_collapse():
    scenes = {c.text: s for s, c in held_out_captions(8)}

    def make_clips(prompts, seeds):
        return [render(scenes[p], num_frames=9, height=64, width=64).numpy() for p in prompts]

    result = evaluate(make_clips, num_captions=8, diversity_captions=2, diversity_seeds=3)
    assert result.accuracy["background"].value == 1 and result.mean_accuracy > 0.9
    assert result.entropy_ratio and all(value == 0 for value in result.entropy_ratio.values())
    assert set(result.continuous) == set(MEASURES)
    assert "Caption accuracy" in result.markdown()
    assert compare(result, result)["accuracy_over_teacher"] == 1
    assert compare(result, result)["entropy_over_teacher"] is None
    assert "NaN" not in json.dumps(result.to_dict())


def test_evaluate_gives_the_data_itself_full_diversity():
    def make_clips(prompts, seeds):
        # Scenes of the world whatever the caption says: as varied as the data, and mostly wrong.
        ours = [sample_scene(s) for s in seeds]
        return [render(s, num_frames=9, height=64, width=64).numpy() for s in ours]

    result = evaluate(make_clips, num_captions=12, diversity_captions=6, diversity_seeds=12)
    assert 0.85 < result.entropy_ratio["background"] < 1.15
    assert result.mean_accuracy < 0.6


def test_evaluate_image_to_video_scores_the_first_frame():
    scenes = {c.text: s for s, c in held_out_captions(6)}

    def make_clips(prompts, seeds, pictures):
        clips = [render(scenes[p], num_frames=9, height=64, width=64).numpy() for p in prompts]
        for clip, picture in zip(clips, pictures, strict=True):
            assert np.array_equal(clip[0], picture)
            clip[0] = clip[0] // 2  # 6 dB and more below
        return clips

    result = evaluate_image_to_video(make_clips, num_captions=6, size=(64, 64))
    assert 2 < result.first_frame_psnr_db["worst"] <= result.first_frame_psnr_db["mean"] < 20
    assert result.accuracy["motion"].value > 0.8


@pytest.mark.parametrize("wrong", [{"num_captions": 0}, {"diversity_captions": 9}, {"diversity_seeds": 0}])
def test_wrong_counts_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        evaluate(lambda p, s: [], **{"num_captions": 4, "diversity_captions": 2, "diversity_seeds": 2} | wrong)


def test_a_maker_that_loses_clips_is_refused():
    with pytest.raises(ValueError, match="make_clips"):
        evaluate(lambda p, s: [], num_captions=2, diversity_captions=0)
