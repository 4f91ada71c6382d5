"""A tiny Wan from nothing, in resumable stages.

    vae      the video autoencoder, its encoder first                        -> OUTPUT/{encoder,decoder,vae}
    stills   denoiser and text encoder on single frames of 128 x 128         -> OUTPUT/stills
    motion   the same weights on clips of 64 x 64 x 17, 80 tokens            -> OUTPUT/motion
    teacher  the same weights at 128 x 128 x 17, 320 tokens                  -> OUTPUT/teacher
    grid     the same weights at 192 x 192 x 17, 720 tokens, and 64 x 64     -> OUTPUT/grid
    export   the pipeline in diffusers layout, bf16, with its defaults       -> OUTPUT/checkpoint

Each stage picks up its newest complete checkpoint, so the same command continues an interrupted run.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

import torch
from diffusers import AutoencoderKLWan, WanPipeline

from .components import FPS, NUM_FRAMES, build_scheduler, build_text_encoder, build_tokenizer, build_transformer
from .pictures import loss_curve, reconstruction_sheet, sample_sheet
from .train_teacher import GridStage, encode_dataset, train_grid
from .train_vae import WINDOW, train_vae

Stage = Literal["all", "vae", "stills", "motion", "teacher", "grid", "export"]

ENCODER_STEPS = 2500
DECODER_STEPS = 4000
FULL = {
    "stills": GridStage(
        "stills",
        128,
        32768,
        500,
        64,
        2.5e-3,
        1.5e-3,
        2.0,
        0.4,
        first_frame_share=0.0,
        num_frames=1,
        average_decay=0.995,
    ),
    "motion": GridStage("motion", 64, 16384, 1500, 48, 2e-3, 1.2e-3, 3.0, decay_share=0.4),
    "teacher": GridStage("teacher", 128, 8192, 700, 16, 1.5e-3, 1e-3, 3.0, decay_share=0.6),
    "grid": GridStage(
        "grid", 192, 4096, 4600, 8, 1e-3, 8e-4, 3.0, decay_share=0.6, two_shapes_share=0.5, small_until=0.65
    ),
}
SMALL = {"grid": "motion"}
"""Stages that go on with another's smaller clips beside their own."""
QUICK_VAE_STEPS = 10
QUICK = {
    "stills": GridStage("stills", 64, 32, 20, 8, 2.5e-3, 1.5e-3, 2.0, first_frame_share=0.0, num_frames=1),
    "motion": GridStage("motion", 64, 32, 10, 4, 2e-3, 1.5e-3, 3.0),
    "teacher": GridStage("teacher", 64, 16, 20, 4, 2e-3, 1.5e-3, 3.0),
    "grid": GridStage("grid", 96, 32, 10, 2, 7e-4, 5e-4, 3.0, two_shapes_share=0.5, small_until=0.65),
}


def train(output: Path, stage: Stage = "all", *, quick: bool = False, compile_kernels: bool = True) -> Path:
    """Run one stage, or all of them in order, and return the folder of what it made.

    Args:
        output: folder of the run; holds logs, checkpoints, pictures and, at the end, `checkpoint/`.
        stage: which stage; a stage needs the ones before it.
        quick: a rehearsal of every step at a size that says nothing about quality (a minute or two).
        compile_kernels: use torch.compile, which needs a C++ compiler and about halves the time.

    Raises:
        ValueError: unknown stage.
        FileNotFoundError: an earlier stage has not been run.
    """
    if stage not in get_args(Stage):
        raise ValueError(f"stage: got {stage!r}; must be one of {get_args(Stage)}")
    order = tuple(_STAGES) if stage == "all" else (stage,)
    result = output
    for name in order:
        result = _STAGES[name](output, quick, compile_kernels)
    return result


def _train_vae(output: Path, quick: bool, compile_kernels: bool) -> Path:
    vae = train_vae(
        output,
        encoder_steps=QUICK_VAE_STEPS if quick else ENCODER_STEPS,
        decoder_steps=QUICK_VAE_STEPS if quick else DECODER_STEPS,
        side=64 if quick else WINDOW,
        compile_kernels=compile_kernels,
    )
    folder = output / "vae"
    vae.save_pretrained(folder / "model")
    loss_curve(output / "encoder" / "log.jsonl", output / "encoder" / "forms.png", key="forms_mse")
    loss_curve(output / "decoder" / "log.jsonl", output / "decoder" / "psnr.png", key="psnr_db")
    reconstruction_sheet(vae, folder / "reconstruction.png", size=64 if quick else 192)
    return folder


def _load_vae(output: Path) -> AutoencoderKLWan:
    folder = output / "vae" / "model"
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: the vae stage has not been run")
    return AutoencoderKLWan.from_pretrained(folder).eval()


def _load_denoiser(output: Path, stage: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    folder = output / stage / "model"
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: the {stage} stage has not been run")
    transformer, text_encoder = build_transformer(), build_text_encoder()
    return type(transformer).from_pretrained(folder / "transformer"), type(text_encoder).from_pretrained(
        folder / "text_encoder"
    )


def _train_denoiser(name: str, start_from: str | None, output: Path, quick: bool, compile_kernels: bool) -> Path:
    stages = QUICK if quick else FULL
    stage, small = stages[name], stages[SMALL[name]] if name in SMALL else None
    vae = _load_vae(output)
    start = None if start_from is None else _load_denoiser(output, start_from)

    def latents(of: GridStage) -> torch.Tensor:
        path = output / f"latents_{of.size}x{of.num_frames}.safetensors"
        return encode_dataset(path, size=of.size, num_clips=of.num_clips, num_frames=of.num_frames)

    transformer, text_encoder = train_grid(
        output,
        stage,
        latents(stage),
        start,
        small=None if small is None else (small, latents(small)),
        compile_blocks=compile_kernels,
    )
    folder = output / stage.name
    transformer.save_pretrained(folder / "model" / "transformer")
    text_encoder.save_pretrained(folder / "model" / "text_encoder")
    loss_curve(folder / "log.jsonl", folder / "loss.png", key="loss")
    pipe = _assemble(vae, transformer, text_encoder)
    steps = 4 if stage.num_clips < 64 else 16
    sample_sheet(pipe, folder / "samples.png", size=stage.size, num_inference_steps=steps, num_frames=stage.num_frames)
    return folder


def _assemble(vae: AutoencoderKLWan, transformer: torch.nn.Module, text_encoder: torch.nn.Module) -> WanPipeline:
    pipe = WanPipeline(
        tokenizer=build_tokenizer(),
        text_encoder=text_encoder,
        vae=vae,
        transformer=transformer,
        scheduler=build_scheduler(),
        expand_timesteps=True,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _export(output: Path, quick: bool, compile_kernels: bool) -> Path:
    return export(output, "grid", size=(QUICK if quick else FULL)["grid"].size)


def export(output: Path, stage: str, *, size: int) -> Path:
    """Write the pipeline of a finished stage to `output/checkpoint`, bf16 but for what diffusers keeps in float32."""
    pipe = _assemble(_load_vae(output), *_load_denoiser(output, stage))
    for part in (pipe.transformer, pipe.text_encoder, pipe.vae):
        _to_bfloat16(part)
    folder = output / "checkpoint"
    pipe.save_pretrained(folder, safe_serialization=True)
    # diffusers notes where the parts were read from: a path of this machine.
    for config in folder.glob("*/config.json"):
        settings = json.loads(config.read_text(encoding="utf-8"))
        settings.pop("_name_or_path", None)
        config.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    defaults = {
        "height": size,
        "width": size,
        "num_frames": NUM_FRAMES,
        "fps": FPS,
        "num_inference_steps": 50,
        "guidance_scale": 1.5,
        "max_sequence_length": 32,
    }
    (folder / "videospark_defaults.json").write_text(json.dumps(defaults, indent=2) + "\n", encoding="utf-8")
    return folder


def _to_bfloat16(module: torch.nn.Module) -> None:
    """Round all but what diffusers keeps in float32 when it loads in a narrower dtype."""
    kept = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_floating_point() and not kept & set(name.split(".")):
            tensor.data = tensor.data.bfloat16()


_STAGES: dict[str, Callable[[Path, bool, bool], Path]] = {
    "vae": _train_vae,
    "stills": functools.partial(_train_denoiser, "stills", None),
    "motion": functools.partial(_train_denoiser, "motion", "stills"),
    "teacher": functools.partial(_train_denoiser, "teacher", "motion"),
    "grid": functools.partial(_train_denoiser, "grid", "teacher"),
    "export": _export,
}
