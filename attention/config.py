"""Settings of the self-attention: which backend, how many blocks are kept, in which token order, which branch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..core.config import require
from .backends import AUTO, available_backends

MIN_BLOCK_SIZE = 16
MAX_BLOCK_SIZE = 128
BRANCHES = ("none", "rola", "sla")
FREQUENCIES = ("prefix", "balanced", "low", "strided")
FEATURE_MAPS = ("silu", "relu", "elu", "softmax", "identity")
POSITIVE_FEATURE_MAPS = ("relu", "elu", "softmax")


@dataclass(frozen=True)
class RoLAConfig:
    """Rotary low-rank attention (arXiv 2609.06712), added to what the kept blocks give; by default as released.

    With q, k before the rotary embedding, R the rotation and N the normaliser:
    O = O_s + g a N(O_l), O_l = (R phi(W_q q)) sum_j (R phi(W_k k_j)) v_j^T, g = sigmoid(w_g x + b).

    Attributes:
        rank: channels of the low-rank features; even, from 2 to 512.
        frequencies: which columns of the angle table of the model turn the rank / 2 pairs of features. "prefix" takes
            the first ones (all of time and, at head size 128 and rank 64, none of the width), the others give time,
            height and width nearly equal shares: "balanced" the fastest, "low" the slowest, "strided" evenly spaced.
        angle_dtype: "bfloat16" rounds the angles before their sine and cosine are taken, as the released code does.
        feature_map: phi; "elu" is elu + 1.
        normalizer: "rms" divides O_l by its root mean square over the channels of a head, "denominator" by the sum of
            the un-rotated features (positive feature maps only), "mean" by the number of tokens.
        per_head_maps: every head has W_q and W_k of its own.
        exclude_selected: the sum leaves out the key blocks that the sparse softmax attends to.
        merge: "rms_matched" has a = sqrt(mean O_s^2 + 1e-5) and needs the normalizer "rms"; "scaled" has for a a
            learned number per head, `output_scale`.
        gate_bias: what b starts from; -1.946 gives a gate of 0.125.

    Raises:
        ConfigError: a value outside its range, or values that do not go together.
    """

    rank: int = 64
    frequencies: Literal["prefix", "balanced", "low", "strided"] = "prefix"
    angle_dtype: Literal["float32", "bfloat16"] = "float32"
    feature_map: Literal["silu", "relu", "elu", "softmax", "identity"] = "silu"
    normalizer: Literal["rms", "denominator", "mean"] = "rms"
    per_head_maps: bool = False
    exclude_selected: bool = False
    merge: Literal["rms_matched", "scaled"] = "rms_matched"
    gate_bias: float = -1.946

    def __post_init__(self) -> None:
        fits = isinstance(self.rank, int) and 2 <= self.rank <= 512 and self.rank % 2 == 0
        require(fits, "rank", self.rank, "an even number from 2 to 512")
        choices: dict[str, tuple[str, ...]] = {
            "frequencies": FREQUENCIES,
            "angle_dtype": ("float32", "bfloat16"),
            "feature_map": FEATURE_MAPS,
            "normalizer": ("rms", "denominator", "mean"),
            "merge": ("rms_matched", "scaled"),
        }
        for name, allowed in choices.items():
            require(getattr(self, name) in allowed, name, getattr(self, name), f"one of {', '.join(allowed)}")
        positive = self.feature_map in POSITIVE_FEATURE_MAPS
        rule = f"one of {', '.join(POSITIVE_FEATURE_MAPS)} with normalizer 'denominator': other features can sum to 0"
        require(self.normalizer != "denominator" or positive, "feature_map", self.feature_map, rule)
        matched = self.merge != "rms_matched" or self.normalizer == "rms"
        require(matched, "normalizer", self.normalizer, "'rms' with merge 'rms_matched'")
        require(abs(self.gate_bias) < float("inf"), "gate_bias", self.gate_bias, "a finite number")


@dataclass(frozen=True)
class SLAConfig:
    """The linear branch of sparse-linear attention (thu-ml/SLA): O = O_s + proj(O_l), `proj` starting from zero.

    With q, k after the rotary embedding: O_l = phi(q) sum_j phi(k_j) v_j^T / (1e-5 + phi(q) sum_j phi(k_j)).

    Attributes:
        feature_map: phi over the channels of a head, "softmax", "elu" (elu + 1) or "relu".
        exclude_selected: the sums leave out the key blocks that the sparse softmax attends to. The published text says
            so, the published code does not.

    Raises:
        ConfigError: another feature map.
    """

    feature_map: Literal["softmax", "elu", "relu"] = "softmax"
    exclude_selected: bool = False

    def __post_init__(self) -> None:
        allowed = POSITIVE_FEATURE_MAPS
        require(self.feature_map in allowed, "feature_map", self.feature_map, f"one of {', '.join(allowed)}")


@dataclass(frozen=True)
class AttentionConfig:
    """How the self-attention layers of one transformer are computed.

    Attributes:
        backend: name of a registered backend; "dense" leaves the results of the model as they are, bit for bit; "auto"
            takes the best sparse backend of the device, and dense attention for short videos.
        keep_ratio: share of the key blocks that every query block attends to, in (0, 1]; at least one is kept.
        keep_ratios: the same for each layer on its own, one number per layer; empty where `keep_ratio` is for all.
        routing_rule: "top_k" keeps that share everywhere. "top_p" takes it for the most, and keeps in each query block
            the fewest best key blocks that hold the share `top_p` of the softmax over the block scores.
        top_p: that share, in (0, 1]; with the rule "top_p" alone.
        block_size_q: tokens in a query block, a multiple of 16 from 16 to 128.
        block_size_k: tokens in a key block, a multiple of 16 from 16 to 128.
        token_order: "raster" keeps the order of the model (frame, row, column); "tile" puts the tokens of a small
            space-time box next to each other, so that a block covers neighbours. Ignored by dense backends.
        tile: frames, rows and columns of the box.
        keep_diagonal: every query block always attends to the key blocks that hold its own tokens.
        keep_first_frame: every query block always attends to the key blocks that hold a token of the first latent
            frame. In tile order such a block also holds later frames; the number kept grows where it must.
        dense_layers: indices of the layers that stay dense.
        dense_steps: indices of the sampling steps in which every layer stays dense.
        dense_below: with fewer tokens than this every layer stays dense; None for no such limit, or with backend "auto"
            for one that is computed.
        branch: what stands in for the blocks that are left out: "none", "rola" or "sla". Dense layers and steps do not
            run it.
        rola: settings of the branch "rola"; with another branch they must stay at their defaults.
        sla: settings of the branch "sla", likewise.

    Raises:
        ConfigError: a value outside its range.
    """

    backend: str = "dense"
    keep_ratio: float = 1.0
    keep_ratios: tuple[float, ...] = ()
    routing_rule: Literal["top_k", "top_p"] = "top_k"
    top_p: float | None = None
    block_size_q: int = 64
    block_size_k: int = 64
    token_order: Literal["raster", "tile"] = "tile"
    tile: tuple[int, int, int] = (4, 4, 4)
    keep_diagonal: bool = False
    keep_first_frame: bool = False
    dense_layers: tuple[int, ...] = ()
    dense_steps: tuple[int, ...] = ()
    dense_below: int | None = None
    branch: Literal["none", "rola", "sla"] = "none"
    rola: RoLAConfig = field(default_factory=RoLAConfig)
    sla: SLAConfig = field(default_factory=SLAConfig)

    def __post_init__(self) -> None:
        names = [AUTO, *available_backends()]
        require(self.backend in names, "backend", self.backend, f"one of {', '.join(names)}")
        require(0.0 < self.keep_ratio <= 1.0, "keep_ratio", self.keep_ratio, "above 0 and at most 1")
        within = all(0.0 < ratio <= 1.0 for ratio in self.keep_ratios)
        require(within, "keep_ratios", self.keep_ratios, "numbers above 0 and at most 1, one for each layer")
        require(self.routing_rule in ("top_k", "top_p"), "routing_rule", self.routing_rule, "'top_k' or 'top_p'")
        if self.routing_rule == "top_p":
            share = self.top_p is not None and 0.0 < self.top_p <= 1.0
            require(share, "top_p", self.top_p, "above 0 and at most 1 with routing_rule 'top_p'")
        else:
            require(self.top_p is None, "top_p", self.top_p, "left out unless routing_rule is 'top_p'")
        for name in ("block_size_q", "block_size_k"):
            size = getattr(self, name)
            fits = isinstance(size, int) and MIN_BLOCK_SIZE <= size <= MAX_BLOCK_SIZE and size % 16 == 0
            require(fits, name, size, f"a multiple of 16 from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}")
        require(self.token_order in ("raster", "tile"), "token_order", self.token_order, "'raster' or 'tile'")
        tile_fits = len(self.tile) == 3 and all(side >= 1 for side in self.tile)
        require(tile_fits, "tile", self.tile, "three whole numbers of at least 1: frames, rows, columns")
        for name in ("dense_layers", "dense_steps"):
            indices = getattr(self, name)
            require(all(index >= 0 for index in indices), name, indices, "indices of 0 or more")
        limit = self.dense_below is None or self.dense_below >= 0
        require(limit, "dense_below", self.dense_below, "a number of tokens, 0 or more")
        require(self.branch in BRANCHES, "branch", self.branch, f"one of {', '.join(BRANCHES)}")
        settings: RoLAConfig | SLAConfig
        for name, settings in (("rola", self.rola), ("sla", self.sla)):
            unused = self.branch != name and settings != type(settings)()
            require(not unused, name, settings, f"left at its defaults unless branch is {name!r}")

    @property
    def sparsity(self) -> float:
        """Nominal share of the key blocks that is left out; with the rule "top_p" the least that is."""
        return 1.0 - self.keep_ratio

    def keep_ratio_of(self, layer: int) -> float:
        """Keep ratio of one layer."""
        return self.keep_ratios[layer] if self.keep_ratios else self.keep_ratio
