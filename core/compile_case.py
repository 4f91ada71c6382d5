"""What a Triton kernel is compiled as where there is no GPU: the contract between kernels and the compile check.

Each `triton_kernels.py` has a function `compile_cases() -> list[CompileCase]`; `benchmarks/compile.py` compiles
them all and reads registers, spills and shared memory off the result. This module imports neither torch nor Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .config import require

TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
"""Ampere (A100), Ada, Hopper, Blackwell (B200), Blackwell (RTX) and AMD's MI300."""


@dataclass(frozen=True)
class CompileCase:
    """One kernel with the types, constants and launch settings that it would run with.

    Attributes:
        kernel: the function made by `triton.jit`.
        signature: Triton type of every argument that is no constant, such as "*bf16", "i32", "fp32". Pointers are
            taken to be aligned to 16 bytes, as PyTorch allocates them.
        constexprs: values of the `tl.constexpr` arguments, and of those that are specialised, such as a stride of 1.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline of its loops.
        label: what the case is called in tables, unique within its module.
        needs_matrix_instruction: whether code without a matrix instruction is a fault.
        divisible_by_16: integer arguments that are multiples of 16 in practice; loads are vectorised by that.
        targets: where it is compiled, of `TARGETS`; by default everywhere.

    Raises:
        ConfigError: an unknown target, or a name in `divisible_by_16` that is not in `signature`.
    """

    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int
    num_stages: int
    label: str
    needs_matrix_instruction: bool
    divisible_by_16: tuple[str, ...] = ()
    targets: tuple[str, ...] = TARGETS

    def __post_init__(self) -> None:
        for target in self.targets:
            require(target in TARGETS, "targets", target, f"one of {', '.join(TARGETS)}")
        for name in self.divisible_by_16:
            require(name in self.signature, "divisible_by_16", name, f"one of {', '.join(self.signature)}")
