"""Compile every Triton kernel of this package for GPUs that are not here, and read off what the code needs.

    python -m videospark.benchmarks.compile --target sm_90 --only "forward bf16 d128"

No GPU and no driver is needed: Triton brings its compilers, and `cuobjdump` for reading registers and stack off the
binary. A fault is shared memory above the chip's limit, a spill above `MAX_SPILL_BYTES`, or a kernel of matrix products
without a matrix instruction.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..attention.block_sparse.triton_tiles import SHARED_MEMORY_LIMITS
from ..core.compile_case import TARGETS, CompileCase
from ..core.config import require

MAX_SPILL_BYTES = 64
"""Bytes of stack per thread that a kernel may use; a few are saved outside of the loops, where they cost little."""

_INSTRUCTIONS = {"wgmma.mma_async": "wgmma", "tcgen05.mma": "tcgen05", "mma.sync": "mma.sync", "v_mfma": "mfma"}


@dataclasses.dataclass(frozen=True)
class CompileResult:
    """What one kernel became on one target.

    Attributes:
        module: where the kernel is.
        label: which case of that module.
        target: chip.
        registers: per thread.
        spill_bytes: stack per thread; registers that did not fit are kept there.
        shared_bytes: shared memory of a program.
        shared_limit: what the chip has for one.
        matrix_instruction: "wgmma", "tcgen05", "mma.sync" or "mfma", several joined by "+", or "none".
        faults: what is not as it should be; empty if all is well.
    """

    module: str
    label: str
    target: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    shared_limit: int
    matrix_instruction: str
    faults: tuple[str, ...]


def kernel_modules() -> list[str]:
    """Names of all modules of this package that hold Triton kernels, relative to it."""
    root = sys.modules[__package__.rpartition(".")[0]].__file__
    assert root is not None
    package = Path(root).parent
    found = []
    for folder in sorted(path for path in package.iterdir() if path.is_dir()):
        for path in sorted(folder.rglob("triton_kernels.py")):
            found.append(".".join(path.relative_to(package).with_suffix("").parts))
    return found


def all_cases(only: str = "") -> Iterator[tuple[str, CompileCase]]:
    """Module and case of every kernel whose "module label" contains `only`.

    Raises:
        ConfigError: this process interprets Triton kernels, or Triton is missing.
    """
    interpreted = os.environ.get("TRITON_INTERPRET")
    require(interpreted != "1", "TRITON_INTERPRET", interpreted, "unset where kernels are compiled")
    present = importlib.util.find_spec("triton") is not None
    require(present, "triton", "absent", "installed: pip install triton")
    for name in kernel_modules():
        module = importlib.import_module(f"{__package__.rpartition('.')[0]}.{name}")
        for case in module.compile_cases():
            if only in f"{name} {case.label}":
                yield name, case


def compile_case(module: str, case: CompileCase, target: str) -> CompileResult:
    """Compile one case for one of `TARGETS`.

    Raises:
        ConfigError: a target that the case is not for.
    """
    require(target in case.targets, "target", target, f"one of {', '.join(case.targets)}")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(case.kernel.arg_names)
    constants = set(case.constexprs)
    aligned = [name for name, kind in case.signature.items() if kind.startswith("*")] + list(case.divisible_by_16)
    source = ASTSource(
        fn=case.kernel,
        # Triton wants every argument, in order.
        signature={name: "constexpr" if name in constants else case.signature[name] for name in names},
        constexprs={(names.index(name),): value for name, value in case.constexprs.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    cuda = target.startswith("sm_")
    chip = GPUTarget("cuda", int(target[3:]), 32) if cuda else GPUTarget("hip", target, 64)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    compiled = triton.compile(source, target=chip, options=options)
    if cuda:
        text, (registers, spill_bytes) = compiled.asm["ptx"], _read_cubin(compiled.asm["cubin"])
    else:
        text = compiled.asm["amdgcn"]
        registers = _number(r"\.vgpr_count:\s+(\d+)", text)
        spill_bytes = 4 * _number(r"\.vgpr_spill_count:\s+(\d+)", text)
    found = [short for long, short in _INSTRUCTIONS.items() if long in text]
    shared, limit = int(compiled.metadata.shared), SHARED_MEMORY_LIMITS[target]
    faults = []
    if shared > limit:
        faults.append(f"shared memory {shared} above {limit}")
    if spill_bytes > MAX_SPILL_BYTES:
        faults.append(f"spills {spill_bytes} bytes, above {MAX_SPILL_BYTES}")
    if case.needs_matrix_instruction and not found:
        faults.append("no matrix instruction")
    return CompileResult(
        module, case.label, target, registers, spill_bytes, shared, limit, "+".join(found) or "none", tuple(faults)
    )


def compile_all(targets: Sequence[str] = TARGETS, only: str = "") -> Iterator[CompileResult]:
    """Results of every case whose "module label" contains `only`, on each of `targets` that it is for, as they come."""
    for target in targets:
        require(target in TARGETS, "targets", target, f"one of {', '.join(TARGETS)}")
    for module, case in all_cases(only):
        for target in targets:
            if target in case.targets:
                yield compile_case(module, case, target)


def compile_report(targets: Sequence[str] = TARGETS, only: str = "") -> list[CompileResult]:
    """Compile, print a table row by row, and return the rows; some seconds per kernel.

    Args:
        targets: chips, of `TARGETS`.
        only: part of the "module label" of the cases that are wanted; by default all.

    Raises:
        ConfigError: an unknown target, nothing to compile, or Triton missing or interpreting.
    """
    print(f"{'target':8}{'registers':>10}{'spill':>7}{'shared':>8}{'limit':>8}  {'matrix':18}kernel")
    results = []
    for result in compile_all(targets, only):
        results.append(result)
        print(
            f"{result.target:8}{result.registers:10}{result.spill_bytes:7}{result.shared_bytes:8}"
            f"{result.shared_limit:8}  {result.matrix_instruction:18}{result.module}: {result.label}"
            + (f"  FAULT: {'; '.join(result.faults)}" if result.faults else ""),
            flush=True,
        )
    require(bool(results), "only", only, "part of the name of a kernel")
    faulty = sum(bool(result.faults) for result in results)
    print(f"{len(results)} compiled, {faulty} with faults")
    return results


def _read_cubin(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack per thread, by the cuobjdump that comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        run = subprocess.run(
            [str(tool), "--dump-resource-usage", str(path)], capture_output=True, text=True, check=True
        )
    return _number(r"REG:(\d+)", run.stdout), _number(r"STACK:(\d+)", run.stdout)


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"the compiler's output has no {pattern!r}; this release of Triton writes another format")
    return int(match[1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; 1 if anything is not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m videospark.benchmarks.compile", description=__doc__)
    parser.add_argument("--target", action="append", choices=TARGETS, help="chip; again for several; default all")
    parser.add_argument("--only", default="", help="part of the name of the kernels that are wanted")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options: Any = parser.parse_args(arguments)
    results = compile_report(options.target or TARGETS, options.only)
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(result) for result in results], indent=2) + "\n")
    return int(any(result.faults for result in results))


if __name__ == "__main__":
    sys.exit(main())
