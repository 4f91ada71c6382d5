"""Pictures while training, and students on the eight-bit grid."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import videospark
from videospark.core.config import ConfigError
from videospark.distill import run as runs
from videospark.distill.checkpoints import newest_checkpoint
from videospark.distill.flow import Condition, solve
from videospark.distill.run import run
from videospark.distill.samples import sample_latents, uniform_sigmas
from videospark.quantization.primitives import fake_quantize


def values(folder, name="student"):
    return load_file(newest_checkpoint(folder / "checkpoints") / f"{name}.safetensors")


def test_pictures_change_no_number_and_are_of_the_averaged_student(world, build, fresh, tmp_path, monkeypatch):
    config = build(world, tmp_path / "plain", "pcm", {"num_steps": 3})
    run(config, device="cpu")
    fresh()
    settings = dataclasses.replace(config.samples, every=2, count=3, frames=2)
    drawn = []
    field_of = runs.Trainer._sampling_field

    def watched(self):
        drawn.append((self.step, self.roles.average is not None))
        return field_of(self)

    monkeypatch.setattr(runs.Trainer, "_sampling_field", watched)
    with_pictures = dataclasses.replace(config, output=str(tmp_path / "drawn"), samples=settings)
    run(with_pictures, device="cpu")
    assert drawn == [(2, True), (3, True)]
    names = sorted(p.name for p in (tmp_path / "drawn" / "samples").iterdir())
    assert names == ["step-00000002.png", "step-00000003.png"]
    pictures = [Image.open(tmp_path / "drawn" / "samples" / name) for name in names]
    assert all(p.size == (2 * 64, 3 * 64) for p in pictures)
    assert not np.array_equal(*(np.asarray(p) for p in pictures))
    left, right = values(tmp_path / "plain"), values(tmp_path / "drawn")
    assert all(torch.equal(left[key], right[key]) for key in left)
    assert config.fingerprint() == with_pictures.fingerprint()
    # The picture of the finished run is what the saved student makes of the same noise and captions.
    pipe = videospark.load(tmp_path / "drawn" / "student", device="cpu")
    from videospark.distill.data import PreparedData, padded_embeds
    from videospark.distill.denoiser import as_field
    from videospark.distill.samples import decode_latents

    data = PreparedData(world / "data")
    rows = [data.read(i) for i in range(3)]
    condition = Condition(padded_embeds([r[1] for r in rows], 32), padded_embeds([data.negative_embeds], 32))
    noise = torch.randn(3, *rows[0][0].shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        latents = sample_latents(as_field(runs.denoiser_of(pipe, {"transformer": pipe.transformer})), noise,
                                 (*config.model.sigmas, 0.0), condition)  # fmt: skip
    clips = decode_latents(pipe.vae, pipe.video_processor, latents)
    first = np.asarray(pictures[1])[:64, :64].astype(int)
    assert np.abs(first - clips[0][0].astype(int)).max() <= 2


def test_sampling_is_eulers_rule(toy):
    batch = toy.batch(3)
    sigmas, noise = (1.0, 0.7, 0.3, 0.0), batch.noise("start")
    seen = []
    ours = sample_latents(toy.GaussianField(), noise, sigmas, batch.condition, guidance_scale=3.0,
                          visit=lambda level, state: seen.append((level, state)))  # fmt: skip
    assert torch.equal(ours, solve(toy.GaussianField(), noise, sigmas, batch.condition, 3.0))
    assert [level for level, _ in seen] == [0.7, 0.3, 0.0] and torch.equal(seen[-1][1], ours)
    again = sample_latents(toy.GaussianField(), noise, (1.0, 0.5, 0.0), batch.condition, renoise=lambda i: noise)
    clean = noise - toy.GaussianField()(noise, torch.ones(3), batch.condition)
    state = 0.5 * clean + 0.5 * noise
    expected = state - 0.5 * toy.GaussianField()(state, torch.full((3,), 0.5), batch.condition)
    assert torch.allclose(again, expected)
    assert uniform_sigmas(4, 3.0) == pytest.approx((1.0, 0.9, 0.75, 0.5, 0.0))


@pytest.mark.parametrize("trainable", ["full", pytest.param("lora", marks=pytest.mark.slow)])
def test_a_student_trains_on_its_grid_and_is_saved_without(world, build, fresh, tmp_path, trainable, monkeypatch):
    if trainable == "lora":
        pytest.importorskip("peft")
    training = {"num_steps": 2, "trainable": trainable}
    config = build(world, tmp_path / "grid", "pcm", training, quantization={"mode": "int8"})
    layers = []
    put = runs.fake_quantize_

    def watched(expert, settings):
        made = put(expert, settings)
        layers.append((expert, made.layers))
        return made

    monkeypatch.setattr(runs, "fake_quantize_", watched)
    result = run(config, device="cpu")
    ((expert, names),) = layers  # the student alone; teacher and critic are never asked for
    assert len(names) == 20  # ten products in each of two blocks
    pipe = videospark.load(result.student, device="cpu")
    assert pipe.videospark_defaults["provides"] == ["few-step", "int8"]
    weight = pipe.transformer.blocks[0].ffn.net[2].weight
    assert not torch.equal(fake_quantize(weight, "int8", "row"), weight)
    assert "forward" not in expert.blocks[0].ffn.net[2].__dict__
    fresh()
    plain = build(world, tmp_path / "plain", "pcm", training)
    run(plain, device="cpu")
    losses = [json.loads((tmp_path / n / "log.jsonl").read_text().splitlines()[0])["loss/student"]
              for n in ("grid", "plain")]  # fmt: skip
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.3)
    assert config.fingerprint() != plain.fingerprint()


def test_settings_that_do_not_train_are_refused(world, build, tmp_path):
    with pytest.raises(ConfigError, match="quantization.fused"):
        build(world, tmp_path, "pcm", quantization={"mode": "int8", "fused": True})
    with pytest.raises(ConfigError, match="count: got 0"):
        build(world, tmp_path, "pcm", samples={"count": 0})
