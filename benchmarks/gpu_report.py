"""What a GPU has to show: every kernel right, every ratio against its peers, memory against the plan, in one report.

`make gpu`, or `videospark bench gpu`. Sections run one after the other; one that breaks is reported and the next one
runs all the same. Without a GPU nothing runs but, where it is asked for, a rehearsal: the same code at small sizes on
the CPU, whose report says so in its first line.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import importlib.metadata
import importlib.util
import math
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from . import attention as attention_bench
from .block import bench_block
from .gpu_checks import FULL, SMALL, able_backends, kernel_checks
from .gpu_end_to_end import EndToEnd, bench_end_to_end, recipes, wan_1_3b
from .gpu_end_to_end import markdown as end_to_end_markdown
from .gpu_offload import bench_offloads
from .gpu_offload import markdown as offload_markdown
from .quantization import bench_quantization
from .timing import machine, measure

SECTIONS = ("kernels", "tests", "attention", "peers", "products", "block", "end-to-end", "offload")
KERNEL_TESTS = (
    "tests/attention/test_triton.py", "tests/attention/test_rola_triton.py", "tests/attention/test_conformance.py",
    "tests/attention/test_flex.py", "tests/attention/test_linear_branches.py", "tests/quantization/test_engines.py",
    "tests/quantization/test_linear.py",
)  # fmt: skip
SKIPPED = (
    "skipped: there is no CUDA GPU here. On one this checks every Triton kernel and engine against its reference, "
    "times attention, products, a block and a whole 1.3B clip against SDPA, flex_attention, torchao and installed "
    "peers, offloads two experts in every mode, holds memory against the plan, and writes a report with hardware and "
    "commit"
)
PACKAGES = ("torch", "triton", "diffusers", "transformers", "torchao", "flash-attn", "sageattention", "spas-sage-attn",
            "transformer-engine", "xformers")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Section:
    """One part of the report.

    Attributes:
        name: of `SECTIONS`.
        text: Markdown.
        data: the same for JSON.
        ok: False where a check failed or the section broke.
        seconds: it took.
    """

    name: str
    text: str
    data: Any
    ok: bool
    seconds: float


@dataclasses.dataclass(frozen=True)
class GPUReport:
    """The whole report; `ok` is False where any section is not."""

    machine: dict[str, Any]
    rehearsal: bool
    sections: tuple[Section, ...]

    @property
    def ok(self) -> bool:
        """Whether all sections are right."""
        return all(section.ok for section in self.sections)

    @property
    def name(self) -> str:
        """For files: gpu-, and the card's name."""
        card = self.machine.get("gpu", "rehearsal" if self.rehearsal else "none")
        return "gpu-" + re.sub(r"[^a-z0-9]+", "-", str(card).lower().replace("nvidia", "")).strip("-")

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "machine": self.machine, "rehearsal": self.rehearsal, "ok": self.ok,
            "sections": {part.name: {"ok": part.ok, "seconds": part.seconds, "data": _finite(part.data)}
                         for part in self.sections},
        }  # fmt: skip

    def markdown(self) -> str:
        """The report for people."""
        card = self.machine.get("gpu", "CPU")
        lines = [f"## GPU report: {card}", ""]
        if self.rehearsal:
            lines = ["## REHEARSAL on a CPU at small sizes: no figure here says anything of a GPU", ""]
        lines += [f"{key}: {value}  " for key, value in self.machine.items()]
        broken = [part.name for part in self.sections if not part.ok]
        lines += ["", f"**{'All sections are right.' if not broken else 'Not right: ' + ', '.join(broken)}**", ""]
        for part in self.sections:
            lines += [f"# {part.name} ({part.seconds:.0f} s)", "", part.text.rstrip(), ""]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the sections run: on a GPU, or in a rehearsal."""

    device: str
    dtype: torch.dtype
    rehearsal: bool
    attention_shapes: tuple[str, ...]
    blocks: tuple[int, int]
    block_shapes: tuple[str, ...]
    tokens: int | None
    repeats: int
    end_to_end: EndToEnd


def plan_of(device: str, rehearsal: bool) -> Plan:
    """The real thing, or its rehearsal."""
    if not rehearsal:
        mode = "fp8" if torch.cuda.get_device_capability(device) >= (8, 9) else "int8"
        return Plan(
            device, torch.bfloat16, False, ("wan-480p", "wan-720p"), (128, 64),
            ("wan2.1-1.3b-480p", "wan2.1-14b-720p"), None, 5, wan_1_3b(mode),
        )  # fmt: skip
    return Plan(device, torch.bfloat16, True, ("tiny-96",), (16, 16), ("tiny",), 48, 1, _tiny())


def _tiny() -> EndToEnd:
    """The tiny model with random weights; its VAE is not one that the planner knows, so that plan is a stand-in."""
    from ..pipelines.plan_memory import Clip
    from ..pipelines.plan_models import ModelShape
    from ..tiny.components import build_pipeline

    shape = ModelShape("tiny", 6, 3, 64, 512, 4, 4, per_token_time=True)
    chosen = tuple(recipe for recipe in recipes((16, 16), "int8") if recipe.compile == "none")
    return EndToEnd(
        "tiny", lambda device, dtype: _without_text(build_pipeline()), shape, Clip(64, 64, 5), chosen, 16, 2
    )


def _without_text(pipe: Any) -> Any:
    torch.nn.init.normal_(pipe.transformer.proj_out.weight, std=0.05)
    pipe.text_encoder = None
    pipe.tokenizer = None
    return pipe


def gpu_report(
    *,
    device: str = "cuda",
    rehearsal: bool = False,
    only: Sequence[str] = SECTIONS,
    say: Callable[[str], None] = lambda _: None,
) -> GPUReport:
    """Run the sections.

    Args:
        device: a CUDA device; a rehearsal runs on the CPU.
        rehearsal: small sizes on the CPU; the process must interpret Triton kernels (TRITON_INTERPRET=1).
        only: names of `SECTIONS`.
        say: told what happens.
    """
    plan = plan_of("cpu" if rehearsal else device, rehearsal)
    runners: dict[str, Callable[[Plan], tuple[str, Any, bool]]] = {
        "kernels": _kernels, "tests": _tests, "attention": _attention, "peers": _peers, "products": _products,
        "block": _block, "end-to-end": _end_to_end, "offload": _offload,
    }  # fmt: skip
    made = []
    for name in (name for name in SECTIONS if name in only):
        say(f"{name} ...")
        start = time.perf_counter()
        try:
            text, data, ok = runners[name](plan)
        except Exception as error:  # the other sections are worth as much without this one
            text = f"broke: {type(error).__name__}: {error}\n\n```\n{traceback.format_exc()[-3000:]}```"
            data, ok = {"error": f"{type(error).__name__}: {error}"}, False
        made.append(Section(name, text, data, ok, time.perf_counter() - start))
        say(f"{name}: {'right' if ok else 'NOT RIGHT'}, {made[-1].seconds:.0f} s")
        if plan.device.startswith("cuda"):
            torch.cuda.empty_cache()
    return GPUReport(describe(plan.device), rehearsal, tuple(made))


def describe(device: str) -> dict[str, Any]:
    """Hardware, software and commit."""
    found = {**machine(device), "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")}
    if device.startswith("cuda"):
        found["cuda"] = torch.version.cuda
        query = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
        found["driver, power limit"] = _output(query) or "unknown"
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    here = str(Path(__file__).resolve().parent)
    commit = _output(["git", "-C", here, "rev-parse", "HEAD"])
    changed = _output(["git", "-C", here, "status", "--porcelain", "--untracked-files=no"])
    found["commit"] = f"{commit}{' with local changes' if changed else ''}" if commit else "unknown"
    return found


def _finite(data: Any) -> Any:
    """The same with None for numbers that JSON does not have, such as the noise ratio of equal tensors."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _kernels(plan: Plan) -> tuple[str, Any, bool]:
    checks = list(kernel_checks(plan.device, SMALL if plan.rehearsal else FULL))
    lines = ["| check | right | found | s |", "|---|---|---|---|"]
    lines += [f"| {c.name} | {'yes' if c.ok else '**NO**'} | {c.detail} | {c.seconds:.1f} |" for c in checks]
    return "\n".join(lines), [dataclasses.asdict(check) for check in checks], all(check.ok for check in checks)


def _tests(plan: Plan) -> tuple[str, Any, bool]:
    """The test files of the kernels, where they and pytest are at hand; on a bare machine `kernels` stands alone."""
    root = Path(__file__).resolve().parents[1]
    files = [str(root / name) for name in KERNEL_TESTS if (root / name).is_file()]
    if not files or importlib.util.find_spec("pytest") is None:
        return "left out: pytest or the tests are not here", {"left_out": True}, True
    if plan.rehearsal:
        return f"left out in a rehearsal: {len(files)} files that `make test` runs", {"left_out": True}, True
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    tail = "\n".join(done.stdout.strip().splitlines()[-25:])
    return f"```\n{tail}\n```", {"exit": done.returncode, "tail": tail}, done.returncode == 0


def _attention(plan: Plan) -> tuple[str, Any, bool]:
    texts, data = [], {}
    name = str(plan.dtype).removeprefix("torch.")
    for shape in plan.attention_shapes:
        for backward in (False, True):
            sizes = attention_bench.SHAPES[shape]
            backends = able_backends(plan.device, name, sizes.head_dim, plan.blocks)
            if plan.rehearsal:  # the others are compiled, or interpreted
                backends = ["gather"]
            if backward:
                backends = [one for one in backends if one != "triton_int8"]
            rows = list(attention_bench.bench_attention(
                sizes, device=plan.device, dtype=plan.dtype, backends=backends, block_sizes=plan.blocks,
                backward=backward, repeats=plan.repeats, check=not backward and plan.device == "cpu",
            ))  # fmt: skip
            title = f"{shape}, {name}, blocks {plan.blocks[0]}/{plan.blocks[1]}" + (", backward" if backward else "")
            texts.append(attention_bench.markdown(rows, title))
            data[title] = [dataclasses.asdict(row) for row in rows]
    return "\n".join(texts), data, True


def _peers(plan: Plan) -> tuple[str, Any, bool]:
    """Attention of other packages at the first shape, each as it is installed; none has to be."""
    shape = attention_bench.SHAPES[plan.attention_shapes[0]]
    generator = torch.Generator().manual_seed(0)
    size = (1, shape.tokens, shape.heads, shape.head_dim)
    q, k, v = (torch.randn(size, generator=generator).to(plan.device, plan.dtype) for _ in range(3))

    def sdpa() -> Any:
        query, key, value = (t.transpose(1, 2) for t in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)

    base = measure(sdpa, plan.device, repeats=plan.repeats).median
    lines = ["| package | seconds | over SDPA |", "|---|---|---|", f"| SDPA | {base:.4f} | 1.0x |"]
    data: dict[str, Any] = {"sdpa": base}
    for name, call in _peer_calls(q, k, v):
        try:
            seconds = measure(call, plan.device, repeats=plan.repeats).median
        except Exception as error:  # another package's refusal is a finding, not a failure of ours
            data[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            lines.append(f"| {name} | {data[name]} | |")
        else:
            data[name] = seconds
            lines.append(f"| {name} | {seconds:.4f} | {base / seconds:.1f}x |")
    return "\n".join(lines), data, True


def _peer_calls(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Iterator[tuple[str, Callable[[], Any]]]:
    def call(module: str, function: str, *tensors: torch.Tensor, **settings: Any) -> Any:
        return getattr(importlib.import_module(module), function)(*tensors, **settings)

    heads_first = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]
    yield "flash-attn", lambda: call("flash_attn", "flash_attn_func", q, k, v)
    yield "SageAttention", lambda: call("sageattention", "sageattn", q, k, v, tensor_layout="NHD")
    for keep in (0.1, 0.05, 0.03):
        yield (
            f"SpargeAttn, keep {keep:g}",
            lambda keep=keep: call(  # type: ignore[misc]
                "spas_sage_attn", "spas_sage2_attn_meansim_topk_cuda", *heads_first, topk=keep
            ),
        )


def _by_shape(plan: Plan, run: Callable[[str], tuple[str, Any]]) -> tuple[str, Any, bool]:
    """One shape after the other; one that a small card has no room for is a finding."""
    texts, data = [], {}
    for shape in plan.block_shapes:
        try:
            text, data[shape] = run(shape)
        except torch.OutOfMemoryError:
            text, data[shape] = f"### {shape}\n\ndoes not fit this card\n", {"fits": False}
        texts.append(text)
    return "\n".join(texts), data, True


def _products(plan: Plan) -> tuple[str, Any, bool]:
    modes = ["int8"]
    if plan.rehearsal or torch.cuda.get_device_capability(plan.device) >= (8, 9):
        modes.append("fp8")

    def run(shape: str) -> tuple[str, Any]:
        made = bench_quantization(
            shape, modes=modes, device=plan.device, dtype=plan.dtype, tokens=plan.tokens, repeats=plan.repeats,
            compare_torchao=not plan.rehearsal,
        )  # fmt: skip
        return f"### {shape}\n\n```\n{made}\n```\n", made.to_dict()

    return _by_shape(plan, run)


def _block(plan: Plan) -> tuple[str, Any, bool]:
    def run(shape: str) -> tuple[str, Any]:
        made = bench_block(
            shape, tokens=plan.tokens, block_sizes=plan.blocks, device=plan.device, dtype=plan.dtype,
            repeats=plan.repeats,
        )  # fmt: skip
        return made.markdown(), made.to_dict()

    return _by_shape(plan, run)


def _end_to_end(plan: Plan) -> tuple[str, Any, bool]:
    what = plan.end_to_end
    rows = bench_end_to_end(what, plan.device, torch.float32 if plan.rehearsal else plan.dtype)
    title = f"{what.name}, {what.clip.width}x{what.clip.height}x{what.clip.frames}, random weights"
    return end_to_end_markdown(rows, title), _plain(rows), not any(row.error for row in rows)


def _offload(plan: Plan) -> tuple[str, Any, bool]:
    what = plan.end_to_end
    rows = bench_offloads(what, plan.device, torch.float32 if plan.rehearsal else plan.dtype)
    title = f"two experts of {what.name}, {what.clip.width}x{what.clip.height}x{what.clip.frames}, random weights"
    return offload_markdown(rows, title), _plain(rows), all(row.ok for row in rows)


def _plain(rows: Sequence[Any]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(row) for row in rows]
