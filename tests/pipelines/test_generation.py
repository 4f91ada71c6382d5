import dataclasses
import json

import imageio.v3 as iio
import numpy as np
import pytest
import torch
from PIL import Image

from videospark.core.config import ConfigError
from videospark.pipelines.acceleration import accelerate
from videospark.pipelines.generation import (
    GenerationCancelled,
    GenerationRequest,
    _denoise,
    _encode_text,
    decode,
    generate,
    resolve_request,
)  # fmt: skip
from videospark.pipelines.loading import as_image_to_video
from videospark.pipelines.recipe import resolve
from videospark.pipelines.sidecar import request_from_sidecar, write_result
from videospark.pipelines.stages import StageTimer
from videospark.pipelines.video_io import check_output, frames_to_uint8, read_image, save_video

FEW = {"name": "few", "sampler": {"sigmas": [0.95, 0.5], "guidance_scale": 1.0}}
REQUEST = GenerationRequest("a red circle", seed=0)


def test_sidecar_makes_the_same_frames(pipe, tmp_path):
    steps = []
    result = generate(pipe, GenerationRequest("a red circle"), on_step=lambda i, n, s: steps.append((i, n)))
    assert steps == [(0, 2), (1, 2)]
    assert result.frames.shape == (5, 64, 64, 3) and result.frames.dtype == np.uint8
    paths = write_result(result, tmp_path / "new" / "a.mp4")
    data = json.loads(paths["sidecar"].read_text())
    assert set(data["stages"]["seconds"]) == {"text", "denoise", "decode", "save"}
    assert len(data["stages"]["step_seconds"]) == 2
    assert data["versions"]["torch"] and data["seed"] == result.request.seed >= 0
    again = generate(pipe, request_from_sidecar(paths["sidecar"]))
    assert (again.frames == result.frames).all()
    other = generate(pipe, dataclasses.replace(result.request, seed=result.request.seed + 1))
    assert (other.frames != result.frames).any()
    assert Image.open(paths["sheet"]).size == (256, 128)
    assert not list(tmp_path.rglob("*partial*"))


def test_video_decodes_back(tmp_path):
    frames = np.zeros((9, 64, 96, 3), np.uint8)
    frames[..., 0] = np.arange(9)[:, None, None] * 25
    path = save_video(frames, tmp_path / "v.mp4", 8)
    back = iio.imread(path)
    assert back.shape == frames.shape
    assert np.abs(back[..., 0].mean((1, 2)) - frames[..., 0].mean((1, 2))).max() < 6
    assert iio.immeta(path)["fps"] == 8


def test_seeds(pipe):
    assert resolve_request(pipe, REQUEST).seed == 0
    drawn = {resolve_request(pipe, dataclasses.replace(REQUEST, seed=-1)).seed for _ in range(4)}
    assert len(drawn) > 1 and min(drawn) >= 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"prompt": " "}, "prompt"), ({"seed": -2}, "seed"), ({"seed": 1.5}, "seed"), ({"height": 65}, "height"),
     ({"num_frames": 6}, "num_frames"), ({"num_inference_steps": 0}, "num_inference_steps"), ({"fps": 0}, "fps"),
     ({"guidance_scale": -1.0}, "guidance_scale")],
)  # fmt: skip
def test_bad_requests_are_refused(pipe, changes, message):
    with pytest.raises(ConfigError, match=message):
        generate(pipe, dataclasses.replace(REQUEST, **changes))


def test_defaults_come_from_recipe_then_checkpoint_then_diffusers(pipe):
    resolved = resolve_request(pipe, REQUEST)
    assert (resolved.num_inference_steps, resolved.guidance_scale, resolved.height) == (2, 2.0, 64)
    pipe.videospark_defaults = {"height": 64, "width": 64, "num_frames": 5}
    assert resolve_request(pipe, REQUEST).num_inference_steps == 50
    accelerate(pipe, FEW)
    resolved = resolve_request(pipe, REQUEST)
    assert (resolved.num_inference_steps, resolved.guidance_scale) == (2, 1.0)
    with pytest.raises(ConfigError, match="num_inference_steps: got 50; must be 2, the steps of recipe 'few'"):
        generate(pipe, dataclasses.replace(REQUEST, num_inference_steps=50))
    with pytest.warns(UserWarning, match="guidance_scale: 5.0"):
        resolve_request(pipe, dataclasses.replace(REQUEST, guidance_scale=5.0))


def test_stochastic_student_repeats_with_its_seed(pipe):
    accelerate(pipe, {"name": "s", "sampler": {"sigmas": [0.95, 0.5], "stochastic": True, "guidance_scale": 1.0}})
    assert (generate(pipe, REQUEST).frames == generate(pipe, REQUEST).frames).all()


def test_nan_names_step_and_recipe(pipe):
    accelerate(pipe, FEW)
    pipe.transformer.proj_out.weight.data.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="step 1 of 2 with recipe 'few'"):
        generate(pipe, REQUEST)
    with pytest.raises(FloatingPointError):
        frames_to_uint8(np.array([np.inf, 0.0]))


def test_failed_encoding_leaves_no_file(tmp_path):
    with pytest.raises(ConfigError, match="even height"):
        save_video(np.zeros((2, 15, 16, 3), np.uint8), tmp_path / "v.mp4", 8)
    assert list(tmp_path.iterdir()) == []


def test_unknown_words_are_named(pipe):
    with pytest.warns(UserWarning, match="zeppelin, tuba"):
        result = generate(pipe, dataclasses.replace(REQUEST, prompt="a red zeppelin tuba circle"))
    assert result.unknown_words == ("zeppelin", "tuba")


def test_output_is_checked_first(tmp_path):
    (tmp_path / "d.mp4").mkdir()
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "v.gif", tmp_path / "d.mp4", tmp_path / "file" / "v.mp4"):
        with pytest.raises(ConfigError, match="output"):
            check_output(bad)
    assert check_output(tmp_path / "a" / "b" / "v.mp4").parent.is_dir()


def test_images(tmp_path):
    Image.new("RGBA", (4, 2), (200, 100, 50, 0)).save(tmp_path / "alpha.png")
    Image.new("L", (4, 2), 77).save(tmp_path / "grey.png")
    Image.fromarray(np.full((2, 4), 257 * 60, np.uint16)).save(tmp_path / "deep.png")
    Image.new("RGB", (4, 2), (255, 0, 0)).quantize(2).save(tmp_path / "palette.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (4, 2), (9, 9, 9)).save(tmp_path / "turned.png", exif=exif)
    colours = {"alpha": (0, 0, 0), "grey": (77,) * 3, "deep": (60,) * 3, "palette": (255, 0, 0), "turned": (9,) * 3}
    for name, colour in colours.items():
        image = read_image(tmp_path / f"{name}.png")
        assert image.mode == "RGB" and image.getpixel((0, 0)) == colour, name
        assert image.size == ((2, 4) if name == "turned" else (4, 2))
    (tmp_path / "no.png").write_text("no picture")
    with pytest.raises(ConfigError, match="readable picture"):
        read_image(tmp_path / "no.png")


def test_image_to_video_keeps_the_first_latent_frame(pipe):
    image = Image.fromarray(np.tile(np.arange(64, dtype=np.uint8)[:, None, None] * 3, (1, 64, 3)))
    sibling = as_image_to_video(pipe)
    request = resolve_request(sibling, REQUEST)
    with torch.no_grad():
        latents = _denoise(sibling, request, image, _encode_text(sibling, request), StageTimer(), None)
        pixels = torch.from_numpy(np.asarray(image) / 127.5 - 1).float().permute(2, 0, 1)[None, :, None]
        expected = pipe.vae.encode(pixels).latent_dist.mode()
    torch.testing.assert_close(latents[:, :, :1], expected, rtol=1e-3, atol=1e-3)
    with_image = generate(pipe, dataclasses.replace(REQUEST, image=image)).frames
    assert (with_image != generate(pipe, REQUEST).frames).any()


@pytest.mark.parametrize("recipe", [None, FEW], ids=["unipc", "few-step"])
def test_a_preview_sees_each_clean_prediction_and_changes_nothing(pipe, recipe):
    if recipe is not None:
        accelerate(pipe, recipe)
    plain = generate(pipe, REQUEST)
    seen, order = [], []

    def look(index, latents):
        seen.append(latents.clone())
        order.append(("look", index))

    watched = generate(pipe, REQUEST, on_step=lambda i, n, s: order.append(("step", i)), on_clean_latents=look)
    assert (watched.frames == plain.frames).all()
    assert order == [("look", 0), ("step", 0), ("look", 1), ("step", 1)]
    assert "step" not in vars(pipe.scheduler)  # no listener is left behind
    assert not torch.allclose(seen[0], seen[1])
    # The last step of a flow sampler goes to sigma 0: what it predicts as clean is the result.
    final = decode(pipe, seen[-1])
    assert np.abs(final.astype(int) - watched.frames.astype(int)).max() <= 1


def test_cancelling_ends_within_the_step_and_the_next_run_is_clean(pipe):
    calls = []
    hook = pipe.transformer.register_forward_hook(lambda *_: calls.append(1))
    try:
        fresh = generate(pipe, REQUEST).frames
        per_step = len(calls) // 2
        calls.clear()

        def stop(index, steps, seconds):
            raise GenerationCancelled

        with pytest.raises(GenerationCancelled):
            generate(pipe, REQUEST, on_step=stop, on_clean_latents=lambda i, latents: None)
        assert len(calls) == per_step
    finally:
        hook.remove()
    assert "step" not in vars(pipe.scheduler)
    assert (generate(pipe, REQUEST).frames == fresh).all()


def test_notes_and_further_entries_reach_the_sidecar(pipe, tmp_path):
    accelerate(pipe, FEW)
    with pytest.warns(UserWarning, match="guidance_scale: 5.0"):
        result = generate(pipe, dataclasses.replace(REQUEST, guidance_scale=5.0))
    (note,) = result.notes
    assert "guidance_scale: 5.0" in note and "'few'" in note
    with pytest.raises(ConfigError, match="extra.*seed"):
        write_result(result, tmp_path / "a.mp4", extra={"seed": 1})
    assert not (tmp_path / "a.json").exists()
    paths = write_result(result, tmp_path / "a.mp4", extra={"model": "mine"})
    data = json.loads(paths["sidecar"].read_text())
    assert data["model"] == "mine" and data["notes"] == [note]
    assert set(data["stages"]["peak_memory"]) == {"text", "denoise", "decode", "save"}
    assert generate(pipe, REQUEST).notes == ()


def test_a_first_frame_beside_the_sidecar_moves_with_it(pipe, tmp_path):
    old = tmp_path / "old"
    old.mkdir()
    Image.new("RGB", (64, 64), (200, 30, 30)).save(old / "first.png")
    result = generate(pipe, dataclasses.replace(REQUEST, image=str(old / "first.png")))
    sidecar = write_result(result, old / "a.mp4")["sidecar"]
    assert json.loads(sidecar.read_text())["request"]["image"] == "first.png"
    old.rename(tmp_path / "new")
    again = request_from_sidecar(tmp_path / "new" / "a.json")
    assert again.image == str(tmp_path / "new" / "first.png")
    assert (generate(pipe, again).frames == result.frames).all()


def test_a_request_is_resolved_for_a_recipe_that_is_not_applied_yet(pipe):
    few = resolve(FEW)
    ahead = resolve_request(pipe, REQUEST, few)
    with pytest.raises(ConfigError, match="must be 2, the steps of recipe 'few'"):
        resolve_request(pipe, dataclasses.replace(REQUEST, num_inference_steps=3), few)
    accelerate(pipe, FEW)
    assert resolve_request(pipe, REQUEST) == ahead
