"""`videospark bench`: what each part costs on this machine, against its peers and against the machine's limit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import typer

from .console import check_writable, dump_json, guarded, require_at_least, write_text

app = typer.Typer(help="Measure attention, products and kernels on this machine.", no_args_is_help=True)

OUTPUT = typer.Option(None, "--output", help="Folder for the table (Markdown) and the numbers (JSON).")
JSON = typer.Option(None, "--json", help="File for the numbers alone.")


@app.command("attention")
@guarded
def attention(
    shape: str = typer.Option("", "--shape", help="A named shape; default: wan-480p-2-heads on a CPU, else wan-480p."),
    tokens: int | None = typer.Option(None, "--tokens", help="Tokens instead of the shape's own."),
    heads: int | None = typer.Option(None, "--heads", help="Heads instead of the shape's own."),
    head_dim: int | None = typer.Option(None, "--head-dim", help="Channels of a head instead of the shape's own."),
    backends: str = typer.Option("", "--backends", help="Names, with commas; default: all that can run here."),
    keep: str = typer.Option("0.03,0.05,0.1", "--keep-ratio", help="Keep ratios, with commas."),
    blocks: str = typer.Option("128,64", "--blocks", help="Tokens of a query and of a key block."),
    backward: bool = typer.Option(False, "--backward", help="Forward and backward together."),
    branch: str = typer.Option("none", "--branch", help="none, rola, or both with a comma: the branch after it."),
    crossover: bool = typer.Option(False, "--crossover", help="Also find the length from which on sparse is faster."),
    repeats: int = typer.Option(3, "--repeats", help="Runs of each; the median counts."),
    device: str | None = typer.Option(None, "--device", help="cpu, cuda, ...; default: the best one."),
    dtype: str = typer.Option("bfloat16", "--dtype", help="bfloat16, float16 or float32."),
    check: bool = typer.Option(False, "--check", help="Also compute each output's error against float32."),
    output: Path | None = OUTPUT,
    json_file: Path | None = JSON,
) -> None:
    """One layer's self-attention: every backend against SDPA and flex, with the share of this run's GEMM peak."""
    for name, number in (("repeats", repeats), ("tokens", tokens), ("heads", heads), ("head-dim", head_dim)):
        require_at_least(name, number, 1)
    _check_files("attention", output, json_file)

    import torch

    from ..benchmarks import attention as bench
    from ..benchmarks.timing import machine
    from ..core.config import ConfigError
    from ..core.devices import pick_device

    where = str(pick_device(device))
    name = shape or ("wan-480p-2-heads" if where == "cpu" else "wan-480p")
    if name not in bench.SHAPES:
        raise ConfigError(f"shape: got {name!r}; must be one of {', '.join(bench.SHAPES)}")
    kinds = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if dtype not in kinds:
        raise ConfigError(f"dtype: got {dtype!r}; must be one of {', '.join(kinds)}")
    sizes = _numbers("blocks", blocks, int)
    if len(sizes) != 2:
        raise ConfigError(f"blocks: got {blocks!r}; must be two numbers, as in 128,64")
    layer = bench.SHAPES[name]
    if tokens is not None:
        layer = dataclasses.replace(layer, frames=tokens, height=1, width=1)
    layer = dataclasses.replace(layer, heads=heads or layer.heads, head_dim=head_dim or layer.head_dim)
    chosen = _parts(backends) or _able(where, dtype, layer.head_dim, sizes)
    title = f"Self-attention: {layer.tokens} tokens, {layer.heads} heads of " + (
        f"{layer.head_dim}, {dtype}, blocks {sizes[0]}/{sizes[1]}" + (", with backward" if backward else "")
    )
    typer.echo(f"{title}; backends: {', '.join(chosen)}", err=True)
    rows, ratios = [], _numbers("keep-ratio", keep, float)
    for row in bench.bench_attention(
        layer, device=where, dtype=kinds[dtype], backends=chosen, keep_ratios=ratios, branches=_parts(branch),
        block_sizes=(sizes[0], sizes[1]), backward=backward, repeats=repeats, check=check,
    ):  # fmt: skip
        rows.append(row)
        tail = "" if row.branch == "none" else f" + {row.branch}"
        typer.echo(
            f"{row.backend + tail:<14} keep {row.keep_ratio:.2f}  {row.seconds:9.4f} s  {row.over_sdpa:6.1f}x", err=True
        )
    table, settings = bench.markdown(rows, title), {}
    if crossover:
        found = bench.crossover(layer, ratios[0], (sizes[0], sizes[1]), device=where, dtype=kinds[dtype])
        settings["crossover"] = dataclasses.asdict(found)
        table += "\n" + bench.crossover_text(found, ratios[0]) + "\n"
    _finish("attention", table, [row.to_dict() for row in rows], machine(where), output, settings, json_file)


@app.command("attention-quality")
@guarded
def attention_quality(
    output: Path = typer.Option(..., "--output", help="Folder for tables, numbers and pictures."),
    model: str | None = typer.Option(None, "--model", help="Folder of a tiny model; default: the embedded one."),
    keep: str = typer.Option("0.05,0.1,0.2,0.3,0.5", "--keep-ratio", help="Keep ratios, with commas."),
    methods: str = typer.Option("sparse,rola,sla", "--methods", help="Of sparse, rola, sla, with commas."),
    captions: int = typer.Option(64, "--captions", help="Held-out captions that are measured."),
    calibration_captions: int = typer.Option(4, "--calibration-captions", help="Further ones to calibrate on."),
    steps: int | None = typer.Option(None, "--steps", help="Denoising steps; default: the model's."),
    guidance: float | None = typer.Option(None, "--guidance", help="Guidance scale; default: the model's."),
    blocks: str = typer.Option("16,16", "--blocks", help="Tokens of a query and of a key block."),
    rank: int = typer.Option(64, "--rank", help="Rank of RoLA; its frequencies are balanced."),
    backend: str = typer.Option("gather", "--backend", help="A sparse backend."),
    layer: int | None = typer.Option(None, "--layer", help="Layer of the picture of kept blocks; default: the middle."),
    picture_ratio: float | None = typer.Option(None, "--picture-ratio", help="Its keep ratio; default: the smallest."),
    batch_size: int = typer.Option(8, "--batch-size", help="Clips denoised together."),
    device: str | None = typer.Option(None, "--device", help="cpu, cuda, ...; default: the best one."),
) -> None:
    """Quality versus keep ratio without training: sparse, sparse + calibrated RoLA, SLA, against the dense model."""
    for name, number in (
        ("captions", captions), ("calibration-captions", calibration_captions), ("steps", steps),
        ("batch-size", batch_size),
    ):  # fmt: skip
        require_at_least(name, number, 1)
    require_at_least("guidance", guidance, 0)
    check_writable(output / "attention-quality.json", "output")
    ratios, sizes = _numbers("keep-ratio", keep, float), _numbers("blocks", blocks, int)

    from ..attention.config import AttentionConfig, RoLAConfig
    from ..benchmarks import attention_quality as bench
    from ..benchmarks.timing import machine
    from ..core.config import require
    from ..core.devices import pick_device
    from ..pipelines import loading
    from ..pipelines.acceleration import restore
    from ..pipelines.generation import GenerationRequest, resolve_request
    from .block_maps import BlockMapRecorder
    from .clip_maker import ClipMaker
    from .model_folder import locate_model

    require(len(sizes) == 2, "blocks", blocks, "two numbers, as in 16,16")
    base = AttentionConfig(backend, keep_ratio=max(ratios), block_size_q=sizes[0], block_size_k=sizes[1])
    rola = RoLAConfig(rank=rank, frequencies="balanced")
    where, folder = pick_device(device), locate_model(model)
    typer.echo(f"loading {folder} on {where}", err=True)
    pipe = loading.load(folder, device=where, recipe="dense")
    pipe.set_progress_bar_config(disable=True)
    restore(pipe)  # the recipe "dense" kept the model's own from being applied
    layers = len(pipe.transformer.blocks)
    place = layers // 2 if layer is None else layer
    require(0 <= place < layers, "layer", place, f"0 to {layers - 1}")
    wish = GenerationRequest("a circle", seed=0, num_inference_steps=steps, guidance_scale=guidance)
    resolved = resolve_request(pipe, wish)
    names = ("height", "width", "num_frames", "num_inference_steps", "guidance_scale")
    settings: dict[str, Any] = {name: getattr(resolved, name) for name in names}
    length = (pipe.videospark_defaults or {}).get("max_sequence_length", 512)
    maker = ClipMaker(pipe, {**settings, "max_sequence_length": length}, batch_size=batch_size)
    recorder = BlockMapRecorder(settings["num_inference_steps"])
    rows = bench.bench_attention_quality(
        pipe, maker, base=base, rola=rola, keep_ratios=ratios, methods=_parts(methods), captions=captions,
        calibration_captions=calibration_captions, batch_size=batch_size, recorder=recorder,
        recorded_ratio=picture_ratio, say=lambda text: typer.echo(text, err=True),
    )  # fmt: skip
    title = "Quality versus keep ratio, without training: " + (
        f"{captions} held-out captions, {settings['width']}x{settings['height']}, {settings['num_frames']} frames, "
        f"{settings['num_inference_steps']} steps, blocks {sizes[0]}/{sizes[1]}"
    )
    said = {"settings": {**settings, "captions": captions, "rank": rank, "backend": backend, "blocks": sizes}}
    data = [row.to_dict() for row in rows]
    _finish("attention-quality", bench.markdown(rows, title), data, machine(str(where)), output, said)
    typer.echo(str(bench.plot(rows, output / "attention-quality.png")))
    if (maps := recorder.result()) is not None:
        typer.echo(str(bench.draw_kept_blocks(maps, place, output / "kept-blocks.png")))


@app.command("linear")
@guarded
def linear(
    shape: str = typer.Option("wan2.1-1.3b-480p", "--shape", help="A named block; a wrong name lists them."),
    modes: str = typer.Option("int8,fp8", "--modes", help="Modes, with commas."),
    tokens: int | None = typer.Option(None, "--tokens", help="Tokens of video instead of the shape's own."),
    repeats: int = typer.Option(3, "--repeats", help="Runs of each; the median counts."),
    device: str | None = typer.Option(None, "--device", help="cpu, cuda, ...; default: the best one."),
    torchao: bool = typer.Option(True, "--torchao/--no-torchao", help="Also measure torchao, where it is installed."),
    output: Path | None = OUTPUT,
    json_file: Path | None = JSON,
) -> None:
    """The ten products of a block in eight bits against plain ones and torchao, with error and share of the peak."""
    require_at_least("repeats", repeats, 1)
    require_at_least("tokens", tokens, 1)
    _check_files("linear", output, json_file)

    from ..benchmarks.quantization import bench_quantization
    from ..core.devices import pick_device

    chosen = _parts(modes)
    result = bench_quantization(
        shape, modes=chosen, device=str(pick_device(device)), tokens=tokens, repeats=repeats, compare_torchao=torchao
    )
    typer.echo(str(result))
    if output is not None:
        write_text(output / "linear.txt", f"{result}\n")
    for path in _json_files("linear", output, json_file):
        write_text(path, dump_json(result.to_dict()))
        typer.echo(str(path))


@app.command("block")
@guarded
def block(
    shape: str = typer.Option("wan2.1-1.3b-480p", "--shape", help="A named block; a wrong name lists them."),
    contenders: str = typer.Option("", "--contenders", help="Names, with commas; a wrong one lists them."),
    tokens: int | None = typer.Option(None, "--tokens", help="About so many tokens of video instead of the shape's."),
    keep: float = typer.Option(0.03, "--keep-ratio", help="Keep ratio of sparse attention."),
    blocks: str = typer.Option("128,64", "--blocks", help="Tokens of a query and of a key block."),
    repeats: int = typer.Option(3, "--repeats", help="Rounds in turns, after one to warm up; the median counts."),
    device: str | None = typer.Option(None, "--device", help="cpu, cuda, ...; default: the best one."),
    dtype: str = typer.Option("bfloat16", "--dtype", help="bfloat16, float16 or float32."),
    output: Path | None = OUTPUT,
) -> None:
    """One whole transformer block, part by part: stock diffusers against sparse, fused, INT8 and all together."""
    require_at_least("repeats", repeats, 1)
    require_at_least("tokens", tokens, 1)
    if output is not None:
        check_writable(output / "block.json", "output")

    import torch

    from ..benchmarks.block import USUAL, bench_block
    from ..core.config import require
    from ..core.devices import pick_device

    kinds = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    require(dtype in kinds, "dtype", dtype, f"one of {', '.join(kinds)}")
    sizes = _numbers("blocks", blocks, int)
    require(len(sizes) == 2, "blocks", blocks, "two numbers, as in 128,64")
    chosen = _parts(contenders) or list(USUAL)
    result = bench_block(
        shape, contenders=chosen, tokens=tokens, keep_ratio=keep, block_sizes=(sizes[0], sizes[1]),
        device=str(pick_device(device)), dtype=kinds[dtype], repeats=repeats,
    )  # fmt: skip
    data = result.to_dict()
    _finish("block", result.markdown(), data.pop("rows"), data.pop("machine"), output, data)


@app.command("end-to-end")
@guarded
def end_to_end(
    shape: str = typer.Option("wan2.1-1.3b-480p", "--shape", help="A named model; a wrong name lists them."),
    full: bool = typer.Option(False, "--full", help="Also run the three steps of all layers: minutes on a CPU."),
    branch: str = typer.Option("rola", "--branch", help="Linear branch of the accelerated clip: rola or none."),
    keep: float = typer.Option(0.03, "--keep-ratio", help="Keep ratio of sparse attention."),
    blocks: str = typer.Option("128,64", "--blocks", help="Tokens of a query and of a key block."),
    tokens: int | None = typer.Option(None, "--tokens", help="About so many tokens of video instead of the shape's."),
    repeats: int = typer.Option(1, "--repeats", help="Rounds in turns, after one to warm up; the median counts."),
    device: str | None = typer.Option(None, "--device", help="cpu, cuda, ...; default: the best one."),
    dtype: str = typer.Option("bfloat16", "--dtype", help="bfloat16, float16 or float32."),
    output: Path | None = OUTPUT,
    json_file: Path | None = JSON,
) -> None:
    """A whole clip: 50 dense steps with guidance against 3 accelerated ones, and what each factor brings."""
    require_at_least("repeats", repeats, 1)
    require_at_least("tokens", tokens, 1)
    _check_files("end_to_end", output, json_file)

    import torch

    from ..benchmarks.end_to_end import bench_end_to_end
    from ..core.config import require
    from ..core.devices import pick_device

    kinds = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    require(dtype in kinds, "dtype", dtype, f"one of {', '.join(kinds)}")
    sizes = _numbers("blocks", blocks, int)
    require(len(sizes) == 2, "blocks", blocks, "two numbers, as in 128,64")
    result = bench_end_to_end(
        shape, full=full, branch=branch, keep_ratio=keep, block_sizes=(sizes[0], sizes[1]), tokens=tokens,
        device=str(pick_device(device)), dtype=kinds[dtype], repeats=repeats,
        say=lambda text: typer.echo(text, err=True),
    )  # fmt: skip
    typer.echo(result.markdown())
    if output is not None:
        write_text(output / "end_to_end.md", result.markdown())
    for path in _json_files("end_to_end", output, json_file):
        write_text(path, dump_json({**result.to_dict(), "machine": result.block.machine}))
        typer.echo(str(path))


@app.command("sqnr")
@guarded
def sqnr(
    models: str = typer.Option("tiny,wan2.1-1.3b,wan2.1-14b", "--models", help="Names, with commas."),
    modes: str = typer.Option("int8,fp8", "--modes", help="Modes, with commas."),
    rows: int = typer.Option(256, "--rows", help="At most so many tokens per forward pass of each layer."),
    device: str | None = typer.Option(None, "--device", help="cpu, cuda, ...; default: the best one."),
    output: Path | None = OUTPUT,
) -> None:
    """Signal to quantization noise of every product: the tiny model, and random blocks of the widths of Wan."""
    require_at_least("rows", rows, 1)
    if output is not None:
        check_writable(output / "sqnr.json", "output")

    from ..benchmarks.sqnr import bench_sqnr, markdown
    from ..benchmarks.timing import machine
    from ..core.devices import pick_device

    where = str(pick_device(device))
    names, kinds = ([part.strip() for part in text.split(",") if part.strip()] for text in (models, modes))
    found = list(bench_sqnr(names, modes=kinds, rows=rows, device=where))
    _finish("sqnr", markdown(found), [dataclasses.asdict(row) for row in found], machine(where), output)


@app.command("kernels")
@guarded
def kernels(
    targets: str = typer.Option("", "--targets", help="Chips such as sm_90, with commas; default: all."),
    only: str = typer.Option("", "--only", help="Only cases whose name contains this."),
    output: Path | None = OUTPUT,
) -> None:
    """Compile every Triton kernel for GPUs that are not here: registers, spills, shared memory, matrix instruction."""
    if output is not None:
        check_writable(output / "kernels.json", "output")

    from ..benchmarks.compile import TARGETS, compile_report

    chosen = [part.strip() for part in targets.split(",") if part.strip()] or list(TARGETS)
    rows = compile_report(chosen, only)
    if output is not None:
        write_text(output / "kernels.json", dump_json([dataclasses.asdict(row) for row in rows]))
        typer.echo(str(output / "kernels.json"))
    if any(row.faults for row in rows):
        raise typer.Exit(1)


@app.command("gpu")
@guarded
def gpu(
    only: str = typer.Option("", "--only", help="Sections, with commas; default: all."),
    device: str = typer.Option("cuda", "--device", help="cuda, cuda:1, ..."),
    rehearse: bool = typer.Option(
        False, "--rehearse", help="Run the same code at small sizes on the CPU; its report says so."
    ),
    output: Path | None = typer.Option(None, "--output", help="Folder for the report (Markdown) and its numbers."),
) -> None:
    """Every kernel checked and every ratio measured on the GPU that is here; says so and ends where there is none."""
    if output is not None:
        check_writable(output / "gpu.json", "output")
    import os

    if rehearse:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
    import torch

    from ..benchmarks.gpu_report import SECTIONS, SKIPPED, gpu_report
    from ..core.config import require
    from ..core.devices import pick_device

    chosen = [part.strip() for part in only.split(",") if part.strip()] or list(SECTIONS)
    for name in chosen:
        require(name in SECTIONS, "only", name, f"of {', '.join(SECTIONS)}")
    if not rehearse and not torch.cuda.is_available():
        typer.echo(SKIPPED)
        return
    where = "cpu" if rehearse else str(pick_device(device))
    report = gpu_report(device=where, rehearsal=rehearse, only=chosen, say=lambda text: typer.echo(text, err=True))
    typer.echo(report.markdown())
    if output is not None:
        write_text(output / f"{report.name}.md", report.markdown())
        write_text(output / f"{report.name}.json", dump_json(report.to_dict()))
        typer.echo(str(output / f"{report.name}.md"))
    if not report.ok:
        raise typer.Exit(1)


def _able(device: str, dtype: str, head_dim: int, sizes: list[int]) -> list[str]:
    from ..attention.backends import available_backends, get_backend
    from ..attention.config import AttentionConfig

    able = []
    for name in available_backends():
        if name in ("auto", "dense", "reference"):  # SDPA stands for dense; the reference is not for this size
            continue
        config = AttentionConfig(name, block_size_q=sizes[0], block_size_k=sizes[1])
        kind = device.partition(":")[0]
        if not get_backend(name).constraints.problems(config, kind, dtype, head_dim):
            able.append(name)
    return able


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(name: str, text: str, kind: Any) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name}: got {text!r}; must be numbers with commas between them") from None


def _json_files(name: str, output: Path | None, json_file: Path | None) -> list[Path]:
    files = [] if output is None else [output / f"{name}.json"]
    return files if json_file is None else [*files, json_file]


def _check_files(name: str, output: Path | None, json_file: Path | None) -> None:
    if output is not None:
        check_writable(output / f"{name}.json", "output")
    if json_file is not None:
        check_writable(json_file, "json")


def _finish(
    name: str,
    table: str,
    rows: list[dict[str, Any]],
    where: dict[str, Any],
    output: Path | None,
    settings: dict[str, Any] | None = None,
    json_file: Path | None = None,
) -> None:
    typer.echo(table)
    if output is not None:
        note = "  \n".join(f"{key}: {value}" for key, value in where.items())
        write_text(output / f"{name}.md", f"{table}\n{note}\n")
    for path in _json_files(name, output, json_file):
        write_text(path, dump_json({"machine": where, **(settings or {}), "rows": rows}))
        typer.echo(str(path))
