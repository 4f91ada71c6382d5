"""Adapter to NVIDIA's Transformer Engine (extra `te`): its recipes by name, and one layer in its hands.

Written against the API of releases 2.15 and later. Its package needs CUDA even to be imported, so here only the
translation and the absence were run; what multiplies is marked `gpu` in the tests.

| name | recipe | hardware |
|---|---|---|
| `current_scaling` | `Float8CurrentScaling`: one scale per tensor, of this very tensor | Ada, Hopper, Blackwell |
| `delayed_scaling` | `DelayedScaling`: one scale per tensor, from the last 1024 | Ada, Hopper, Blackwell |
| `block_scaling` | `Float8BlockScaling`: 1 x 128 and 128 x 128 blocks | Hopper |
| `mxfp8` | `MXFP8BlockScaling`: blocks of 32 with power-of-two scales | Blackwell |
| `nvfp4` | `NVFP4BlockScaling`: blocks of 16 in four bits | Blackwell |
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..core.config import ConfigError
from .config import QuantizationConfig
from .linear import ReplacedLinear

_RECIPES = {
    "current_scaling": "Float8CurrentScaling",
    "delayed_scaling": "DelayedScaling",
    "block_scaling": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
_ROW_MULTIPLE = 32
"""Rows are filled up to this: FP8 products ask for 16, blocks of MXFP8 for 32."""


def translate(name: str) -> Any:
    """The recipe object of this name.

    Raises:
        ConfigError: Transformer Engine is not installed or does not run here, or is too old for the recipe.
    """
    try:
        recipes = importlib.import_module("transformer_engine.common.recipe")
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:
        # Without its CUDA core the package raises RuntimeError, OSError or FileNotFoundError rather than ImportError.
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"engine: got 'transformer_engine', which cannot be used here ({first}); must be installed with its CUDA "
            "core: pip install videospark[te], on a machine with an NVIDIA GPU. Without it: engine 'auto'"
        ) from error
    kind = getattr(recipes, _RECIPES[name], None)
    if kind is None:
        rule = f"one that this release of Transformer Engine has; it lacks {_RECIPES[name]}"
        raise ConfigError(f"transformer_engine_recipe: got {name!r}; must be {rule}")
    if name == "delayed_scaling":
        return kind(margin=0, fp8_format=recipes.Format.HYBRID, amax_history_len=1024, amax_compute_algo="max")
    return kind()


class TransformerEngineLinear(ReplacedLinear):
    """A `transformer_engine.pytorch.Linear` with a copy of the weights, run under the chosen recipe."""

    def __init__(self, linear: nn.Linear, config: QuantizationConfig) -> None:
        super().__init__(linear.in_features, linear.out_features)
        self.recipe = translate(config.transformer_engine_recipe)
        engine = importlib.import_module("transformer_engine.pytorch")
        # Releases before 2.9 only know the older name of the context.
        self._autocast = getattr(engine, "autocast", None)
        self._old_autocast = getattr(engine, "fp8_autocast", None)
        inner = engine.Linear(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            params_dtype=linear.weight.dtype,
            device=linear.weight.device,
        )
        with torch.no_grad():
            inner.weight.copy_(linear.weight)
            if linear.bias is not None:
                inner.bias.copy_(linear.bias)
        self.inner = inner
        self.eval()

    def low_precision(self, x: torch.Tensor) -> torch.Tensor:
        """The product as Transformer Engine computes it; rows are filled up with zeros and cut off again."""
        flat = x.reshape(-1, self.in_features)
        count = flat.shape[0]
        flat = F.pad(flat, (0, 0, 0, -count % _ROW_MULTIPLE))
        if self._autocast is not None:
            context = self._autocast(enabled=True, recipe=self.recipe)
        else:
            assert self._old_autocast is not None
            context = self._old_autocast(enabled=True, fp8_recipe=self.recipe)
        with context:
            out = self.inner(flat)
        return out[:count].reshape(*x.shape[:-1], self.out_features)
