"""Pixel and latent distances between two results for the same seed."""

from __future__ import annotations

import math

import numpy as np
import torch


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Peak signal-to-noise ratio (dB) of two uint8 clips of equal shape; infinity if they are equal.

    Raises:
        ValueError: different shapes.
    """
    if a.shape != b.shape:
        raise ValueError(f"b: got shape {b.shape}; must be that of a, {a.shape}")
    error = float(np.square(a.astype(np.float64) - b.astype(np.float64)).mean())
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)


def latent_relative_error(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the reference.

    Raises:
        ValueError: different shapes, or a reference of zeros.
    """
    if actual.shape != reference.shape:
        raise ValueError(f"actual: got shape {list(actual.shape)}; must be {list(reference.shape)}")
    norm = reference.double().norm()
    if norm == 0:
        raise ValueError("reference: got all zeros; must have a non-zero norm")
    return float((actual.double() - reference.double()).norm() / norm)
