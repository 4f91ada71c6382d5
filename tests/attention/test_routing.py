import pytest
import torch

from videospark.attention.config import AttentionConfig
from videospark.attention.context import ForwardContext
from videospark.attention.grid import TokenGrid, inverse_order
from videospark.attention.routing import block_map, diagonal_blocks, num_kept_blocks, pool_blocks
from videospark.core.config import ConfigError


def route(query, key, keep_ratio, size_q=16, size_k=16, forced=None):
    return block_map(query, key, keep_ratio=keep_ratio, block_size_q=size_q, block_size_k=size_k, forced=forced)


@pytest.mark.parametrize(
    ("ratio", "blocks", "kept"), [(0.1, 512, 51), (0.03, 1182, 35), (0.01, 5, 1), (1.0, 7, 7), (0.29, 100, 29)]
)
def test_number_of_kept_blocks(ratio, blocks, kept):
    assert num_kept_blocks(ratio, blocks) == kept


@pytest.mark.parametrize("grid", [TokenGrid(3, 5, 7), TokenGrid(1, 1, 1), TokenGrid(8, 8, 8)])
def test_tile_order_is_a_permutation_and_its_inverse_undoes_it(grid):
    order = grid.order("tile", (4, 4, 4))
    tokens = torch.randn(grid.num_tokens)
    assert torch.equal(order.sort().values, torch.arange(grid.num_tokens))
    assert torch.equal(tokens[order][inverse_order(order)], tokens)
    assert grid.order("raster", (4, 4, 4)) is None


def test_tile_order_puts_a_box_into_one_block():
    order = TokenGrid(8, 8, 8).order("tile", (4, 4, 4))
    box = order[64:128]  # the second box: frames 0-3, rows 0-3, columns 4-7
    assert set((box // 64).tolist()) == {0, 1, 2, 3}
    assert set((box // 8 % 8).tolist()) == {0, 1, 2, 3}
    assert set((box % 8).tolist()) == {4, 5, 6, 7}


def test_means_count_only_real_tokens():
    tokens = torch.ones(1, 20, 2, 4, dtype=torch.bfloat16)
    pooled = pool_blocks(tokens, 16)
    assert pooled.shape == (1, 2, 2, 4) and pooled.dtype == torch.float32
    assert torch.equal(pooled, torch.ones_like(pooled))


def test_means_do_not_read_past_the_tokens():
    storage = torch.full((1, 64, 1, 8), float("nan"))
    storage[:, :40] = torch.randn(1, 40, 1, 8)
    assert torch.equal(pool_blocks(storage[:, :40], 16), pool_blocks(storage[:, :40].clone(), 16))


@pytest.mark.parametrize("length", [15, 16, 33, 9000])
def test_means_of_low_precision_are_float32(length, monkeypatch):
    tokens = torch.randn(2, length, 3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    monkeypatch.setattr("videospark.attention.routing.CPU_POOL_ELEMENTS", 20_000)  # runs of 26 blocks
    assert torch.allclose(pool_blocks(tokens, 16), pool_blocks(tokens.float(), 16), atol=1e-6)


def test_ties_go_to_the_lower_index():
    same = torch.ones(2, 100, 3, 8)
    chosen = route(same, same, 0.5)
    assert torch.equal(chosen.indices, torch.arange(3).expand(2, 3, 7, 3))


def test_the_best_blocks_are_kept():
    key = torch.zeros(1, 64, 1, 4)
    key[:, 32:48] = 1.0
    assert torch.equal(route(torch.ones(1, 64, 1, 4), key, 0.25).indices.flatten(), torch.full((4,), 2))


def test_shifting_all_keys_does_not_change_the_choice():
    query, key = torch.randn(1, 200, 2, 16, dtype=torch.float64), torch.randn(1, 200, 2, 16, dtype=torch.float64)
    assert torch.equal(route(query, key, 0.4).indices, route(query, key - key.mean(1, keepdim=True), 0.4).indices)


def test_forced_blocks_take_places_of_the_share():
    query, key = torch.randn(2, 200, 2, 16), torch.randn(2, 200, 2, 16)
    diagonal = diagonal_blocks(200, 32, 16)
    assert diagonal.shape == (7, 13) and diagonal.sum(dim=-1).tolist() == [2] * 6 + [1]
    chosen = route(query, key, 0.5, 32, 16, forced=diagonal)
    assert chosen.indices.shape[-1] == 6
    starts = torch.arange(200)
    assert chosen.token_mask()[:, :, starts, starts].all()
    assert route(query, key, 0.01, 32, 16, forced=diagonal).indices.shape[-1] == 2


@pytest.mark.parametrize("token_order", ["raster", "tile"])
def test_first_frame_blocks_hold_every_token_of_the_first_frame(token_order):
    grid = TokenGrid(5, 8, 8)
    order = grid.order(token_order, (4, 4, 4))
    blocks = ForwardContext(grid, order=order).first_frame_blocks(16)
    tokens = torch.arange(320) if order is None else order
    held = tokens.reshape(-1, 16)[blocks].flatten()
    assert set(range(64)) <= set(held.tolist())
    assert int(blocks.sum()) < 20


def test_actual_sparsity_counts_the_short_block_at_its_size():
    query, key = torch.randn(1, 40, 1, 8), torch.randn(1, 40, 1, 8)
    chosen = route(query, key, 0.7)
    assert chosen.actual_sparsity() == pytest.approx(1 - chosen.token_mask().double().mean().item())
    assert route(query, key, 1.0).actual_sparsity() == 0.0


@pytest.mark.parametrize(
    ("field", "value"),
    [("keep_ratio", 0.0), ("keep_ratio", 1.5), ("block_size_q", 24), ("block_size_k", 256), ("tile", (4, 0, 4))]
    + [("backend", "denes"), ("dense_layers", (-1,)), ("token_order", "spiral")],
)
def test_settings_out_of_range_are_refused(field, value):
    with pytest.raises(ConfigError, match=field):
        AttentionConfig(**{field: value})


def test_sparsity_is_what_is_not_kept():
    assert AttentionConfig(keep_ratio=0.25).sparsity == 0.75
