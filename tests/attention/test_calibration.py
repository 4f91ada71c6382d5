"""Calibration without gradients: maps, gates, the grid of keep ratios, the budget, and the command."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from typer.testing import CliRunner

from videospark.app.cli import app
from videospark.app.commands_calibrate import parse_ratios, read_prompts
from videospark.attention import AttentionConfig, install
from videospark.attention.auto import ALWAYS_DENSE
from videospark.attention.calibration import LayerSample, calibrate_branch, observed
from videospark.attention.calibration_grid import (
    GridRow,
    _peak_bytes,
    measure_grid,
    propose_budget,
    with_budget,
)
from videospark.attention.calibration_maps import factorised_maps, map_moments, missed_weights, occurrences
from videospark.attention.config import RoLAConfig, SLAConfig
from videospark.attention.grid import TokenGrid
from videospark.attention.processors import rotate
from videospark.attention.rola.frequencies import token_angles
from videospark.attention.rola.reference import rotate_pairs
from videospark.attention.routing import block_map
from videospark.core.config import ConfigError, load_file
from videospark.core.numerics import relative_error
from videospark.pipelines.acceleration import accelerate, restore
from videospark.pipelines.calibration import calibrate, read_branch_state, write_calibration
from videospark.pipelines.generation import GenerationRequest
from videospark.pipelines.recipe import Recipe
from videospark.tiny.components import LATENT_CHANNELS, build_transformer

BASE = AttentionConfig(backend="gather", keep_ratio=0.2, block_size_q=16, block_size_k=16, token_order="raster")
BRANCHES = {
    "rola": dataclasses.replace(BASE, branch="rola", rola=RoLAConfig(rank=32, frequencies="balanced")),
    "rola-scaled": dataclasses.replace(
        BASE, branch="rola", rola=RoLAConfig(rank=32, merge="scaled", normalizer="mean", per_head_maps=True)
    ),
    "rola-excluded": dataclasses.replace(BASE, branch="rola", rola=RoLAConfig(rank=32, exclude_selected=True)),
    "sla": dataclasses.replace(BASE, branch="sla"),
    "sla-excluded": dataclasses.replace(BASE, branch="sla", sla=SLAConfig(exclude_selected=True)),
}


@pytest.fixture(scope="module")
def transformer():
    torch.manual_seed(0)
    model = build_transformer()
    torch.nn.init.normal_(model.proj_out.weight, std=0.05)
    for block in model.blocks:
        # Queries and keys with a common part, as trained ones have: what is missed is then more than noise.
        torch.nn.init.normal_(block.attn1.to_q.bias, std=1.0)
        torch.nn.init.normal_(block.attn1.to_k.bias, std=1.0)
        torch.nn.init.normal_(block.attn1.to_v.bias, std=0.3)
    return model


def batch(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(1, LATENT_CHANNELS, 5, 8, 8, generator=generator),
        "encoder_hidden_states": torch.randn(1, 8, 128, generator=generator),
        "timestep": torch.tensor([500.0]),
    }


def forwards(model, count=2):
    return [lambda seed=seed: model(**batch(seed), return_dict=False) for seed in range(count)]


def run(model):
    with torch.no_grad():
        return model(**batch(), return_dict=False)[0]


def layer_zero(model):
    """What goes into the output projection of the first layer's self-attention."""
    seen = []
    module = model.blocks[0].attn1.to_out[0]
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    run(model)
    handle.remove()
    return seen[0]


def test_missed_weights_times_values_are_what_is_missed():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 50, 2, 8, generator=generator) for _ in range(3))
    chosen = block_map(query, key, keep_ratio=0.4, block_size_q=16, block_size_k=16)
    weights = missed_weights((query, key), chosen, torch.arange(50), 0, 1, False)
    scores = query[0, :, 1] @ key[0, :, 1].T / math.sqrt(8)
    mask = chosen.token_mask()[0, 1]
    dense, sparse = scores.softmax(-1), scores.masked_fill(~mask, -math.inf).softmax(-1)
    assert torch.allclose(weights @ value[0, :, 1], (dense - sparse) @ value[0, :, 1], atol=1e-6)
    only = missed_weights((query, key), chosen, torch.arange(50), 0, 1, True)
    assert torch.equal(only[mask], torch.zeros_like(only[mask])) and torch.allclose(only[~mask], dense[~mask])


def test_factors_find_a_kernel_that_is_one_of_theirs():
    """Moments of a kernel made of known functionals give maps whose features make that kernel again."""
    generator = torch.Generator().manual_seed(0)
    length, dim, pairs = 200, 8, 3
    q, k = (torch.randn(length, dim, generator=generator).double() @ torch.randn(dim, dim, generator=generator).double()
            for _ in range(2))  # fmt: skip
    angles = torch.arange(length)[:, None] * torch.tensor([1.0, 0.31, 0.057])[None].double()
    planted = [torch.randn(2 * pairs, dim, generator=generator).double() for _ in range(2)]

    def kernel(maps):
        turned = [rotate_pairs(x @ w.T, angles.cos(), angles.sin()) for x, w in zip((q, k), maps, strict=True)]
        return turned[0] @ turned[1].T

    wanted = kernel(planted)
    turn = torch.polar(torch.ones_like(angles), angles)
    cross = torch.stack([
        (turn[:, c, None] * q).T @ wanted.to(turn.dtype) @ (turn[:, c, None].conj() * k) for c in range(pairs)
    ])  # fmt: skip
    count = torch.tensor([float(length)])
    found = factorised_maps((q.T @ q)[None], (k.T @ k)[None], cross[None], count, [0] * pairs, ridge=1e-9)
    made = kernel(found)
    alike = float((made * wanted).sum() / (made.norm() * wanted.norm()))
    assert alike > 0.9
    assert float((q @ found[0].double().T).square().mean()) == pytest.approx(1.0, rel=1e-3)
    other = kernel([torch.randn(2 * pairs, dim, generator=generator).double() for _ in range(2)])
    assert float((other * wanted).sum() / (other.norm() * wanted.norm())) < 0.5


def test_moments_add_up_over_heads_or_stay_apart():
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 40, 3, 16, generator=generator) for _ in range(2))
    angles = token_angles(TokenGrid(40, 1, 1), 16)[:, :4]
    tables = angles.cos().float(), angles.sin().float()
    chosen = block_map(query, key, keep_ratio=0.5, block_size_q=16, block_size_k=16)
    one, many = (
        map_moments(query, key, (query, key), tables, chosen, rows=40, by_head=by_head, missed_only=False)
        for by_head in (False, True)
    )
    assert [tensor.shape[0] for tensor in many] == [3] * 4 and many[2].shape == (3, 4, 16, 16)
    for apart, together in zip(many, one, strict=True):
        assert torch.allclose(apart.sum(0, keepdim=True), together, atol=1e-4)
    assert torch.allclose(one[0][0], torch.einsum("blhd,blhe->de", query, query), rtol=1e-4)


def test_columns_that_turn_alike_are_counted():
    angles = torch.arange(64)[:, None] * torch.tensor([1.0, 0.0001, 0.0002, 0.5, 0.0])[None]
    assert occurrences(angles.cos(), angles.sin(), 0.5) == [0, 0, 1, 0, 2]


def test_observing_shows_what_the_layers_compute_and_leaves_no_trace(transformer):
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in transformer.modules())
    plain, attended = run(transformer), layer_zero(transformer)
    seen: dict[int, LayerSample] = {}
    with observed(transformer, BASE, seen.__setitem__):
        assert torch.allclose(run(transformer), plain, atol=1e-5)
    assert sorted(seen) == list(range(6))
    sample = seen[0]
    q, k, v = (t.transpose(1, 2) for t in (sample.rotated_query, sample.rotated_key, sample.value))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    assert torch.allclose(out, attended, atol=1e-5)
    assert torch.allclose(rotate(sample.query, *sample.rotary), sample.rotated_query)
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in transformer.modules()) == hooks


@pytest.mark.parametrize("name", BRANCHES)
def test_calibration_comes_nearer_to_dense_and_the_errors_are_true(transformer, name):
    config = dataclasses.replace(BRANCHES[name], dense_layers=(2,))
    made = calibrate_branch(transformer, config, [lambda: run(transformer)], rows=32)
    assert [row.layer for row in made.layers] == [0, 1, 3, 4, 5]
    for row in made.layers:
        assert row.after <= row.before and row.after < row.sparse
    # The first layer sees the same input with and without the branch: its error can be found from outside.
    dense = layer_zero(transformer)
    for state, field in ((made.state, "after"), (None, "before")):
        installed = install(transformer, config, branch_state=state)
        found = relative_error(layer_zero(transformer), dense)
        installed.remove()
        assert found == pytest.approx(getattr(made.layers[0], field), rel=1e-3)
    plain = install(transformer, BASE)
    assert relative_error(layer_zero(transformer), dense) == pytest.approx(made.layers[0].sparse, rel=1e-3)
    plain.remove()


def test_maps_from_missed_weights_beat_random_ones(transformer):
    made = calibrate_branch(transformer, BRANCHES["rola"], forwards(transformer), rows=80)
    assert sum(row.size is not None for row in made.layers) >= 4


def test_what_cannot_be_calibrated_is_refused(transformer):
    with pytest.raises(ConfigError, match="branch"):
        calibrate_branch(transformer, BASE, forwards(transformer))
    with pytest.raises(ConfigError, match="forwards"):
        calibrate_branch(transformer, BRANCHES["sla"], [])
    with pytest.raises(ConfigError, match="keep_ratios"):
        measure_grid(transformer, BASE, [], [1.0])


def test_the_grid_measures_error_sparsity_time_and_memory(transformer):
    calls = [(step, forward) for step, forward in zip((3, 7), forwards(transformer), strict=True)]
    rows = measure_grid(transformer, BRANCHES["rola"], calls, [0.6, 0.2])
    assert [(r.layer, r.step, r.keep_ratio) for r in rows] == [
        (layer, step, ratio) for layer in range(6) for step in (3, 7) for ratio in (0.2, 0.6, 1.0)
    ]
    for low, high, dense in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        assert dense.error < 1e-5 < high.error < low.error and dense.sparsity == 0.0
        assert (low.sparsity, high.sparsity) == (pytest.approx(0.8), pytest.approx(0.4))
        assert all(row.seconds > 0 and row.peak_bytes >= 80 * 3 * 64 * 4 and row.tokens == 80 for row in (low, high))


def test_memory_is_that_of_the_tensors_alive_at_once():
    x = torch.zeros(1000)

    def run():
        y = x.view(10, 100) + 1  # 4000 bytes, the view none
        y = y * 2  # another 4000 while the first still lives
        z = y.sum()
        del y
        return z + torch.zeros(500)

    assert _peak_bytes(run, torch.device("cpu")) == pytest.approx(8000, abs=16)


def row(layer, ratio, error, step=0, seconds=1.0):
    return GridRow(layer, step, ratio, 1 - ratio, error, seconds * ratio, 0, 100)


def test_a_budget_takes_the_smallest_keep_ratio_within_the_bound_at_every_step():
    rows = [row(layer, 1.0, 0.0, step) for layer in range(3) for step in (0, 1)]
    rows += [row(0, 0.1, 0.05), row(0, 0.1, 0.2, 1), row(0, 0.3, 0.04), row(0, 0.3, 0.05, 1)]
    rows += [row(1, 0.1, 0.05), row(1, 0.1, 0.06, 1), row(1, 0.3, 0.01), row(1, 0.3, 0.02, 1)]
    rows += [row(2, 0.1, 0.5), row(2, 0.1, 0.5, 1), row(2, 0.3, 0.4), row(2, 0.3, 0.4, 1)]
    budget = propose_budget(rows, 0.1)
    assert budget.keep_ratios == (0.3, 0.1, 1.0) and budget.dense_layers == (2,)
    assert budget.seconds_dense == pytest.approx(3.0) and budget.seconds == pytest.approx(1.4)
    assert propose_budget(rows, 0.1, dense_layers=(0,)).dense_layers == (0, 2)
    config = with_budget(BASE, budget)
    assert config.keep_ratios == budget.keep_ratios and config.dense_layers == (2,)
    assert config.keep_ratio == pytest.approx(0.2)
    with pytest.raises(ConfigError, match="error_bound"):
        propose_budget(rows, 0.0)


REQUEST = GenerationRequest("x", height=128, width=128, num_frames=17, num_inference_steps=3, guidance_scale=1.0)
RECIPE = Recipe("mine", attention=dataclasses.replace(BRANCHES["rola"], token_order="tile", tile=(1, 4, 4)))


def test_a_pipeline_is_calibrated_written_and_accelerated(tiny_pipeline, tmp_path):
    tiny_pipeline.videospark_defaults = {"max_sequence_length": 16}
    scheduler, processors = tiny_pipeline.scheduler, dict(tiny_pipeline.transformer.attn_processors)
    stages = []
    result = calibrate(
        tiny_pipeline, RECIPE, ["a red circle"], keep_ratios=(0.2, 0.8), error_bound=0.5,
        measured_steps=2, request=REQUEST, on_stage=stages.append,
    )  # fmt: skip
    assert tiny_pipeline.scheduler is scheduler and len(stages) == 3
    assert dict(tiny_pipeline.transformer.attn_processors) == processors
    rows = result.grid["transformer"]
    assert {r.step for r in rows} == {0, 2} and {r.tokens for r in rows} == {320}
    assert len(result.budget.keep_ratios) == 6 and len(result.budget.dense_layers) < 6
    paths = write_calibration(result, tmp_path / "out")
    assert paths["plot"].read_bytes().startswith(b"\x89PNG")
    table = paths["table"].read_text()
    assert "**" in table and "320 tokens" in table and "calibrated" in table
    assert load_file(Recipe, paths["recipe"]) == result.recipe
    state = read_branch_state(tmp_path / "out")
    report = accelerate(tiny_pipeline, paths["recipe"], branch_state=state)
    assert [line["keep_ratio"] for line in report.layers] == list(result.budget.keep_ratios)
    assert all(line["branch_weights"] == "given" for line in report.layers if line["backend"] != "dense")
    restore(tiny_pipeline)
    assert read_branch_state(tmp_path) is None


def test_auto_gets_the_number_of_tokens_from_which_sparse_was_faster(tiny_pipeline, tmp_path):
    tiny_pipeline.videospark_defaults = {"max_sequence_length": 16}
    recipe = Recipe("auto", attention=dataclasses.replace(BASE, backend="auto"))
    request = dataclasses.replace(REQUEST, num_frames=5, num_inference_steps=1)
    result = calibrate(
        tiny_pipeline, recipe, ["a", "b"], keep_ratios=(0.5,), error_bound=9.0, request=request,
        crossover_lengths=(32, 64),
    )  # fmt: skip
    assert result.branch_state is None and result.crossover.backend == "gather"
    below = result.recipe.attention.dense_below
    assert below == (ALWAYS_DENSE if result.crossover.tokens is None else result.crossover.tokens)
    paths = write_calibration(result, tmp_path)
    assert "Dense below, sparse above" in paths["table"].read_text()
    report = accelerate(tiny_pipeline, paths["recipe"])
    assert "(given)" in report.layers[0]["backend_reason"]


def test_settings_that_cannot_be_calibrated_are_refused_before_any_work(tiny_pipeline):
    for changes, field in (
        ({"recipe": Recipe("dense")}, "backend"),
        ({"prompts": []}, "prompts"),
        ({"error_bound": 0.0}, "error_bound"),
        ({"measured_steps": 0}, "measured_steps"),
    ):
        given = {"recipe": RECIPE, "prompts": ["x"], "request": REQUEST, **changes}
        with pytest.raises(ConfigError, match=field):
            calibrate(tiny_pipeline, **given)


def test_the_command_writes_everything(tiny_pipeline, tmp_path):
    tiny_pipeline.save_pretrained(tmp_path / "model")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle\n\n")
    arguments = ["--model", tmp_path / "model", "--recipe", "tiny-sparse-50", "--prompts", prompts]
    arguments += ["--output", tmp_path / "out", "--keep-ratios", "0.5", "--measured-steps", 1, "--steps", 1]
    arguments += ["--guidance", 1, "--size", "64x64", "--frames", 5, "--device", "cpu", "--error-bound", 10]
    result = CliRunner().invoke(app, ["calibrate", *map(str, arguments), "--save-model"])
    assert result.exit_code == 0, result.stderr
    assert "keep ratios: 0.5, 0.5, 0.5, 0.5, 0.5, 0.5" in result.stdout and "dense layers: none" in result.stdout
    assert (tmp_path / "out" / "model" / "videospark_recipe.json").is_file()
    assert {path.name for path in (tmp_path / "out").iterdir() if path.is_file()} == {
        "recipe.toml", "calibration.md", "calibration.png",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--recipe", "dense"], "sparse attention backend"),
        (["--recipe", "sparse-50", "--keep-ratios", "0.5,2"], "keep-ratios"),
        (["--recipe", "sparse-50", "--error-bound", "0"], "error-bound"),
        (["--recipe", "sparse-50", "--prompts", "nowhere.txt"], "prompts"),
    ],
)
def test_wrong_options_are_refused(arguments, text, tmp_path):
    result = CliRunner().invoke(app, ["calibrate", "--output", str(tmp_path / "out"), *arguments])
    assert result.exit_code == 2 and text in result.stderr


def test_prompts_are_a_file_or_a_number_of_captions(tmp_path):
    assert len(set(read_prompts("3", tiny=True))) == 3
    with pytest.raises(ValueError, match="file"):
        read_prompts("3", tiny=False)
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    with pytest.raises(ValueError, match="at least one"):
        read_prompts(str(empty), tiny=True)
    assert parse_ratios("0.1,0.25") == (0.1, 0.25)
