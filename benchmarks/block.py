"""One whole Wan block: stock diffusers against attention, fusion and low precision of this package, part by part.

Every contender is a transformer of one layer with the same random weights. The block is timed inside a whole forward
pass, between hooks, so that it is called as a pipeline calls it; contenders take turns. Operations are those of the
products and of the pairs of tokens that are kept, so that the share of the GEMM peak, measured in the same run, says
how well the work that is left is done.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from ..attention.config import AttentionConfig
from ..attention.grid import TokenGrid, inverse_order
from ..attention.processors import InstalledAttention, install
from ..core.config import ConfigError, require
from ..core.numerics import relative_error
from ..quantization.config import QuantizationConfig
from ..quantization.convert import quantize_
from .quantization import SHAPES, BlockShape
from .timing import gemm_peak, machine

STOCK = "stock"
CONTENDERS = {
    "sparse": (True, False, "none", "none"),
    "fused": (False, True, "none", "none"),
    "int8": (False, False, "int8", "none"),
    "int8+sparse": (True, False, "int8", "none"),
    "int8+fused+sparse": (True, True, "int8", "none"),
    "sparse+rola": (True, False, "none", "rola"),
    "int8+sparse+rola": (True, False, "int8", "rola"),
    "int8+fused+sparse+rola": (True, True, "int8", "rola"),
}
"""By name: sparse attention, fused parts, mode of low precision, linear branch."""

USUAL = ("sparse", "fused", "int8", "int8+fused+sparse", "int8+fused+sparse+rola")
"""Those that are measured where nobody asks for others."""

GRIDS = {
    "wan2.1-1.3b-480p": TokenGrid(21, 30, 52),
    "wan2.1-14b-720p": TokenGrid(21, 45, 80),
    "tiny": TokenGrid(5, 12, 12),
}
HEAD_DIM = {"tiny": 64}
TEXT_WIDTH = {"tiny": 512}
"""Where they are not those of Wan, 128 and 4096."""

NORM, PROJECTIONS, ATTENTION = (
    "norm, modulation",
    "self-attention: q, k, v, output",
    "self-attention: norms, RoPE, pairs",
)
BETWEEN, CROSS, FEED_FORWARD = "gate, residual, norm", "cross-attention", "feed-forward with norm, GELU, gate"
PARTS = (NORM, PROJECTIONS, ATTENTION, BETWEEN, CROSS, FEED_FORWARD)
"""Where a block spends its time. What quantizes the input of q, k and v counts to the norm where both are fused."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One contender.

    Attributes:
        contender: "stock", or a name of `CONTENDERS`.
        seconds: median of one block.
        over_stock: how many times as fast as stock.
        parts: seconds by part, of the run with the median.
        part_shares: operations per second over the GEMM peak, by part that multiplies.
        share_of_peak: the same of the whole block.
        sparsity: share of the pairs of tokens that was left out.
        relative_error: of the block's output against stock.
        cosine: between both outputs. Random weights attend everywhere, so that sparse attention is far off here.
        rest_seconds: of the forward pass outside the block: embedders and output layer, once per forward pass.
        engine: what multiplied, and on which path fused parts ran.
    """

    contender: str
    seconds: float
    over_stock: float
    parts: dict[str, float]
    part_shares: dict[str, float]
    share_of_peak: float
    sparsity: float
    relative_error: float
    cosine: float
    rest_seconds: float
    engine: str


@dataclasses.dataclass(frozen=True)
class BlockBenchmark:
    """What `bench_block` measured: shape, tokens, machine, dtype, operations per second of plain products, rows."""

    shape: str
    tokens: int
    machine: dict[str, Any]
    dtype: str
    gemm_peak: float
    keep_ratio: float
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)

    def markdown(self) -> str:
        """The contenders, then the parts of each: seconds, and in brackets the share of the GEMM peak."""
        title = f"### One block of {self.shape}, {self.tokens} tokens, {self.dtype}, keep {self.keep_ratio:g}"
        lines = [title, "", f"GEMM peak of this run: {self.gemm_peak / 1e9:.0f} GFLOP/s", ""]
        lines += [
            "| contender | seconds | over stock | share of peak | sparsity | error | cosine |",
            "|---|" + "---|" * 6,
        ]
        lines += [
            f"| {r.contender} | {r.seconds:.4f} | {r.over_stock:.2f}x | {r.share_of_peak:.2f} | {r.sparsity:.3f} "
            f"| {r.relative_error:.2e} | {r.cosine:.5f} |"
            for r in self.rows
        ]
        lines += [
            "",
            "| part | " + " | ".join(r.contender for r in self.rows) + " |",
            "|---|" + "---|" * len(self.rows),
        ]
        for part in PARTS:
            cells = [_cell(r.parts[part], r.part_shares.get(part)) for r in self.rows]
            lines.append(f"| {part} | " + " | ".join(cells) + " |")
        lines += [""] + [f"{r.contender}: {r.engine}  " for r in self.rows if r.engine]
        return "\n".join(lines) + "\n"


def bench_block(
    shape: str = "wan2.1-1.3b-480p",
    *,
    contenders: Sequence[str] = USUAL,
    tokens: int | None = None,
    keep_ratio: float = 0.03,
    block_sizes: tuple[int, int] = (128, 64),
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    repeats: int = 3,
) -> BlockBenchmark:
    """Measure stock and the contenders in turns.

    Args:
        shape: a name of `GRIDS`.
        contenders: names of `CONTENDERS`; stock always takes part.
        tokens: about so many tokens of video instead of the shape's own; the grid is shrunk on all sides.
        keep_ratio: of sparse contenders.
        block_sizes: tokens of a query and of a key block.
        device: where.
        dtype: of the model.
        repeats: rounds after one to warm up; the median counts.

    Raises:
        ConfigError: an unknown shape or contender, or settings that do not run on the device.
    """
    require(shape in GRIDS, "shape", shape, f"one of {', '.join(GRIDS)}")
    unknown = [name for name in contenders if name not in CONTENDERS]
    require(bool(contenders) and not unknown, "contenders", tuple(contenders), f"of {', '.join(CONTENDERS)}")
    require(repeats >= 1, "repeats", repeats, "at least 1")
    require(tokens is None or tokens >= 1, "tokens", tokens, "at least 1")
    grid = GRIDS[shape] if tokens is None else shrunk(GRIDS[shape], tokens)
    sizes = dataclasses.replace(SHAPES[shape], tokens=grid.num_tokens)
    runs = {STOCK: _Run(STOCK, one_block(shape, device, dtype))}
    for name in dict.fromkeys(contenders):
        runs[name] = _Run(name, copy.deepcopy(runs[STOCK].transformer))
        runs[name].accelerate(*CONTENDERS[name], keep_ratio, block_sizes, grid)
    for run in runs.values():
        run.listen()
    inputs = random_inputs(shape, grid, device, dtype)
    peak = gemm_peak(device, dtype)
    for _ in range(repeats + 1):
        for run in runs.values():
            run.forward(inputs)
    stock = runs[STOCK]
    rows = tuple(run.row(stock, sizes, peak) for run in runs.values())
    name = str(dtype).removeprefix("torch.")
    return BlockBenchmark(shape, grid.num_tokens, machine(device), name, peak, keep_ratio, rows)


def shrunk(grid: TokenGrid, tokens: int) -> TokenGrid:
    """A grid of about so many tokens in nearly the same proportions; the grid itself where that is not smaller."""
    factor = min((tokens / grid.num_tokens) ** (1 / 3), 1.0)
    return TokenGrid(*(max(round(side * factor), 1) for side in (grid.frames, grid.height, grid.width)))


class _Run:
    """One contender and its clocks: seconds of each round by part, and the output of the block."""

    def __init__(self, name: str, transformer: Any) -> None:
        self.name, self.transformer = name, transformer
        self.attention: InstalledAttention | None = None
        self.quantized: Any = None
        self.rounds: list[dict[str, float]] = []
        self.output: torch.Tensor | None = None
        self._inverse: torch.Tensor | None = None
        self._marks: dict[str, float] = {}
        self._projections = 0.0

    def accelerate(
        self,
        sparse: bool,
        fused: bool,
        mode: str,
        branch: str,
        keep_ratio: float,
        block_sizes: tuple[int, int],
        grid: TokenGrid,
    ) -> None:
        settings = attention_settings(keep_ratio, block_sizes, branch) if sparse else AttentionConfig()
        if sparse:
            order = grid.order(settings.token_order, settings.tile)
            self._inverse = None if order is None else inverse_order(order)
        self.attention = install(self.transformer, settings)
        if fused or mode != "none":
            precision = QuantizationConfig(mode=mode, fused=fused, originals="drop")  # type: ignore[arg-type]
            self.quantized = quantize_(self.transformer, precision)

    def listen(self) -> None:
        """Hooks of each part; those of single layers only where fusion calls them as modules all the same."""
        block = self.transformer.blocks[0]
        for name, module in (("block", block), ("attn1", block.attn1), ("attn2", block.attn2)):
            module.register_forward_pre_hook(lambda *_, name=name: self._mark(f"{name} begins"))
            module.register_forward_hook(lambda *args, name=name: self._end(name, args[-1]))
        for layer in (block.attn1.to_q, block.attn1.to_k, block.attn1.to_v, block.attn1.to_out[0]):
            layer.register_forward_pre_hook(lambda *_: self._mark("product begins"))
            layer.register_forward_hook(lambda *_: self._product())

    @torch.no_grad()
    def forward(self, inputs: dict[str, torch.Tensor]) -> None:
        self._projections = 0.0
        start = self._now()
        self.transformer(**inputs, return_dict=False)
        total, at = self._now() - start, self._marks
        block = at["block ends"] - at["block begins"]
        attention = at["attn1 ends"] - at["attn1 begins"]
        self.rounds.append({
            "block": block,
            "rest": total - block,
            NORM: at["attn1 begins"] - at["block begins"],
            PROJECTIONS: self._projections,
            ATTENTION: attention - self._projections,
            BETWEEN: at["attn2 begins"] - at["attn1 ends"],
            CROSS: at["attn2 ends"] - at["attn2 begins"],
            FEED_FORWARD: at["block ends"] - at["attn2 ends"],
        })  # fmt: skip

    def row(self, stock: _Run, sizes: BlockShape, peak: float) -> Row:
        # The first round warms up.
        seconds = statistics.median(entry["block"] for entry in self.rounds[1:])
        base = statistics.median(entry["block"] for entry in stock.rounds[1:])
        if not (seconds > 0 and base > 0):
            raise ConfigError(f"tokens: got {sizes.tokens}; must be enough to be timed")
        middle = min(self.rounds[1:], key=lambda entry: abs(entry["block"] - seconds))
        report = self.attention.report()[0] if self.attention is not None else {}
        sparsity = report.get("actual_sparsity") or 0.0
        work = operations(sizes, sparsity)
        shares = {part: count / middle[part] / peak for part, count in work.items() if middle[part] > 0}
        assert self.output is not None and stock.output is not None
        cosine = torch.nn.functional.cosine_similarity(
            self.output.flatten().double(), stock.output.flatten().double(), dim=0
        )
        return Row(
            self.name, seconds, base / seconds, {part: middle[part] for part in PARTS}, shares,
            sum(work.values()) / seconds / peak, sparsity, relative_error(self.output, stock.output), float(cosine),
            statistics.median(entry["rest"] for entry in self.rounds[1:]), self._engine(report),
        )  # fmt: skip

    def _engine(self, attention: dict[str, Any]) -> str:
        parts = [f"attention {attention['backend']}"] if attention else []
        if attention.get("branch_kernel"):
            parts.append(f"branch {attention['branch_kernel']}")
        if self.quantized is not None:
            report = self.quantized.report()
            parts.append(f"products {report.engine}; fused: {report.fused}")
        return ", ".join(parts)

    def _mark(self, name: str) -> None:
        self._marks[name] = self._now()

    def _end(self, name: str, output: Any) -> None:
        self._mark(f"{name} ends")
        if name == "block":
            out = output.detach().float().cpu()
            # Inside a transformer with sparse attention tokens lie in tile order.
            self.output = out if self._inverse is None else out.index_select(1, self._inverse)

    def _product(self) -> None:
        self._projections += self._now() - self._marks["product begins"]

    def _now(self) -> float:
        device = self.transformer.proj_out.weight.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()


def operations(sizes: BlockShape, sparsity: float) -> dict[str, float]:
    """Multiplications and additions of the products of each part of a block."""
    tokens, text, width = sizes.tokens, sizes.text_tokens, sizes.width
    return {
        PROJECTIONS: 4 * 2 * tokens * width**2,
        ATTENTION: 4 * tokens**2 * width * (1 - sparsity),
        CROSS: 2 * 2 * (tokens + text) * width**2 + 4 * tokens * text * width,
        FEED_FORWARD: 2 * 2 * tokens * width * sizes.ffn,
    }


def attention_settings(keep_ratio: float, block_sizes: tuple[int, int], branch: str) -> AttentionConfig:
    """The sparse attention that is measured, whatever the number of tokens."""
    return AttentionConfig(
        backend="auto", keep_ratio=keep_ratio, block_size_q=block_sizes[0], block_size_k=block_sizes[1],
        dense_below=0, branch=branch,  # type: ignore[arg-type]
    )  # fmt: skip


def one_block(shape: str, device: str, dtype: torch.dtype) -> Any:
    """A transformer of one layer with random weights, in the sizes of a shape."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    sizes, head_dim = SHAPES[shape], HEAD_DIM.get(shape, 128)
    with torch.device(device):
        transformer = WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=sizes.width // head_dim, attention_head_dim=head_dim,
            in_channels=16, out_channels=16, text_dim=TEXT_WIDTH.get(shape, 4096), freq_dim=256, ffn_dim=sizes.ffn,
            num_layers=1, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=1024,
        )  # fmt: skip
    transformer = transformer.eval().requires_grad_(False)
    # Gates of a size that lets every part of the block show in its output.
    transformer.blocks[0].scale_shift_table.normal_(std=0.5)
    return cast_weights(transformer, dtype)


def cast_weights(transformer: Any, dtype: torch.dtype) -> Any:
    """As diffusers loads a model in 16 bits: what its class names stays in float32, buffers as they are."""
    kept = set(transformer._keep_in_fp32_modules or ())
    for name, parameter in transformer.named_parameters():
        if not kept.intersection(name.split(".")):
            parameter.data = parameter.data.to(dtype)
    return transformer


def random_inputs(shape: str, grid: TokenGrid, device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What a forward pass over `grid` takes: random latents and text, and a time."""
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(1, 16, grid.frames, 2 * grid.height, 2 * grid.width, generator=generator)
    text = torch.randn(1, SHAPES[shape].text_tokens, TEXT_WIDTH.get(shape, 4096), generator=generator)
    return {
        "hidden_states": latents.to(device, dtype),
        "encoder_hidden_states": text.to(device, dtype),
        "timestep": torch.tensor([700], device=device),
    }


def _cell(seconds: float, share: float | None) -> str:
    return f"{seconds:.4f}" if share is None else f"{seconds:.4f} ({share:.2f})"
