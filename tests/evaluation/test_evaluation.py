from __future__ import annotations

import numpy as np
import pytest

from videospark.evaluation.diversity import entropy
from videospark.evaluation.motion import detect_motion
from videospark.evaluation.run import compare, evaluate
from videospark.evaluation.shapes import detect, match
from videospark.tiny.dataset import MovingShape, caption, held_out_captions, render, sample_scene


@pytest.mark.parametrize(("pixels", "noise"), [(128, 0), (128, 6), (192, 0)])
def test_rendered_scenes_are_read_back(pixels, noise):
    rng = np.random.default_rng(0)
    right = []
    for seed in range(16):
        scene = sample_scene(seed, held_out=True)
        frames = render(scene, num_frames=17, height=pixels, width=pixels).numpy()
        frames = (frames + rng.normal(0, noise, frames.shape)).clip(0, 255).astype(np.uint8)
        for values in match(detect(frames), caption(scene, seed, drop_probability=0)).values():
            right += values
    assert np.mean(right) >= 0.98


def test_wrong_caption_is_wrong():
    scene = sample_scene(0, held_out=True)
    found = detect(render(scene, num_frames=17, height=128, width=128).numpy())
    said = caption(scene, 0, drop_probability=0)
    said.scene["background"] = "white" if scene.background != "white" else "black"
    assert match(found, said)["background"] == [False]


def test_empty_clip_has_no_shapes():
    assert detect(np.full((5, 64, 64, 3), 240, np.uint8)).shapes == ()


def test_anticlockwise_and_static_are_no_motion():
    circle = MovingShape("small", "red", "circle", "circling", 0.08, 0.5, 0.5, 0.15).positions(17)
    assert detect_motion(circle)[0] == "circling"
    assert detect_motion(circle[::-1])[0] is None
    assert detect_motion(np.full((17, 2), 0.5))[0] is None


def test_entropy():
    assert entropy(["a", "b", None]) == pytest.approx(np.log(2))


def test_evaluate_reports_accuracy_and_collapse():
    scenes = {c.text: s for s, c in held_out_captions(8)}

    def make_clips(prompts, seeds):
        return [render(scenes[p], num_frames=9, height=64, width=64).numpy() for p in prompts]

    result = evaluate(make_clips, num_captions=8, diversity_captions=2, diversity_seeds=3)
    assert result.accuracy["background"].value == 1
    assert all(value == 0 for value in result.entropy_ratio.values())
    assert "Caption accuracy" in result.markdown()
    assert compare(result, result)["accuracy_over_teacher"]["background"] == 1
