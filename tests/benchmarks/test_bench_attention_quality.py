"""Quality versus keep ratio on an untrained model: everything runs, and what is counted is right."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from videospark.app.block_maps import BlockMaps
from videospark.app.cli import app
from videospark.attention.config import AttentionConfig, RoLAConfig
from videospark.benchmarks.attention_quality import METHODS, bench_attention_quality, draw_kept_blocks, markdown
from videospark.core.config import ConfigError
from videospark.pipelines.acceleration import accelerate, restore, state_of
from videospark.pipelines.recipe import Recipe

BASE = AttentionConfig("gather", keep_ratio=0.5, block_size_q=16, block_size_k=16)
ROLA = RoLAConfig(rank=16, frequencies="balanced")
SETTINGS = {
    "height": 64, "width": 64, "num_frames": 5, "num_inference_steps": 2, "guidance_scale": 1.0,
    "max_sequence_length": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from videospark.tiny.components import build_pipeline

    torch.manual_seed(0)
    pipe = build_pipeline()
    torch.nn.init.normal_(pipe.transformer.proj_out.weight, std=0.05)
    path = tmp_path_factory.mktemp("model")
    pipe.save_pretrained(path)
    (path / "videospark_defaults.json").write_text(json.dumps({**SETTINGS, "fps": 8}))
    return path


def test_command_writes_tables_numbers_and_pictures(folder, tmp_path):
    output = tmp_path / "sub" / "results"
    arguments = ["bench", "attention-quality", "--model", folder, "--output", output, "--keep-ratio", "0.5"]
    arguments += ["--captions", 2, "--calibration-captions", 1, "--steps", 2, "--rank", 16, "--device", "cpu"]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.stderr
    data = json.loads((output / "attention-quality.json").read_text())
    assert data["settings"]["num_inference_steps"] == 2 and data["settings"]["captions"] == 2
    rows = {row["method"]: row for row in data["rows"]}
    assert list(rows) == ["dense", *METHODS]
    assert rows["dense"]["sparsity"] == 0 and rows["dense"]["psnr_db"] is None and rows["dense"]["distances"] == {}
    for name in METHODS:
        row = rows[name]
        assert 0.3 < row["sparsity"] < 0.7 and row["keep_ratio"] == 0.5
        assert row["end_distance"] > 0 and row["distances"]["end_distance"]["count"] == 2 and row["psnr_db"] > 0
        assert 0 <= row["accuracy"] <= 1
    assert rows["sparse"]["attention_error"] is None
    # The start of a branch is among its candidates, and on the way in SLA's is no branch at all.
    assert rows["sla"]["attention_error"]["calibrated"] <= rows["sla"]["attention_error"]["sparse"] * 1.001
    assert len({rows[name]["end_distance"] for name in METHODS}) == 3
    table = (output / "attention-quality.md").read_text()
    assert "| rola | 0.5 |" in table and "distance to dense" in table
    for name in ("attention-quality.png", "kept-blocks.png"):
        picture = np.asarray(Image.open(output / name).convert("RGB"))
        assert picture.shape[0] > 200 and picture.std() > 5


class Still:
    """Clips that do not depend on the model."""

    settings = SETTINGS
    states = None

    def __init__(self):
        self.calls = []

    def __call__(self, prompts, seeds):
        self.calls += list(zip(prompts, seeds, strict=True))
        clips = [np.full((5, 64, 64, 3), seed % 7 * 30, np.uint8) for seed in seeds]
        draws = [torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        self.states.final.append(torch.stack(draws))
        return clips


def test_equal_clips_are_equal_and_each_method_gets_the_same_captions(tiny_pipeline):
    maker = Still()
    rows = bench_attention_quality(
        tiny_pipeline,
        maker,
        base=BASE,
        rola=ROLA,
        keep_ratios=[0.5, 0.25],
        methods=["sparse"],
        captions=3,
        batch_size=2,
    )
    # Nothing ran through the model, so there is no pass to count the sparsity of.
    assert [(row.method, row.keep_ratio) for row in rows] == [("dense", 1.0), ("sparse", 0.25), ("sparse", 0.5)]
    assert maker.calls[:3] == maker.calls[3:6] == maker.calls[6:9] and len(maker.calls) == 9
    assert rows[1].psnr_db == 100 and rows[1].end_distance == 0 and rows[1].accuracy == rows[0].accuracy
    assert rows[1].sparsity is None and "| sparse | 0.25 |  |" in markdown(rows, "title")
    assert state_of(tiny_pipeline) is None and maker.states is None


@pytest.mark.parametrize("change, field", [
    ({"methods": ["vsa"]}, "methods"), ({"methods": []}, "methods"), ({"keep_ratios": [1.0]}, "keep_ratios"),
    ({"keep_ratios": []}, "keep_ratios"), ({"captions": 0}, "captions"),
    ({"calibration_captions": 0}, "calibration_captions"), ({"base": AttentionConfig()}, "backend"),
    ({"recorded_ratio": 0.3}, "recorded_ratio"), ({"recorded_ratio": 0.5, "methods": ["sla"]}, "recorded_ratio"),
])  # fmt: skip
def test_wrong_settings_are_named_before_a_clip_is_made(tiny_pipeline, change, field):
    maker = Still()
    given = {"base": BASE, "rola": ROLA, "keep_ratios": [0.5], **change}
    with pytest.raises(ConfigError, match=f"^{field}: got"):
        bench_attention_quality(tiny_pipeline, maker, **given)
    assert maker.calls == []


def test_an_accelerated_pipeline_is_refused(tiny_pipeline):
    accelerate(tiny_pipeline, Recipe("sparse", attention=BASE))
    try:
        with pytest.raises(ConfigError, match="pipeline: got"):
            bench_attention_quality(tiny_pipeline, Still(), base=BASE, rola=ROLA, keep_ratios=[0.5])
    finally:
        restore(tiny_pipeline)


def test_the_picture_shows_heads_and_steps(tmp_path):
    shares = np.zeros((9, 2, 3, 12, 12), np.uint8)
    shares[:, 1] = 255 * np.eye(12, dtype=np.uint8)
    maps = BlockMaps(tuple(range(0, 18, 2)), shares, np.ones((9, 2), bool))
    dark, bright = (draw_kept_blocks(maps, layer, tmp_path / f"{layer}.png") for layer in (0, 1))
    assert Image.open(dark).size == Image.open(bright).size
    assert np.asarray(Image.open(bright)).mean() > np.asarray(Image.open(dark)).mean()
    with pytest.raises(ConfigError, match="layer: got 2"):
        draw_kept_blocks(dataclasses.replace(maps), 2, tmp_path / "x.png")
