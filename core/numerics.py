"""How far two tensors are apart, and whether a low-precision result is as good as can be expected.

`three_way` holds the rule that tests and benchmarks share: with a float32 `reference`, a kernel may be off by at most
`factor` times what a plain low-precision computation is off. The rounding noise is measured, not guessed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ThreeWayResult:
    """Outcome of `three_way`; both errors are the largest absolute deviation from the reference."""

    ok: bool
    actual_error: float
    allowed_error: float
    message: str

    def __bool__(self) -> bool:
        return self.ok


def relative_error(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of `reference`, computed in float64.

    Returns:
        0 for equal tensors; inf where the reference is all zero and `actual` is not; NaN where either holds NaN.

    Raises:
        ValueError: the shapes differ.
    """
    left, right = _pair(actual, reference)
    difference, size = float(torch.linalg.vector_norm(left - right)), float(torch.linalg.vector_norm(right))
    if size == 0:
        return difference if difference == 0 or math.isnan(difference) else math.inf
    return difference / size


def sqnr_db(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Signal to quantisation noise ratio in dB, -20 log10(relative error); inf for equal tensors.

    Raises:
        ValueError: the shapes differ.
    """
    error = relative_error(actual, reference)
    if error == 0:
        return math.inf
    return -math.inf if math.isinf(error) else -20 * math.log10(error)


def three_way(
    actual: torch.Tensor, low_precision: torch.Tensor, reference: torch.Tensor, factor: float = 2.0
) -> ThreeWayResult:
    """Check max|actual - reference| <= factor * max|low_precision - reference|.

    Args:
        actual: result under test.
        low_precision: the same quantity by plain operations in the precision of `actual`.
        reference: the same quantity in float32 or better.
        factor: allowance; 2 for outputs, 3 for gradients.

    Returns:
        A result that is false for a NaN or an infinity in any of the three, with the numbers in `.message`.

    Raises:
        ValueError: the shapes differ.
    """
    actual_error = _largest_deviation(actual, reference)
    noise = _largest_deviation(low_precision, reference)
    # One unit in the last place of the largest value: a plain result may happen to be exact.
    largest = float(reference.detach().double().abs().max()) if reference.numel() else 0.0
    floor = torch.finfo(actual.dtype).eps * largest if actual.is_floating_point() else 0.0
    allowed = max(factor * noise, floor)
    ok = math.isfinite(actual_error) and math.isfinite(noise) and actual_error <= allowed
    message = (
        f"largest error {actual_error:.3e}, allowed {allowed:.3e} "
        f"({factor:g} x {noise:.3e} of plain {str(low_precision.dtype).removeprefix('torch.')})"
    )
    return ThreeWayResult(ok=ok, actual_error=actual_error, allowed_error=allowed, message=message)


def _pair(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if left.shape != right.shape:
        raise ValueError(f"shapes differ: {tuple(left.shape)} and {tuple(right.shape)}; must be equal")
    return left.detach().double(), right.detach().double()


def _largest_deviation(left: torch.Tensor, right: torch.Tensor) -> float:
    left, right = _pair(left, right)
    return float((left - right).abs().max()) if left.numel() else 0.0
