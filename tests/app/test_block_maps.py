"""Recorded block maps: what was kept, without changing a bit of the clip, and only while they are asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from videospark.app.block_maps import MAX_SIDE, MAX_STEPS, BlockMapRecorder, BlockMaps, _shares
from videospark.app.engine import Engine
from videospark.attention.routing import BlockMap, block_map
from videospark.core.config import ConfigError
from videospark.pipelines.generation import GenerationRequest


def recipe(**attention):
    from videospark.pipelines.recipe import Recipe

    settings = {"backend": "gather", "keep_ratio": 0.5, "block_size_q": 16, "block_size_k": 16, **attention}
    return Recipe("sparse", attention=type(Recipe("x").attention)(**settings))


@pytest.fixture(scope="module")
def engine(model_folder):
    made = Engine(str(model_folder), "cpu")
    made.load()
    return made


REQUEST = GenerationRequest("a red circle", seed=1, num_inference_steps=3)


def test_recording_changes_no_bit_and_leaves_nothing_behind(engine):
    plain = engine.run(REQUEST, recipe())
    before = [block.attn1.processor.backend for block in engine.pipe.transformer.blocks]
    recorder = BlockMapRecorder(3)
    recorded = engine.run(REQUEST, recipe(), recorder=recorder)
    assert np.array_equal(plain.frames, recorded.frames)
    assert [block.attn1.processor.backend for block in engine.pipe.transformer.blocks] == before
    maps = recorder.result()
    assert maps.steps == (0, 1, 2) and maps.sparse.all()
    report = recorded.report["layers"]
    assert maps.shares.shape[1] == len(report) == len(engine.pipe.transformer.blocks)
    # Of equal blocks, the kept share of the map is that of the report.
    for row in report:
        share = maps.overview(2)[row["layer"]].mean()
        assert share == pytest.approx(1 - row["actual_sparsity"], abs=0.06)


def test_dense_steps_and_layers_are_told_apart(engine):
    recorder = BlockMapRecorder(3)
    engine.run(REQUEST, recipe(dense_layers=(1,), dense_steps=(0,)), recorder=recorder)
    maps = recorder.result()
    assert not maps.sparse[0].any() and not maps.sparse[:, 1].any() and maps.sparse[1:, 0].all()
    assert (maps.share(0, 0) == 1).all() and maps.share(1, 0).mean() < 1
    recorder = BlockMapRecorder(3)
    engine.run(REQUEST, "dense", recorder=recorder)
    assert recorder.result() is None


def test_an_error_takes_the_listeners_away(engine):
    engine.run(REQUEST, recipe())
    with pytest.raises(ZeroDivisionError):
        with BlockMapRecorder(1).record(engine.pipe):
            raise ZeroDivisionError
    assert not any(type(b.attn1.processor.backend).__name__ == "_Listening" for b in engine.pipe.transformer.blocks)


@pytest.mark.parametrize("top_p", [None, 0.6])
def test_shares_are_those_of_the_token_mask(top_p):
    torch.manual_seed(0)
    query, key = torch.randn(1, 80, 2, 8), torch.randn(1, 112, 2, 8)
    kept = block_map(query, key, keep_ratio=0.5, block_size_q=16, block_size_k=16, top_p=top_p)
    mask = kept.token_mask()[0, :, ::16, ::16]
    assert np.array_equal(_shares(kept) == 255, mask.numpy()) and set(np.unique(_shares(kept))) <= {0, 255}


def test_large_maps_are_averaged():
    indices = torch.arange(100).view(1, 1, 1, 100).expand(1, 1, 200, 100)  # the first half of 200 blocks
    shares = _shares(BlockMap(indices, 16, 16, 3200, 3200))
    assert shares.shape == (1, MAX_SIDE, MAX_SIDE)
    assert (shares[..., : MAX_SIDE // 2 - 1] == 255).all() and (shares[..., MAX_SIDE // 2 + 1 :] == 0).all()


def test_files_pictures_and_limits(tmp_path):
    shares = np.zeros((2, 3, 4, 5, 6), np.uint8)
    shares[1, 2, 3] = 255
    maps = BlockMaps((0, 7), shares, np.ones((2, 3), bool))
    again = BlockMaps.load(maps.save(tmp_path / "x.npz"))
    assert again.steps == (0, 7) and np.array_equal(again.shares, shares) and again.sparse.all()
    assert again.share(1, 2).mean() == pytest.approx(0.25)
    kept, left = again.picture(1, 2, 3, pixels=60), again.picture(0, 0, 0, pixels=60)
    assert kept.shape == (50, 60, 3) and kept.dtype == np.uint8
    assert kept.sum() > 3 * left.sum()  # bright is kept
    for wrong in ((2, 0, 0), (0, 3, 0), (0, 0, 4), (-1, 0, 0)):
        with pytest.raises(ConfigError, match="must be 0 to"):
            again.picture(*wrong)


@pytest.mark.parametrize("steps", [1, 2, 3, MAX_STEPS, 50])
def test_steps_are_spread_with_both_ends(steps):
    chosen = BlockMapRecorder(steps).steps
    assert chosen[0] == 0 and chosen[-1] == steps - 1 and len(chosen) == min(steps, MAX_STEPS)
    assert list(chosen) == sorted(set(chosen))
