"""The configuration of a transformer, read from the shapes of its tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.config import ConfigError, require
from .keys import ROLA, SLA

PATCH = (1, 2, 2)
HEAD_DIM = 128
"""Channels of a head in every published model."""

_DECISIVE = (
    "num_attention_heads", "attention_head_dim", "in_channels", "out_channels", "text_dim", "freq_dim", "ffn_dim",
    "num_layers", "cross_attn_norm", "image_dim", "added_kv_proj_dim", "pos_embed_seq_len",
)  # fmt: skip

Shapes = Mapping[str, tuple[int, ...]]


def infer_config(
    shapes: Shapes, *, side_config: Mapping[str, Any] | None, base_config: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Arguments of `WanTransformer3DModel` for tensors of these shapes.

    Args:
        shapes: by diffusers name, branch tensors included; the patch embedding may be flattened.
        side_config: `config.json` beside the file, Wan's or diffusers', or None.
        base_config: of the transformer of the base folder, or None.

    Raises:
        ConfigError: parts that no model can do without are missing, or the base is another model.
    """
    needed = {
        "patch_embedding.weight", "proj_out.weight", "condition_embedder.text_embedder.linear_1.weight",
        "condition_embedder.time_embedder.linear_1.weight", "blocks.0.ffn.net.0.proj.weight",
    }  # fmt: skip
    missing = sorted(needed - set(shapes))
    require(
        not missing,
        "source",
        missing,
        f"the weights of a Wan transformer; {len(missing)} tensors that say its shape are missing",
    )
    patch = shapes["patch_embedding.weight"]
    dim = patch[0]
    head_dim = _head_dim(shapes, dim, side_config, base_config)
    layers = 1 + max(int(found[1]) for name in shapes if (found := re.match(r"blocks\.(\d+)\.", name)))
    image = shapes.get("condition_embedder.image_embedder.norm1.weight")
    image_keys = next((s for n, s in shapes.items() if n.endswith("attn2.add_k_proj.weight")), None)
    positions = shapes.get("condition_embedder.image_embedder.pos_embed")
    volume = PATCH[0] * PATCH[1] * PATCH[2]
    made: dict[str, Any] = {
        "patch_size": list(PATCH),
        "num_attention_heads": dim // head_dim,
        "attention_head_dim": head_dim,
        "in_channels": patch[1] // volume if len(patch) == 2 else patch[1],
        "out_channels": shapes["proj_out.weight"][0] // volume,
        "text_dim": shapes["condition_embedder.text_embedder.linear_1.weight"][1],
        "freq_dim": shapes["condition_embedder.time_embedder.linear_1.weight"][1],
        "ffn_dim": shapes["blocks.0.ffn.net.0.proj.weight"][0],
        "num_layers": layers,
        "cross_attn_norm": any(name.endswith("norm2.weight") and name.startswith("blocks.") for name in shapes),
        "qk_norm": "rms_norm_across_heads",
        "eps": 1e-6,
        "image_dim": None if image is None else image[0],
        "added_kv_proj_dim": None if image_keys is None else image_keys[1],
        "rope_max_seq_len": 1024,
        "pos_embed_seq_len": None if positions is None else positions[1],
    }
    if (image is None) != (image_keys is None):
        lacking = "blocks.N.attn2.add_k_proj" if image_keys is None else "condition_embedder.image_embedder"
        raise ConfigError(f"source: got half an image branch, without {lacking}; must have all of it or none")
    if base_config is not None:
        _check_base(made, base_config)
        made |= {name: base_config[name] for name in ("eps", "rope_max_seq_len") if name in base_config}
    return made


def expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a transformer of that configuration; built without memory for its weights."""
    import torch
    from diffusers import WanTransformer3DModel

    with torch.device("meta"):
        model = WanTransformer3DModel(**config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def read_config(folder: Path) -> dict[str, Any] | None:
    """The `config.json` of a folder, or None."""
    file = folder / "config.json"
    if not file.is_file():
        return None
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file.name}: got a file that is no JSON ({error}); must be a JSON object") from error
    return data if isinstance(data, dict) else None


def _head_dim(
    shapes: Shapes, dim: int, side_config: Mapping[str, Any] | None, base_config: Mapping[str, Any] | None
) -> int:
    """Channels of a head: the branch knows, or a configuration does; else that of all published models."""
    for name, shape in shapes.items():
        if name.endswith(ROLA["gate_proj.weight"]):
            return shape[-1]
        if name.endswith(SLA["proj_l.weight"]):
            return shape[0]
    for config in (side_config or {}, base_config or {}):
        if "attention_head_dim" in config:
            return int(config["attention_head_dim"])
        if "num_heads" in config:
            return dim // int(config["num_heads"])
    require(dim % HEAD_DIM == 0, "source", f"width {dim}", f"a multiple of {HEAD_DIM}, or with a config.json beside it")
    return HEAD_DIM


def _check_base(made: Mapping[str, Any], base: Mapping[str, Any]) -> None:
    # `added_kv_proj_dim` and the like are absent from old configurations where they are None.
    wrong = [f"{name} {made[name]!r}, there {base.get(name)!r}" for name in _DECISIVE
             if name in base and made[name] != base.get(name)]  # fmt: skip
    image = base.get("image_dim") is not None and made["image_dim"] is None
    hint = " (the image branch is missing from the file)" if image else ""
    if wrong:
        differences = f"{'; '.join(wrong)}{hint}"
        raise ConfigError(f"base: got another model; must be the same but for its weights: {differences}")
