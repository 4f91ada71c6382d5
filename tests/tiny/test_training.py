"""Training stages: they learn, they resume to the same weights, they refuse what they cannot do."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from videospark.tiny import train_teacher
from videospark.tiny.components import LATENT_CHANNELS, build_transformer
from videospark.tiny.dataset import sample_scene
from videospark.tiny.train import train
from videospark.tiny.train_teacher import GridStage, train_grid
from videospark.tiny.train_vae import train_vae


@pytest.fixture(scope="module")
def latents():
    return torch.randn(32, LATENT_CHANNELS, 2, 8, 8, generator=torch.Generator().manual_seed(0)).bfloat16()


def _stage(num_steps):
    return GridStage("teacher", 128, 32, num_steps, 2, 2e-3, 1.5e-3, 3.0, decay_share=1.0)


def test_an_interrupted_run_equals_an_uninterrupted_one(tmp_path, latents, monkeypatch):
    whole, _ = train_grid(tmp_path / "whole", _stage(6), latents, compile_blocks=False)

    from videospark.tiny import training_state

    save, step = training_state.StageFolder.save, training_state.Optimizers.step

    def stop_after_three(self, index, clip):
        if index == 3:
            raise KeyboardInterrupt
        return step(self, index, clip)

    # A checkpoint after every step, then a break in the fourth.
    def save_now(folder, done, *args):
        save(folder, done, *args)

    original = training_state.AveragedWeights.update
    state = {}

    def update_and_save(self, module, index):
        original(self, module, index)
        tensors = {f"model.{k}": p.detach() for k, p in module.named_parameters()}
        tensors |= {f"ema.{k}": v for k, v in self.values.items()}
        save_now(state["folder"], index + 1, tensors, state["optimizers"].state_dict())

    def remember_optimizers(self, *args, **kwargs):
        initialise(self, *args, **kwargs)
        state["optimizers"] = self

    def remember_folder(self, *args):
        make_folder(self, *args)
        state["folder"] = self

    initialise, make_folder = training_state.Optimizers.__init__, training_state.StageFolder.__init__
    monkeypatch.setattr(training_state.Optimizers, "__init__", remember_optimizers)
    monkeypatch.setattr(training_state.StageFolder, "__init__", remember_folder)
    monkeypatch.setattr(training_state.AveragedWeights, "update", update_and_save)
    monkeypatch.setattr(training_state.Optimizers, "step", stop_after_three)
    with pytest.raises(KeyboardInterrupt):
        train_grid(tmp_path / "broken", _stage(6), latents, compile_blocks=False)
    monkeypatch.undo()

    resumed, _ = train_grid(tmp_path / "broken", _stage(6), latents, compile_blocks=False)
    for (name, a), (_, b) in zip(whole.named_parameters(), resumed.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_small_clips_alternate_with_the_stage_s_own(tmp_path, latents, monkeypatch):
    seen = []
    whole = train_teacher._loss
    monkeypatch.setattr(
        train_teacher, "_loss", lambda clips, step, *rest: (seen.append(clips.stage.size), whole(clips, step, *rest))[1]
    )
    stage = replace(_stage(8), two_shapes_share=0.5, small_until=0.5)
    small = GridStage("motion", 64, 32, 1, 4, 2e-3, 1.5e-3, 3.0)
    train_grid(tmp_path, stage, latents, small=(small, latents[..., ::2, ::2].contiguous()), compile_blocks=False)
    assert seen == [64, 128, 64, 128, 128, 128, 128, 128]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_share_of_clips_with_two_shapes(latents, share):
    clips = train_teacher._Clips(replace(_stage(1), two_shapes_share=share), latents, build_transformer())
    drawn = clips.draw(np.random.default_rng(0))
    assert {len(sample_scene(int(seed)).shapes) for seed in drawn} == {1 + int(share)}


def test_the_loss_falls(tmp_path, latents):
    train_grid(tmp_path, _stage(40), latents, compile_blocks=False)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "teacher" / "log.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]


def test_autoencoder_training_improves_and_sets_its_statistics(tmp_path):
    vae = train_vae(tmp_path, encoder_steps=4, decoder_steps=20, side=64, compile_kernels=False)
    assert all(s > 0 and s != 1.0 for s in vae.config.latents_std)
    assert (tmp_path / "decoder" / "checkpoint.safetensors").is_file()


def test_autoencoder_training_resumes_to_the_same_weights(tmp_path):
    steps = {"encoder_steps": 2, "decoder_steps": 2}
    whole = train_vae(tmp_path, **steps, side=64, compile_kernels=False)
    again = train_vae(tmp_path, **steps, side=64, compile_kernels=False)  # finished: only read
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


def test_stages_name_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match="stage: got 'student'"):
        train(tmp_path, "student")
    with pytest.raises(FileNotFoundError, match="vae stage has not been run"):
        train(tmp_path, "teacher", quick=True)


@pytest.mark.slow
def test_the_rehearsal_ends_in_a_pipeline_that_loads(tmp_path):
    from diffusers import WanPipeline

    folder = train(tmp_path, "all", quick=True, compile_kernels=False)
    pipe = WanPipeline.from_pretrained(folder)
    assert pipe.config.expand_timesteps and pipe.transformer.config.in_channels == LATENT_CHANNELS
    pictures = (
        "decoder/psnr.png",
        "encoder/forms.png",
        "vae/reconstruction.png",
        "stills/samples.png",
        "motion/samples.png",
        "grid/loss.png",
    )
    for picture in pictures:
        assert (tmp_path / picture).stat().st_size > 1000
