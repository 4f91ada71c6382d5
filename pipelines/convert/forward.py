"""From a checkpoint to a folder of the diffusers layout, with the recipe that it was made for."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ...core.config import ConfigError, require, save_file
from ...quantization.config import QuantizationConfig
from ...quantization.loading import QUANTIZED_FILE, quantized_metadata
from ..loading import BRANCH_FILE, DEFAULTS_FILE, RECIPE_FILE
from ..recipe import Recipe
from .architecture import infer_config, read_config
from .mapping import Mapped, check, match_names, num_widened, plan, plan_branch
from .reader import TensorFiles
from .sources import EXPERTS, Source, find_sources
from .students import FORMATS, RECIPE_KEY, Found, Student, Wishes, carried_student, detect_format, student_of
from .writer import MAX_SHARD_BYTES, check_target, copy_tree, whole_folder, write_safetensors, write_weights

DTYPES = {"keep": None, "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class ConversionReport:
    """What was converted.

    Attributes:
        folder: where it is now.
        format: the kind of the checkpoint.
        transformers: by name: tensors, branch_tensors, parameters, bytes, widened (from eight bits), files.
        recipe: name of the recipe, or None.
        complete: whether the folder is a whole pipeline, which takes a base.
        notes: what the user should know.
    """

    folder: Path
    format: str
    transformers: dict[str, dict[str, int]]
    recipe: str | None
    complete: bool
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "folder": str(self.folder), "format": self.format, "transformers": self.transformers,
            "recipe": self.recipe, "complete": self.complete, "notes": list(self.notes),
        }  # fmt: skip


def convert_checkpoint(
    source: str | Path,
    to: str | Path,
    *,
    low: str | Path | None = None,
    base: str | Path | None = None,
    format: str = "auto",
    sparsity: float | None = None,
    steps: int | None = None,
    backend: str = "auto",
    dtype: str = "keep",
    drop_gate: bool = False,
    quantize: str = "none",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> ConversionReport:
    """Convert a checkpoint, tensor by tensor, into a folder that appears once it is complete.

    Args:
        source: a .pth or .safetensors file, or a folder of them; of a pair of experts the high-noise one.
        to: the folder to make.
        low: the low-noise expert, where its name is not that of the other with "low" for "high".
        base: a diffusers folder of the same model: its text encoder, VAE, tokenizer and scheduler are taken over (hard
            links where possible), and its configuration is what the weights have to fit.
        format: one of `FORMATS`.
        sparsity: at which a student was trained, where the name of its file does not say.
        steps: its number of steps, likewise.
        backend: that the recipe names for sparse attention; "auto" takes the best of the device.
        dtype: "keep", "bfloat16", "float16" or "float32" for the backbone; branches keep their own.
        drop_gate: leave FastVideo's gate out.
        quantize: "fp8" or "int8": the products of the blocks are written in eight bits, and the recipe runs them so. It
            loads without being quantized again, and cannot go back to 16 bits. "none" keeps 16 bits.
        max_shard_bytes: largest file to write.

    Raises:
        ConfigError: whatever is missing, unknown or does not fit; nothing is written then.
        FileNotFoundError: no such source.
    """
    source, to = Path(source), Path(to)
    require(format in FORMATS, "format", format, f"one of {', '.join(FORMATS)}")
    require(dtype in DTYPES, "dtype", dtype, f"one of {', '.join(DTYPES)}")
    require(quantize in ("none", "fp8", "int8"), "quantize", quantize, "none, fp8 or int8")
    eight_bits = None
    if quantize != "none":
        eight_bits = QuantizationConfig(mode=quantize, fused=True, originals="drop")  # type: ignore[arg-type]
    check_target(to)
    sources = find_sources(source, None if low is None else Path(low))
    base_folder = _check_base_folder(base, source, sources)
    mapped = {name: match_names(TensorFiles(part.files)) for name, part in sources.items()}
    gated = any(part.gates for part in mapped.values())
    require(gated or not drop_gate, "drop_gate", drop_gate, "left out: this checkpoint has no gate of FastVideo's")
    kind = _kind(format, source, mapped)
    configs, planned, branches = {}, {}, {}
    for name, part in mapped.items():
        try:
            config = infer_config(
                part.shapes(),
                side_config=read_config(sources[name].folder),
                base_config=_base_config(base_folder, name),
            )
            expected = check(part, config, kind, drop_gate=drop_gate)
        except ConfigError as error:
            raise ConfigError(f"{sources[name].files[0].name}: {error}") from None
        configs[name], planned[name], branches[name] = (
            config,
            plan(part, expected, DTYPES[dtype], eight_bits),
            plan_branch(part),
        )
    _check_pair(configs)
    found = Found(source.name, mapped["transformer"].shapes(), len(mapped), configs["transformer"]["in_channels"])
    wishes = Wishes(sparsity, steps, backend)
    metadata = mapped["transformer"].files.metadata
    carried = carried_student(metadata, wishes) if format == "auto" else None
    student = carried or student_of(kind, found, wishes)
    if carried is None and RECIPE_KEY in metadata:
        note = "the recipe in the header of the file is not used: format, sparsity or steps were given"
        student = replace(student, notes=(*student.notes, note))
    if eight_bits is not None:
        student = _in_eight_bits(student, eight_bits)
    unused = kind == "wan" and (sparsity is not None or steps is not None)
    require(not unused, "format", kind, "a student's where sparsity or steps are given")
    with whole_folder(to) as folder:
        counts = {}
        for name, tensors in planned.items():
            (folder / name).mkdir()
            if eight_bits is None:
                files = write_weights(folder / name, tensors, max_shard_bytes)
            else:
                files = [folder / name / QUANTIZED_FILE]
                write_safetensors(files[0], tensors, quantized_metadata(eight_bits))
            if branches[name]:
                write_safetensors(folder / name / BRANCH_FILE, branches[name])
            _write_config(folder / name, configs[name])
            mapped[name].files.close()
            counts[name] = {
                "tensors": len(tensors), "branch_tensors": len(branches[name]), "widened": num_widened(mapped[name]),
                "parameters": sum(torch.Size(t.shape).numel() for t in (*tensors, *branches[name])),
                "bytes": sum(t.nbytes for t in (*tensors, *branches[name])), "files": len(files),
            }  # fmt: skip
        if base_folder is not None:
            _take_over(base_folder, folder, list(planned), student)
        _write_student(folder, student)
    recipe = None if student.recipe is None else student.recipe.name
    return ConversionReport(to, kind, counts, recipe, base_folder is not None, _notes(mapped, student, base_folder))


def _in_eight_bits(student: Student, config: QuantizationConfig) -> Student:
    """The recipe has to say how the weights are stored, or they would not load."""
    recipe = student.recipe or Recipe(config.mode, description="The model as it is, stored in eight bits.")
    require(recipe.compile == "none", "quantize", config.mode, f"none: recipe {recipe.name!r} compiles its blocks")
    return replace(student, recipe=replace(recipe, quantization=config))


def _kind(format: str, source: Path, mapped: dict[str, Mapped]) -> str:
    if format != "auto":
        return format
    names = [name for part in mapped.values() for name in (*part.branch, *part.gates)]
    return detect_format(source.name, names)


def _check_base_folder(base: str | Path | None, source: Path, sources: dict[str, Source]) -> Path | None:
    """The base, checked; a source that is a whole pipeline is its own."""
    folder = Path(base) if base is not None else source if (source / "model_index.json").is_file() else None
    if folder is None:
        return None
    index_file = folder / "model_index.json"
    require(index_file.is_file(), "base", str(folder), "a diffusers folder with a model_index.json")
    index = json.loads(index_file.read_text(encoding="utf-8"))
    wanted = [name for name in EXPERTS if index.get(name, [None])[0] is not None]
    rule = f"of the same kind as the base {folder.name}, which has {' and '.join(wanted) or 'no transformer'}"
    require(wanted == list(sources), "source", " and ".join(sources), rule)
    return folder


def _base_config(base: Path | None, name: str) -> dict[str, Any] | None:
    return None if base is None else read_config(base / name)


def _check_pair(configs: dict[str, dict[str, Any]]) -> None:
    if len(configs) == 2:
        first, second = configs["transformer"], configs["transformer_2"]
        differing = {key: (value, second[key]) for key, value in first.items() if second[key] != value}
        require(not differing, "source", differing, "a pair of experts of the same shape")


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    from diffusers import __version__

    data = {"_class_name": "WanTransformer3DModel", "_diffusers_version": __version__, **config}
    (folder / "config.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _take_over(base: Path, folder: Path, transformers: list[str], student: Student) -> None:
    """The other parts of the pipeline, and its index with the boundary of the student."""
    index = json.loads((base / "model_index.json").read_text(encoding="utf-8"))
    for name, value in index.items():
        if isinstance(value, list) and value[0] is not None and name not in transformers:
            require((base / name).is_dir(), f"base.{name}", str(base / name), "a folder, as model_index.json says")
            copy_tree(base / name, folder / name)
    if student.boundary_ratio is not None:
        index["boundary_ratio"] = student.boundary_ratio
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_student(folder: Path, student: Student) -> None:
    if student.recipe is not None:
        save_file(student.recipe, folder / RECIPE_FILE)
    if student.defaults:
        text = json.dumps(student.defaults, indent=2) + "\n"
        (folder / DEFAULTS_FILE).write_text(text, encoding="utf-8")


def _notes(mapped: dict[str, Mapped], student: Student, base: Path | None) -> list[str]:
    notes = list(student.notes)
    for name, part in mapped.items():
        notes += [f"{name}: {note}" for note in part.notes]
        stored = student.recipe is not None and student.recipe.quantization.mode != "none"
        if (count := num_widened(part)) and not stored:
            notes.append(
                f"{name}: {count} weights were widened from eight bits; a recipe with quantization narrows them again"
            )
        if part.gates:
            notes.append(f"{name}: {len(part.gates)} tensors of the gate are left out; attention is dense")
        if base is not None and _base_config(base, name) is None:
            notes.append(f"{name}: the base has no {name}/config.json, so that nothing was compared with it")
    if base is None:
        notes.append("no base was given: the folder holds the transformer alone and is no pipeline yet")
    return notes
