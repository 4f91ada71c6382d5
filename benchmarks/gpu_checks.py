"""Every kernel for real: each Triton kernel and engine of this package on the GPU that is here, against its reference.

The rules are those of the tests (`core.numerics.three_way`, `attention.testing.check_backend`), and nothing but torch
and Triton is needed. On a CPU the same checks run under Triton's interpreter, at small sizes: a rehearsal.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..attention.backends import available_backends, get_backend
from ..attention.config import AttentionConfig
from ..attention.grid import TokenGrid
from ..core.numerics import relative_error, three_way

INT8_ATTENTION_LIMIT = 0.02
"""Relative error of attention whose queries and keys are rounded to eight bits."""
PRODUCT_LIMITS = {"int8": 0.03, "fp8": 0.06}
"""Relative error of a product of Gaussian numbers in eight bits, per output channel and row."""
BLOCK_LIMITS = {"none": 0.02, "int8": 0.06, "fp8": 0.12}
"""Of a fused block against stock diffusers in the same precision: rounding in another order, and eight bits."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large the checks are: token counts of attention and rows of the fused parts, dtypes, widths."""

    lengths: tuple[int, ...]
    dtypes: tuple[str, ...]
    head_dims: tuple[int, ...]
    block_sizes: tuple[tuple[int, int], ...]
    rola_lengths: tuple[int, ...]
    rows: int
    width: int
    ffn: int


FULL = Sizes(
    (1, 63, 65, 777, 4001), ("float32", "bfloat16", "float16"), (64, 128, 32),
    ((64, 64), (128, 64), (16, 16), (32, 16)),
    (17, 1000, 4001), 4097, 1536, 8960,
)  # fmt: skip
SMALL = Sizes((5, 65), ("float32", "float16"), (32, 64), ((16, 16), (32, 16)), (17, 40), 9, 64, 130)


@dataclasses.dataclass(frozen=True)
class Check:
    """One check: what, whether it is right, what was found, and how long it took (its first compilation included)."""

    name: str
    ok: bool
    detail: str
    seconds: float


def kernel_checks(device: str, sizes: Sizes) -> Iterator[Check]:
    """All checks, one after the other; a check that raises is one that failed."""
    for name, call in _calls(device, sizes):
        start = time.perf_counter()
        try:
            ok, detail = call()
        except Exception as error:  # whatever a kernel does, the others are still worth knowing
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{last.filename.rpartition('/')[2]}:{last.lineno}"
            ok, detail = False, f"{type(error).__name__} at {place}: {' '.join(str(error).split())[:500]}"
        yield Check(name, ok, detail, time.perf_counter() - start)


def _calls(device: str, sizes: Sizes) -> Iterator[tuple[str, Callable[[], tuple[bool, str]]]]:
    kind = device.partition(":")[0]
    for name in available_backends():
        if name in ("auto", "dense", "reference"):
            continue
        # flex compiles for every shape, on a CPU with a C++ compiler: its own tests have that.
        if (kind == "cpu" and name == "flex") or not _runs(name, device, sizes):
            continue
        yield f"attention backend {name}", lambda name=name: _backend(name, device, sizes)  # type: ignore[misc]
    for length in sizes.rola_lengths:
        for dtype in sizes.dtypes:
            yield f"RoLA kernels, {length} tokens, {dtype}", lambda n=length, d=dtype: _rola(device, n, d)  # type: ignore[misc]
    for dtype in sizes.dtypes:
        for number in (None, "int8", "fp8"):
            label = f"fused parts, {dtype}, rows in {number or 'no'} eight bits"
            yield label, lambda d=dtype, n=number: _fused(device, sizes, d, n)  # type: ignore[misc]
    for number in ("int8", "fp8"):
        yield f"products in {number}", lambda n=number: _product(device, sizes, n)  # type: ignore[misc]
    for mode in ("none", "int8", "fp8"):
        yield f"fused Wan block, {mode}", lambda m=mode: _block(device, sizes, m)  # type: ignore[misc]


def _runs(name: str, device: str, sizes: Sizes) -> bool:
    """Whether a backend is for this device at all, in some of the dtypes and sizes."""
    cases = itertools.product(sizes.dtypes, sizes.head_dims, sizes.block_sizes)
    return any(name in able_backends(device, dtype, dim, blocks) for dtype, dim, blocks in cases)


def _backend(name: str, device: str, sizes: Sizes) -> tuple[bool, str]:
    from ..attention.testing import ConformanceError, check_backend

    limit = INT8_ATTENTION_LIMIT if name == "triton_int8" else None
    try:
        report = check_backend(
            name, device=device, lengths=sizes.lengths, dtypes=sizes.dtypes, head_dims=sizes.head_dims,
            block_sizes=sizes.block_sizes, max_relative_error=limit,
        )  # fmt: skip
    except ConformanceError as error:
        lines = str(error).splitlines()
        return False, "; ".join(lines[:6]) + (f"; and {len(lines) - 6} more" if len(lines) > 6 else "")
    skipped = f", {len(report.skipped)} cases that it refuses" if report.skipped else ""
    return True, f"{len(report.findings)} findings, none wrong{skipped}"


def _normal(device: str, dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _rola(device: str, length: int, dtype_name: str) -> tuple[bool, str]:
    """Output and gradients of the kernels against the torch path in the same dtype, both against float64."""
    from ..attention.rola.frequencies import select_columns, token_angles
    from ..attention.rola.fused import LinearForm, linear_branch
    from ..attention.rola.triton_branch import rola_triton

    dtype, heads, dim, rank = getattr(torch, dtype_name), 2, 64, 32
    form = LinearForm("silu", "rms", True)
    angles = token_angles(TokenGrid(length, 1, 1), dim)[:, list(select_columns("prefix", rank, dim))]
    tensors = [_normal(device, dtype, 1, length, heads, dim, seed=seed) for seed in range(4)]
    tensors.append(_normal(device, torch.float32, 1, length, heads, seed=4).sigmoid())
    tensors += [_normal(device, torch.float32, rank, dim, seed=seed) * dim**-0.5 for seed in (5, 6)]
    slope = _normal(device, dtype, 1, length, heads, dim, seed=7)

    def run(kernels: bool, kind: torch.dtype | None) -> list[torch.Tensor]:
        own = [(t if kind is None else t.to(kind)).detach().clone().requires_grad_() for t in tensors]
        wide = torch.float64 if kind == torch.float64 else torch.float32
        cos, sin = angles.cos().to(device, wide), angles.sin().to(device, wide)
        names = ("gate", "map_q", "map_k")
        if kernels:
            out = rola_triton(form, *own, cos, sin)  # type: ignore[call-arg]
        else:
            named: dict[str, Any] = dict(zip(names, own[4:], strict=True))
            out = linear_branch(form, *own[:4], cos=cos, sin=sin, **named)
        return [out.detach(), *torch.autograd.grad(out, own, slope.to(out.dtype))]

    actual, low, truth = run(True, None), run(False, None), run(False, torch.float64)
    labels = ("output", "sparse", "query", "key", "value", "gate", "map_q", "map_k")
    faults = []
    for label, got, near, want in zip(labels, actual, low, truth, strict=True):
        outcome = three_way(got, near, want, 2.0 if label == "output" else 3.0)
        if not outcome.ok:
            faults.append(f"{label}: {outcome.message}")
    worst = max(relative_error(got, want) for got, want in zip(actual, truth, strict=True))
    return not faults, "; ".join(faults) or f"output and seven gradients, largest relative error {worst:.1e}"


def _fused(device: str, sizes: Sizes, dtype_name: str, number: str | None) -> tuple[bool, str]:
    from ..quantization import fused

    dtype, rows, width = getattr(torch, dtype_name), sizes.rows, sizes.width
    if number is not None and not fused.kernel_writes(number, torch.device(device)):  # type: ignore[arg-type]
        return True, f"this GPU's kernels do not write {number}; the torch path does"
    x = _normal(device, dtype, 1, rows, width) * 3 + 1
    wide = _normal(device, dtype, 1, rows, sizes.ffn, seed=1) * 3
    scale, shift = (_normal(device, torch.float32, 1, 1, width, seed=seed) for seed in (2, 3))
    faults = []

    def hold(label: str, made: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> None:
        outcome = three_way(made, plain, exact)
        if not outcome.ok:
            faults.append(f"{label}: {outcome.message}")

    def rows_of(label: str, quantized: fused.QuantizedRows | None, y: torch.Tensor) -> None:
        if number is None or quantized is None:
            return
        wanted = fused.quantize(y, number)  # type: ignore[arg-type]
        same = torch.equal(quantized.scale, wanted.scale)
        if not (same and torch.equal(quantized.values.float(), wanted.values.float())):
            faults.append(f"{label}: eight-bit rows differ from those of the torch path")

    settings = {"number": number}
    y, quantized = fused.layer_norm_modulate(x, scale, shift, 1e-6, path="triton", **settings)  # type: ignore[arg-type]
    plain, _ = fused.layer_norm_modulate(x, scale, shift, 1e-6)
    hold("norm and modulation", y, plain, fused.layer_norm_modulate_reference(x, scale, shift, 1e-6))
    rows_of("norm and modulation", quantized, y)
    y, quantized = fused.gelu_tanh(wide, path="triton", **settings)  # type: ignore[arg-type]
    hold("GELU", y, fused.gelu_tanh(wide)[0], fused.gelu_tanh_reference(wide))
    rows_of("GELU", quantized, y)
    if number is not None:
        rows_of("quantization alone", fused.quantize(x[0], number, path="triton"), x[0])  # type: ignore[arg-type]
        return not faults, "; ".join(faults) or f"three parts, rows equal bit for bit in {number}"
    weight, heads = _normal(device, dtype, width, seed=4), width // 64 or 1
    angles = _normal("cpu", torch.float32, 1, rows, 1, width // heads // 2, seed=5).mul(6).repeat_interleave(2, dim=-1)
    cos, sin = angles.cos().to(device), angles.sin().to(device)
    y = fused.rms_norm_rope(x, weight, 1e-6, cos, sin, heads, path="triton")
    plain = fused.rms_norm_rope(x, weight, 1e-6, cos, sin, heads)
    hold("norm and rotation", y, plain, fused.rms_norm_rope_reference(x, weight, 1e-6, cos, sin, heads))
    update = _normal(device, dtype, 1, rows, width, seed=6)
    y = fused.residual_gate(x, update, scale, path="triton")
    hold("residual and gate", y, fused.residual_gate(x, update, scale), fused.residual_gate_reference(x, update, scale))
    return not faults, "; ".join(faults) or "four parts"


@torch.no_grad()
def _product(device: str, sizes: Sizes, number: str) -> tuple[bool, str]:
    """A quantized layer on rows that no block divides, with a row of zeros."""
    from ..quantization.config import QuantizationConfig
    from ..quantization.convert import quantize_

    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    holder = torch.nn.ModuleDict({"layer": torch.nn.Linear(sizes.width, sizes.ffn // 16 * 16)})
    holder = holder.to(device, dtype).requires_grad_(False)
    linear: torch.nn.Linear = holder["layer"]  # type: ignore[assignment]
    weight, bias = linear.weight.float(), linear.bias.float()
    x = _normal(device, dtype, sizes.rows, sizes.width)
    x[0] = 0
    exact = torch.nn.functional.linear(x.float(), weight, bias)
    quantize_(holder, QuantizationConfig(mode=number, include=("layer",), exclude=(), originals="drop"))  # type: ignore[arg-type]
    layer: Any = holder["layer"]
    made, engine = layer(x), layer.engine_on(x.device, dtype)
    error, zero = relative_error(made, exact), relative_error(made[0], bias)
    good = error <= PRODUCT_LIMITS[number] and zero <= 0.01
    return good, f"relative error {error:.2%} (at most {PRODUCT_LIMITS[number]:.0%}); {engine}"


@torch.no_grad()
def _block(device: str, sizes: Sizes, mode: str) -> tuple[bool, str]:
    """A whole transformer of one fused block, against stock diffusers in the same dtype."""
    from diffusers import WanTransformer3DModel

    from ..quantization.config import QuantizationConfig
    from ..quantization.convert import quantize_
    from .block import cast_weights

    torch.manual_seed(0)
    head_dim = 128 if sizes.width >= 1024 else 32
    with torch.device(device):
        model = WanTransformer3DModel(
            num_attention_heads=max(1, sizes.width // head_dim), attention_head_dim=head_dim, text_dim=64,
            freq_dim=32, ffn_dim=sizes.ffn // 16 * 16, num_layers=1,
        )  # fmt: skip
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    model = cast_weights(model.eval().requires_grad_(False), dtype)
    grid = (5, 30, 52) if device.startswith("cuda") else (1, 6, 4)
    latents = _normal(device, dtype, 1, 16, grid[0], 2 * grid[1], 2 * grid[2])
    text, times = _normal(device, dtype, 1, 32, 64, seed=1), torch.tensor([700], device=device)

    def run() -> torch.Tensor:
        return model(latents, times, text, return_dict=False)[0].float()

    stock = run()
    installed = quantize_(model, QuantizationConfig(mode=mode, fused=True, originals="drop"))  # type: ignore[arg-type]
    error = relative_error(run(), stock)
    return error <= BLOCK_LIMITS[mode], f"relative error {error:.2%} (at most {BLOCK_LIMITS[mode]:.0%}); " + (
        f"path {installed.report().fused}"
    )


def able_backends(device: str, dtype: str, head_dim: int, block_sizes: tuple[int, int]) -> list[str]:
    """Sparse backends that can run on a device."""
    able = []
    for name in available_backends():
        if name in ("auto", "dense", "reference"):
            continue
        config = AttentionConfig(name, block_size_q=block_sizes[0], block_size_k=block_sizes[1])
        if not get_backend(name).constraints.problems(config, device.partition(":")[0], dtype, head_dim):
            able.append(name)
    return able
