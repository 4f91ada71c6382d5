"""The world of captioned clips: reproducible, inside the frame, and said truly."""

from collections import Counter

import numpy as np
import pytest
import torch

from videospark.tiny import dataset


def test_scene_and_caption_depend_on_the_seed_alone():
    assert dataset.sample_scene(5) == dataset.sample_scene(5)
    assert dataset.sample_scene(5) != dataset.sample_scene(6)
    scene = dataset.sample_scene(5)
    assert dataset.caption(scene, 1) == dataset.caption(scene, 1)


def test_training_and_held_out_combinations_are_disjoint():
    training = {dataset.sample_scene(seed).key() for seed in range(400)}
    held_out = {scene.key() for scene, _ in dataset.held_out_captions(200)}
    assert not training & held_out


def test_every_value_of_every_attribute_occurs():
    seen = Counter()
    for seed in range(400):
        scene = dataset.sample_scene(seed)
        seen.update((name, getattr(s, name)) for s in scene.shapes for name in dataset.SHAPE_ATTRIBUTES)
        seen.update((name, getattr(scene, name)) for name in dataset.SCENE_ATTRIBUTES)
    expected = {(name, value) for name, values in dataset.ATTRIBUTES.items() for value in values}
    assert set(seen) == expected


def test_shapes_stay_in_the_frame_and_apart():
    for seed in range(200):
        boxes = []
        for s in dataset.sample_scene(seed).shapes:
            left, right, up, down = (extent * s.radius for extent in dataset.EXTENTS[s.shape])
            p = s.positions(17)
            box = np.stack([p[:, 0] - left, p[:, 0] + right, p[:, 1] - up, p[:, 1] + down])
            assert box.min() >= 0 and box.max() <= 1
            boxes.append(box)
        if len(boxes) == 2:
            (l0, r0, u0, d0), (l1, r1, u1, d1) = boxes
            assert ((l0 > r1) | (l1 > r0) | (u0 > d1) | (u1 > d0)).all()


@pytest.mark.parametrize("shape", dataset.SHAPES)
def test_all_shapes_of_one_radius_have_one_area(shape):
    area = dataset.coverage(shape, 0.2, np.array([[0.5, 0.5]]), 128, 128).sum()
    assert float(area) == pytest.approx(np.pi * (0.2 * 128) ** 2, rel=0.01)


def test_motion_goes_where_its_name_says():
    def path(motion):
        return dataset.MovingShape("small", "red", "circle", motion, 0.08, 0.5, 0.5, 0.3).positions(17)

    ends = {motion: path(motion)[-1] - path(motion)[0] for motion in dataset.MOTIONS}
    assert ends["left"][0] == pytest.approx(-0.3) and ends["right"][0] == pytest.approx(0.3)
    assert ends["up"][1] == pytest.approx(-0.3) and ends["down"][1] == pytest.approx(0.3)
    for motion in ("bouncing", "circling"):
        assert np.abs(ends[motion]).max() < 1e-9
    assert path("bouncing")[8, 1] == pytest.approx(0.8)
    assert len(path("left")) == 17 and dataset.sample_scene(0).shapes[0].positions(1).shape == (1, 2)


def test_caption_says_what_is_kept_and_nothing_else():
    scene = dataset.sample_scene(2)
    full = dataset.caption(scene, 0, drop_probability=0.0)
    assert all(getattr(s, name) in full.text for s in scene.shapes for name in dataset.SHAPE_ATTRIBUTES)
    assert scene.background in full.text and scene.pattern in full.text
    empty = dataset.caption(scene, 0, drop_probability=1.0)
    assert empty.text == " and ".join(["a shape"] * len(scene.shapes))
    assert set(full.text.split()) <= set(dataset.vocabulary())


def test_render_shows_the_colours_where_the_shapes_are():
    for seed in range(20):
        scene = dataset.sample_scene(seed)
        clip = dataset.render(scene, num_frames=5, height=96, width=96)
        assert clip.shape == (5, 96, 96, 3) and clip.dtype == torch.uint8
        for s in scene.shapes:
            for frame, (x, y) in zip(clip, s.positions(5), strict=True):
                pixel = frame[int(y * 96), int(x * 96)].float() / 255
                assert (pixel - torch.tensor(dataset.COLORS[s.color])).abs().max() < 0.01


def test_patterns_differ_from_plain_along_the_right_axes():
    def background(pattern):
        return dataset.render(dataset.Scene((), "gray", pattern, (0.3, 0.3)), num_frames=1, height=96, width=96)[0]

    plain, striped, checkered = (background(p).float() for p in dataset.PATTERNS)
    assert plain.std() < 1e-6
    assert striped.std(1).mean() > 10 and striped.std(0).mean() < 1e-6
    assert checkered.std(1).mean() > 10 and checkered.std(0).mean() > 10


def test_unknown_shape_is_refused():
    with pytest.raises(ValueError, match="shape: got 'hexagon'"):
        dataset.signed_distance("hexagon", torch.zeros(1), torch.zeros(1), 1.0)
