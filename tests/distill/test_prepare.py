"""Preparing data: three kinds of source, resuming, bad clips, and the order in which a run reads."""

import csv
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from videospark.core.config import ConfigError
from videospark.distill import prepare as preparation
from videospark.distill.config import DataConfig
from videospark.distill.data import BatchReader, PreparedData, SampleOrder
from videospark.distill.prepare import TeacherSampling, prepare
from videospark.distill.sources import (
    ClipSize,
    SourceItem,
    clips_from_folder,
    clips_from_table,
    clips_from_tiny_world,
    prompts_from_file,
    read_clip,
)
from videospark.pipelines.video_io import save_video

SIZE = ClipSize(height=32, width=32, num_frames=5)


@pytest.fixture(scope="module")
def pipe():
    from videospark.tiny.components import build_pipeline

    torch.manual_seed(0)
    pipe = build_pipeline()
    torch.nn.init.normal_(pipe.transformer.proj_out.weight, std=0.05)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def make(pipe, items, folder, **options):
    settings = {"source": "test", "model": "random", "size": SIZE, "max_sequence_length": 32} | options
    return prepare(pipe, items, folder, **settings)


def clip(seed):
    return np.random.default_rng(seed).integers(0, 255, (5, 32, 32, 3), dtype=np.uint8)


def test_a_prepared_clip_is_what_the_pipeline_encodes(pipe, tmp_path):
    items = clips_from_tiny_world(3, SIZE)
    report = make(pipe, items, tmp_path, shard_size=2)
    assert (report.total, report.made, report.bad) == (3, 3, ())
    data = PreparedData(tmp_path)
    assert len(data) == 3 and len(list(tmp_path.glob("shard-*"))) == 2
    latents, embeds = data.read(2)
    video = torch.from_numpy(items[2].frames()).permute(3, 0, 1, 2)[None].float() / 127.5 - 1
    with torch.no_grad():
        expected = pipe.vae.encode(video).latent_dist.mode()[0]
        states, _ = pipe.encode_prompt(items[2].caption, do_classifier_free_guidance=False, max_sequence_length=32)
    mean, std = (torch.tensor(v).view(-1, 1, 1, 1) for v in (pipe.vae.config.latents_mean, pipe.vae.config.latents_std))
    assert torch.allclose(latents, (expected - mean) / std, atol=0.02, rtol=0.01)
    assert tuple(latents.shape) == data.settings.latent_shape
    assert torch.allclose(embeds, states[0, : embeds.shape[0]], atol=0.02, rtol=0.01)
    assert not states[0, embeds.shape[0] :].any() and data.items[2][2] == items[2].caption


def test_an_interrupted_preparation_goes_on(pipe, tmp_path, monkeypatch):
    items = [SourceItem(f"clip{i}", "a red circle", lambda i=i: clip(i)) for i in range(9)]
    encode, calls = preparation._encode, []

    def failing(encoder, group, size, sampling):
        if calls:
            raise KeyboardInterrupt
        calls.append(group)
        return encode(encoder, group, size, sampling)

    monkeypatch.setattr(preparation, "_encode", failing)
    with pytest.raises(KeyboardInterrupt):
        make(pipe, items, tmp_path / "a", shard_size=2)
    (tmp_path / "a" / ".0123.partial").write_bytes(b"half")
    monkeypatch.setattr(preparation, "_encode", encode)
    report = make(pipe, items, tmp_path / "a", shard_size=2)
    assert (report.total, report.made) == (9, 5)
    make(pipe, items, tmp_path / "b", shard_size=9)
    left, right = PreparedData(tmp_path / "a"), PreparedData(tmp_path / "b")
    assert [i[1] for i in left.items] == [i[1] for i in right.items]
    assert all(torch.equal(left.read(i)[0], right.read(i)[0]) for i in range(9))
    assert make(pipe, items, tmp_path / "a").made == 0


def test_bad_clips_are_listed_and_tried_again(pipe, tmp_path):
    folder, data = tmp_path / "clips", tmp_path / "data"
    folder.mkdir()
    for name, frames in (("good", 5), ("short", 2), ("late", 5)):
        if name != "late":
            save_video(np.repeat(clip(0)[:1], frames, axis=0), folder / f"{name}.mp4", 8)
        (folder / f"{name}.txt").write_text(f"a {name} one\n")
    (folder / "broken.mp4").write_bytes(b"no video at all")
    report = make(pipe, clips_from_folder(folder, SIZE), data)
    assert report.total == 1 and {i for i, _ in report.bad} == {"short.mp4", "broken.mp4"}
    reasons = {r["id"]: r["reason"] for r in map(json.loads, (data / "bad.jsonl").read_text().splitlines())}
    assert "2 frames; needs 5" in reasons["short.mp4"]
    for name in ("short", "broken", "late"):
        save_video(clip(1), folder / f"{name}.mp4", 8)
    report = make(pipe, clips_from_folder(folder, SIZE), data)
    assert (report.total, report.made, report.bad) == (4, 3, ()) and not (data / "bad.jsonl").exists()
    captions = {identity: text for _, identity, text in PreparedData(data).items}
    assert captions["late.mp4"] == "a late one" and captions["broken.mp4"] == ""


def test_tables_and_captions_files(tmp_path):
    save_video(clip(0), tmp_path / "x.mp4", 8)
    with (tmp_path / "t.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([["path", "caption"], ["x.mp4", "one, two"]])
    (tmp_path / "t.jsonl").write_text('{"path": "x.mp4", "caption": "one, two"}\n\n')
    (tmp_path / "captions.json").write_text('{"x.mp4": "one, two"}')
    for items in (
        clips_from_table(tmp_path / "t.csv", SIZE),
        clips_from_table(tmp_path / "t.jsonl", SIZE),
        clips_from_folder(tmp_path, SIZE),
    ):
        assert [(i.id, i.caption) for i in items] == [("x.mp4", "one, two")]
        assert items[0].frames().shape == (5, 32, 32, 3)
    (tmp_path / "bad.jsonl").write_text('{"path": "x.mp4"}\n')
    with pytest.raises(ConfigError, match=r"bad.jsonl row 1.caption"):
        clips_from_table(tmp_path / "bad.jsonl", SIZE)
    with pytest.raises(ConfigError, match="must be a .csv or .jsonl file"):
        clips_from_table(tmp_path / "x.mp4", SIZE)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="clips"):
        clips_from_folder(tmp_path / "empty", SIZE)


def test_frames_are_taken_at_the_wanted_rate_and_fitted(tmp_path):
    frames = np.zeros((24, 32, 64, 3), dtype=np.uint8)
    frames += (np.arange(24) * 10).astype(np.uint8)[:, None, None, None]
    save_video(frames, tmp_path / "x.mp4", 24)
    got = read_clip(tmp_path / "x.mp4", ClipSize(16, 16, 5, fps=6))
    assert got.shape == (5, 16, 16, 3)
    assert np.abs(got.mean((1, 2, 3)) - np.array([0, 40, 80, 120, 160])).max() < 6
    with pytest.raises(ValueError, match="needs 7 at 6 fps"):
        read_clip(tmp_path / "x.mp4", ClipSize(16, 16, 7, fps=6))


def test_the_teacher_makes_clips_from_prompts(pipe, tmp_path):
    (tmp_path / "p.txt").write_text("a red circle\n\na blue square\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a red circle"}\n{"prompt": "a blue square"}\n')
    items = prompts_from_file(tmp_path / "p.txt", SIZE)
    assert [i.caption for i in items] == [i.caption for i in prompts_from_file(tmp_path / "p.jsonl", SIZE)]
    sampling = TeacherSampling(2, 3.0, seed=4)
    make(pipe, items, tmp_path / "d", sampling=sampling)
    latents = PreparedData(tmp_path / "d").read(1)[0]
    expected = pipe(
        "a blue square", height=32, width=32, num_frames=5, num_inference_steps=2, guidance_scale=3.0,
        max_sequence_length=32, output_type="latent", generator=torch.Generator().manual_seed(4 * 10**8 + 1),
    ).frames[0]  # fmt: skip
    assert torch.allclose(latents, expected, atol=0.02, rtol=0.01)


def test_wrong_inputs_are_refused(pipe, tmp_path):
    items = [SourceItem("a", "x", lambda: clip(0))]
    make(pipe, items, tmp_path / "d")
    with pytest.raises(ConfigError, match="num_frames: got 9"):
        make(pipe, items, tmp_path / "d", size=ClipSize(32, 32, 9))
    with pytest.raises(ConfigError, match="id: got"):
        make(pipe, items * 2, tmp_path / "e")
    with pytest.raises(ConfigError, match="height"):
        make(pipe, items, tmp_path / "e", size=ClipSize(33, 32, 5))
    with pytest.raises(ConfigError, match="data.path"):
        PreparedData(tmp_path / "nowhere")
    shard = next((tmp_path / "d").glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:40])
    with pytest.raises(ConfigError, match="damaged shard"):
        PreparedData(tmp_path / "d")


def test_every_epoch_is_a_permutation_of_its_own():
    order = SampleOrder(7, seed=3)
    epochs = [[order[7 * e + i] for i in range(7)] for e in range(4)]
    assert all(sorted(e) == list(range(7)) for e in epochs)
    assert len({tuple(e) for e in epochs}) > 1
    again = SampleOrder(7, seed=3)
    assert [again[i] for i in range(14, 21)] == epochs[2] and [order[i] for i in range(7)] == epochs[0]


def test_splitting_a_batch_visits_the_same_samples_with_the_same_draws(pipe, tmp_path):
    make(pipe, clips_from_tiny_world(6, SIZE), tmp_path, shard_size=2)
    settings = DataConfig(str(tmp_path), image_share=0.5, prompt_dropout=0.5)

    def read(size, micro, rank=0, world=1):
        reader = BatchReader(
            PreparedData(tmp_path), settings, seed=1, batch_size=size, micro_batches=micro, max_sequence_length=32,
            drop_prompts=True, rank=rank, world_size=world,
        )  # fmt: skip
        batches = [reader.batch(step, m) for step in (3, 4) for m in range(micro)]
        reader.close()
        return batches

    whole = read(4, 1)
    accumulated, ranks = read(2, 2), [read(2, 1, rank, 2) for rank in range(2)]
    for step in range(2):
        for parts in (accumulated[2 * step : 2 * step + 2], [r[step] for r in ranks]):
            for name in ("latents",):
                assert torch.equal(torch.cat([getattr(p, name) for p in parts]), getattr(whole[step], name))
            assert torch.equal(torch.cat([p.noise("n") for p in parts]), whole[step].noise("n"))
            for name in ("prompt_embeds", "keeps_first"):
                joined = torch.cat([getattr(p.condition, name) for p in parts])
                assert torch.equal(joined, getattr(whole[step].condition, name))
    embeds = torch.cat([b.condition.prompt_embeds for b in whole])
    negative = whole[0].condition.negative_embeds
    dropped = (embeds == negative).flatten(1).all(1)
    assert dropped.any() and not dropped.all() and embeds.shape[1] == 32


def test_latents_are_stored_in_half_and_read_without_loading_a_shard(pipe, tmp_path):
    make(pipe, clips_from_tiny_world(2, SIZE), tmp_path)
    stored = load_file(next(tmp_path.glob("shard-*")))
    assert {t.dtype for t in stored.values()} == {torch.bfloat16}
    with pytest.raises(ConfigError, match="max_sequence_length: got 1"):
        BatchReader(PreparedData(tmp_path), DataConfig("d"), seed=0, batch_size=1, micro_batches=1,
                    max_sequence_length=1, drop_prompts=False).batch(0, 0)  # fmt: skip
