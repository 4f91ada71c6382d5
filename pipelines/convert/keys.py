"""Names of the tensors of a Wan transformer, in Wan's own files and in diffusers, one to one in both directions.

| part | Wan's files | diffusers |
|---|---|---|
| self-attention | `blocks.N.self_attn.q` `.k` `.v` `.o` `.norm_q` `.norm_k` | `blocks.N.attn1.to_q` ... `.to_out.0` |
| cross-attention | `blocks.N.cross_attn.*`, `.k_img` `.v_img` `.norm_k_img` | `blocks.N.attn2.*`, `.add_k_proj` ... |
| feed-forward | `blocks.N.ffn.0`, `.2` | `blocks.N.ffn.net.0.proj`, `.net.2` |
| norm before cross-attention | `blocks.N.norm3` | `blocks.N.norm2` |
| modulation | `blocks.N.modulation`, `head.modulation` | `scale_shift_table` |
| linear branch, RoLA | `blocks.N.self_attn.proj_q.weight`, ... | `blocks.N.attn1.linear_branch.proj_q.weight`, ... |
| linear branch, SLA | `blocks.N.self_attn.attn_op.local_attn.proj_l.*` | `blocks.N.attn1.linear_branch.proj.*` |
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ...core.config import require

_TOP = {
    "patch_embedding": "patch_embedding",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
    "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
    "img_emb.proj.4": "condition_embedder.image_embedder.norm2",
    "img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed",
    "head.head": "proj_out",
    "head.modulation": "scale_shift_table",
}
_ATTENTION = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0", "norm_q": "norm_q", "norm_k": "norm_k"}
_BLOCK = {
    **{f"self_attn.{native}": f"attn1.{ours}" for native, ours in _ATTENTION.items()},
    **{f"cross_attn.{native}": f"attn2.{ours}" for native, ours in _ATTENTION.items()},
    "cross_attn.k_img": "attn2.add_k_proj",
    "cross_attn.v_img": "attn2.add_v_proj",
    "cross_attn.norm_k_img": "attn2.norm_added_k",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
    "norm3": "norm2",
    "modulation": "scale_shift_table",
}
_BRANCH = "attn1.linear_branch"
ROLA = {name: f"{_BRANCH}.{name}" for name in ("proj_q.weight", "proj_k.weight", "gate_proj.weight", "gate_bias")}
"""The four tensors of a RoLA layer, below `self_attn` and below the block."""
SLA = {
    f"{place}.{leaf}": f"{_BRANCH}.proj.{leaf}"
    for place in ("attn_op.local_attn.proj_l", "attn_impl.proj_l", "proj_l")
    for leaf in ("weight", "bias")
}
"""The tensors of an SLA layer in the places where they are found."""

BRANCH_MARK = f".{_BRANCH}."
"""What the diffusers name of a tensor of a linear branch holds."""

_BACK_TOP = {ours: native for native, ours in _TOP.items()}
_BACK_BLOCK = {ours: native for native, ours in _BLOCK.items()}
_PREFIXES = ("model.diffusion_model", "diffusion_model", "state_dict", "generator_ema", "generator", "net_ema", "net",
             "ema", "model", "module", "transformer", "_fsdp_wrapped_module")  # fmt: skip
_EMA = ("generator_ema", "net_ema", "ema")
_MARKERS = re.compile(r"(^|\.)(scaled_fp8|_extra_state)$")
_UNUSED = re.compile(r"(^|\.)(norm_q_img|norm_added_q)\.weight$")
_BLOCK_NAME = re.compile(r"blocks\.(\d+)\.(.+)")

SCALES = ("weight_scale", "scale_weight", "scale")
"""Names that the scale of an eight-bit weight has beside it."""
STATIC_SCALES = ("input_scale", "scale_input")
"""Scales of activations that some files carry; here every token has its own."""


def module_to_diffusers(name: str) -> str | None:
    """The diffusers name of a module or bare parameter of Wan; None where there is none.

    Example: "blocks.3.self_attn.o" gives "blocks.3.attn1.to_out.0".
    """
    found = _BLOCK_NAME.fullmatch(name)
    if found is None:
        return _TOP.get(name)
    ours = _BLOCK.get(found[2])
    return None if ours is None else f"blocks.{found[1]}.{ours}"


def module_to_native(name: str) -> str | None:
    """Undo `module_to_diffusers`."""
    found = _BLOCK_NAME.fullmatch(name)
    if found is None:
        return _BACK_TOP.get(name)
    native = _BACK_BLOCK.get(found[2])
    return None if native is None else f"blocks.{found[1]}.{native}"


def tensor_to_diffusers(name: str) -> str | None:
    """The diffusers name of a tensor of Wan's files, branch tensors and scales included; None where there is none."""
    bare = module_to_diffusers(name)
    if bare is not None and name.endswith(("modulation", "emb_pos")):
        return bare
    found = _BLOCK_NAME.fullmatch(name)
    if found is not None and (branch := branch_to_diffusers(found[2])) is not None:
        return f"blocks.{found[1]}.{branch}"
    module, _, leaf = name.rpartition(".")
    ours = module_to_diffusers(module)
    return None if ours is None else f"{ours}.{leaf}"


def branch_to_diffusers(rest: str) -> str | None:
    """The name below the block of a branch tensor, in Wan's ("self_attn...") or FastVideo's ("attn1...") place."""
    for attention in ("self_attn.", "attn1."):
        if rest.startswith(attention):
            tail = rest.removeprefix(attention)
            return ROLA.get(tail) or SLA.get(tail)
    return None


def tensor_to_native(name: str) -> str | None:
    """Undo `tensor_to_diffusers`; SLA tensors go to the first of their places."""
    bare = module_to_native(name)
    if bare is not None and name.endswith(("scale_shift_table", "pos_embed")):
        return bare
    found = _BLOCK_NAME.fullmatch(name)
    if found is not None:
        for table in (ROLA, SLA):
            for native, ours in table.items():
                if ours == found[2]:
                    return f"blocks.{found[1]}.self_attn.{native}"
    module, _, leaf = name.rpartition(".")
    native_module = module_to_native(module)
    return None if native_module is None else f"{native_module}.{leaf}"


def any_to_diffusers(name: str) -> str | None:
    """The diffusers name of a tensor that has Wan's name or diffusers' already; None where it has neither."""
    ours = tensor_to_diffusers(name)
    if ours is not None:
        return ours
    if tensor_to_native(name) is not None:
        return name
    found = _BLOCK_NAME.fullmatch(name)
    branch = None if found is None else branch_to_diffusers(found[2])
    return None if found is None or branch is None else f"blocks.{found[1]}.{branch}"


def is_marker(name: str) -> bool:
    """Whether an entry says something about the file and is no tensor of the model."""
    return _MARKERS.search(name) is not None


def is_unused(name: str) -> bool:
    """Whether a tensor is in some files although no Wan model computes with it: a norm of queries for the image."""
    return _UNUSED.search(name) is not None


def strip_prefixes(names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Take away what training code puts before the names of the model.

    Where a file holds the model twice, as trained and as a running average, the average is taken.

    Returns:
        Bare name -> name in the file, and what to tell the user.

    Raises:
        ConfigError: two models, of which none or both are averages.
    """
    groups: dict[tuple[str, ...], dict[str, str]] = {}
    for name in names:
        bare, prefix = name, []
        while (found := next((p for p in _PREFIXES if bare.startswith(f"{p}.")), None)) is not None:
            prefix.append(found)
            bare = bare.removeprefix(f"{found}.")
        groups.setdefault(tuple(prefix), {})[bare] = name
    if len(groups) == 1:
        return next(iter(groups.values())), []
    models = {prefix: group for prefix, group in groups.items() if "patch_embedding.weight" in group}
    averaged = [prefix for prefix in models if set(prefix) & set(_EMA)]
    if len(models) < 2 or len(averaged) != 1:
        merged: dict[str, str] = {}
        twice: list[str] = []
        for group in groups.values():
            twice += [name for bare, name in group.items() if bare in merged]
            merged |= group
        rule = "one model, or one and its running average"
        require(not twice, "source", f"{len(twice)} tensors a second time ({', '.join(twice[:3])})", rule)
        return merged, []
    taken, left = averaged[0], [prefix for prefix in groups if prefix != averaged[0]]
    count = sum(len(groups[prefix]) for prefix in left)
    names_left = ", ".join(repr(".".join(prefix)) for prefix in left)
    return groups[taken], [
        f"{'.'.join(taken)!r} is taken, the running average; {count} tensors under {names_left} are not"
    ]
