"""Names the motion of a track by the best of a few least-squares fits."""

from __future__ import annotations

import math

import numpy as np

MIN_TRAVEL = {"linear": 0.14, "bouncing": 0.13, "circling": 0.06}
"""Smallest distance, height or turning radius (shares of the frame): half of the world's smallest."""
MIN_EXPLAINED = 0.8
"""Share of the track's variance that the fit must explain."""


def detect_motion(track: np.ndarray, scale: tuple[float, float] = (1.0, 1.0)) -> tuple[str | None, float]:
    """Fit every motion of the world and keep the best.

    Args:
        track: centre (x, y) per frame, as shares of the frame, y down, NaN where unknown; `[num_frames, 2]`.
        scale: width and height in units of the shorter side.

    Returns:
        The motion, None if no fit explains the track or it hardly moves; and the RMS distance (shorter sides)
        from the best fit, NaN if there are fewer than four known positions.
    """
    known = ~np.isnan(track).any(axis=1)
    if known.sum() < 4:
        return None, math.nan
    u = np.linspace(0, 1, len(track))[known]
    x, y = track[known, 0], track[known, 1]
    target = np.concatenate([x, y])
    zero, one = np.zeros_like(u), np.ones_like(u)
    turn = 2 * math.pi * u
    center = [np.concatenate([one, zero]), np.concatenate([zero, one])]
    bases = {
        "horizontal": [np.concatenate([u, zero])],
        "vertical": [np.concatenate([zero, u])],
        "bouncing": [np.concatenate([zero, 1 - np.abs(2 * u - 1)])],
        # Clockwise with y down: (p, q) = radius * (cos, sin) of the starting angle.
        "circling": [
            np.concatenate([np.cos(turn), np.sin(turn)]),
            np.concatenate([-np.sin(turn), np.cos(turn)]),
        ],
    }
    weights = np.concatenate([np.full(len(u), scale[0]), np.full(len(u), scale[1])])
    fits = {}
    for name, basis in bases.items():
        design = np.stack(center + basis, axis=1)
        solution = np.linalg.lstsq(design, target, rcond=None)[0]
        residual = (target - design @ solution) * weights
        fits[name] = (math.sqrt(float(np.square(residual).sum()) / len(u)), solution[2:])
    best = min(fits, key=lambda name: fits[name][0])
    error, amplitude = fits[best]
    spread = np.square(np.stack([x - x.mean(), y - y.mean()], 1) * np.asarray(scale)).sum(axis=1).mean()
    if error**2 > (1 - MIN_EXPLAINED) * spread:
        return None, error
    return _name(best, amplitude), error


def _name(kind: str, amplitude: np.ndarray) -> str | None:
    if kind == "circling":
        return "circling" if float(np.hypot(*amplitude)) >= MIN_TRAVEL["circling"] else None
    travel = float(amplitude[0])
    if kind == "bouncing":  # downwards first; thrown up and back is no motion of this world
        return "bouncing" if travel >= MIN_TRAVEL["bouncing"] else None
    if abs(travel) < MIN_TRAVEL["linear"]:
        return None
    if kind == "horizontal":
        return "right" if travel > 0 else "left"
    return "down" if travel > 0 else "up"
