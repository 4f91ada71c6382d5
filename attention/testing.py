"""Conformance suite for attention backends, for those in this package and for those of third parties.

    from videospark.attention.testing import check_backend
    print(check_backend("mine", device="cuda"))

It routes, computes the same attention in float64 from the same list of blocks, and compares outputs and gradients. A
backend may be off by twice what plain low-precision attention is off, three times for gradients
(`core.numerics.three_way`). Further checks: nothing outside of the tokens is read, layouts do not matter, batches and
heads do not mix, results repeat, unusual values stay finite, a NaN is never hidden, and what a backend cannot do it
refuses.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..core.config import require
from ..core.numerics import relative_error, three_way
from .backends import AttentionBackend, get_backend
from .block_sparse.choice import choose_blocks
from .block_sparse.reference import reference_attention
from .config import AttentionConfig
from .context import ForwardContext
from .grid import TokenGrid
from .routing import BlockMap

LENGTHS = (1, 5, 63, 64, 65, 127)
HEAD_DIMS = (64, 128, 32)
BLOCK_SIZES = ((16, 16), (64, 64), (32, 16), (16, 48), (128, 64))
DTYPES = ("float32", "bfloat16", "float16")


class ConformanceError(AssertionError):
    """A backend that does not do what it should; the message lists each failure."""


@dataclass(frozen=True)
class Case:
    """Inputs of one check.

    Attributes:
        length: tokens; the grid has this many frames of one token, so that the first frame is the first token.
        dtype: name of the dtype.
        head_dim: channels of a head.
        block_size_q: tokens in a query block.
        block_size_k: tokens in a key block.
        keep_ratio: share of the key blocks that is kept.
        forced: whether the blocks on the diagonal and of the first frame are always kept.
        batch: videos.
        heads: heads.
    """

    length: int
    dtype: str
    head_dim: int
    block_size_q: int
    block_size_k: int
    keep_ratio: float = 0.4
    forced: bool = False
    batch: int = 2
    heads: int = 2

    def config(self, backend: str) -> AttentionConfig:
        """The settings that a pipeline would ask for."""
        return AttentionConfig(
            backend=backend,
            keep_ratio=self.keep_ratio,
            block_size_q=self.block_size_q,
            block_size_k=self.block_size_k,
            token_order="raster",
            keep_diagonal=self.forced,
            keep_first_frame=self.forced,
        )

    def tensors(self, device: str) -> list[torch.Tensor]:
        """Query, key, value and a gradient of the output, seeded: [batch, length, heads, head_dim] each."""
        generator = torch.Generator().manual_seed(self.length * 1009 + self.head_dim)
        shape = (self.batch, self.length, self.heads, self.head_dim)
        dtype = getattr(torch, self.dtype)
        return [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(4)]


@dataclass(frozen=True)
class Finding:
    """Outcome of one check on one case; `message` says what was measured or what is wrong."""

    check: str
    case: Case
    ok: bool
    message: str

    def __str__(self) -> str:
        return f"{'ok    ' if self.ok else 'FAILED'} {self.check}: {self.message} [{self.case}]"


@dataclass(frozen=True)
class ConformanceReport:
    """All outcomes of `check_backend`.

    Attributes:
        backend: its name.
        findings: outcomes, in order.
        skipped: cases that the backend's constraints exclude, with the reasons.
    """

    backend: str
    findings: tuple[Finding, ...]
    skipped: tuple[tuple[Case, str], ...]

    @property
    def failures(self) -> tuple[Finding, ...]:
        """Outcomes that are not as they should be."""
        return tuple(finding for finding in self.findings if not finding.ok)

    def __str__(self) -> str:
        lines = [f"backend {self.backend!r}: {len(self.findings)} checks, {len(self.failures)} failed"]
        lines += [str(finding) for finding in self.findings]
        lines += [f"skipped: {reason} [{case}]" for case, reason in self.skipped]
        return "\n".join(lines)


def check_backend(
    name: str,
    *,
    device: str = "cpu",
    lengths: Sequence[int] = LENGTHS,
    dtypes: Sequence[str] = DTYPES,
    head_dims: Sequence[int] = HEAD_DIMS,
    block_sizes: Sequence[tuple[int, int]] = BLOCK_SIZES,
    own_routing: bool = False,
    max_relative_error: float | None = None,
) -> ConformanceReport:
    """Check that the backend `name` computes what it should.

    Args:
        name: a registered backend.
        device: where to run it.
        lengths: numbers of tokens; each is run in each dtype, and head dims and block sizes take turns.
        dtypes: names of dtypes.
        head_dims: channels of a head.
        block_sizes: pairs of query and key block sizes.
        own_routing: the backend chooses blocks by a rule of its own; it is then held against the blocks it records.
        max_relative_error: for backends that quantize: outputs may be off by this much (Frobenius norm), instead of by
            twice the error of plain low-precision attention.

    Returns:
        The report; print it.

    Raises:
        ConformanceError: a check failed.
        ConfigError: an unknown backend, or one that can run none of the cases.
    """
    backend = get_backend(name)
    runner = _Runner(name, backend, device, own_routing, max_relative_error)
    skipped, able = [], []
    for case in _cases(lengths, dtypes, head_dims, block_sizes):
        reasons = backend.constraints.problems(case.config(name), torch.device(device).type, case.dtype, case.head_dim)
        if reasons:
            skipped.append((case, "; ".join(reasons)))
        else:
            able.append(case)
    causes = "; ".join(sorted({reason for _, reason in skipped}))
    require(bool(able), "backend", name, f"able to run at least one case on {device}: {causes}")
    findings: list[Finding] = []
    for case in able:
        findings += runner.values(case)
    # The most blocks and a short last one: there is something to leave out and something to mask.
    telling = max(able, key=lambda one: (one.length % 16 != 0, one.length // one.block_size_k, one.length))
    for check in runner.properties():
        findings += check(telling)
    report = ConformanceReport(name, tuple(findings), tuple(skipped))
    if report.failures:
        raise ConformanceError("\n".join([str(report).splitlines()[0], *map(str, report.failures)]))
    return report


def _cases(
    lengths: Sequence[int], dtypes: Sequence[str], head_dims: Sequence[int], block_sizes: Sequence[tuple[int, int]]
) -> Iterator[Case]:
    """Every length in every dtype; the other settings take turns, with steps that let all of them meet."""
    for number, (length, dtype) in enumerate(itertools.product(lengths, dtypes)):
        size_q, size_k = block_sizes[number % len(block_sizes)]
        head_dim = head_dims[(number + number // len(dtypes)) % len(head_dims)]
        yield Case(length, dtype, head_dim, size_q, size_k, forced=number % 4 == 3)


@dataclass(frozen=True)
class _Runner:
    name: str
    backend: AttentionBackend
    device: str
    own_routing: bool
    max_relative_error: float | None

    @property
    def has_gradients(self) -> bool:
        devices = self.backend.constraints.gradient_devices
        return devices is None or torch.device(self.device).type in devices

    def properties(self) -> list[Callable[[Case], list[Finding]]]:
        return [self.memory, self.independence, self.repeats, self.unusual, self.shows_nan, self.refusal]

    def run(self, case: Case, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> _Result:
        context = ForwardContext(grid=TokenGrid(query.shape[1], 1, 1), keep_maps=True)
        config = case.config(self.name)
        out = self.backend(query, key, value, context=context, config=config)
        return _Result(out, context.maps.get(context.layer))

    def values(self, case: Case) -> list[Finding]:
        """Blocks, output and gradients against float64, by the three-way rule."""
        query, key, value, grad = case.tensors(self.device)
        leaves = [tensor.requires_grad_(self.has_gradients) for tensor in (query, key, value)]
        result = self.run(case, *leaves)
        findings = [self._same_blocks(case, query, key, result.block_map)]
        if not findings[0].ok:
            return findings
        if result.out.shape != query.shape or result.out.dtype != value.dtype:
            wrong = f"got {result.out.dtype} {tuple(result.out.shape)}; must be like value, {value.dtype}"
            return [*findings, Finding("shape", case, False, f"{wrong} {tuple(value.shape)}")]
        actual = [result.out.detach()]
        if self.has_gradients:
            actual += torch.autograd.grad(result.out, leaves, grad)
        mask = None if result.block_map is None else result.block_map.token_mask()
        plain, truth = (
            _masked([tensor.detach().to(dtype) for tensor in (query, key, value, grad)], mask)
            for dtype in (query.dtype, torch.float64)
        )
        if result.block_map is not None:
            # The truth is held against the reference backend too, so that the two cannot drift apart.
            wide = [tensor.detach().double() for tensor in (query, key, value)]
            truth[0] = reference_attention(wide[0], wide[1], wide[2], result.block_map)
        names = ("output", "gradient of query", "gradient of key", "gradient of value")
        for label, got, low, want in zip(names, actual, plain, truth, strict=False):
            findings.append(self._close(label, case, got, low, want))
        return findings

    def _close(
        self, label: str, case: Case, got: torch.Tensor, low: torch.Tensor, want: torch.Tensor, factor: float = 0.0
    ) -> Finding:
        if label == "output" and self.max_relative_error is not None:
            error = relative_error(got, want)
            message = f"relative error {error:.3e}, allowed {self.max_relative_error:.3e}"
            return Finding(label, case, error <= self.max_relative_error, message)
        outcome = three_way(got, low, want, factor or (2.0 if label == "output" else 3.0))
        return Finding(label, case, outcome.ok, outcome.message)

    def _same_blocks(self, case: Case, query: torch.Tensor, key: torch.Tensor, block_map: BlockMap | None) -> Finding:
        if not self.backend.constraints.sparse:
            return Finding("blocks", case, True, "attends to everything")
        if block_map is None:
            text = "records none; route with choose_blocks or call context.record(block_map)"
            return Finding("blocks", case, False, text)
        if self.own_routing:
            indices = block_map.indices
            # Places that a ragged map leaves empty hold the number of blocks, at the end of their row.
            empty = (indices == block_map.num_key_blocks) & block_map.ragged
            valid = bool((indices >= 0).all() and ((indices < block_map.num_key_blocks) | empty).all())
            valid = valid and not bool(empty[..., 0].any())
            ascending = bool(((indices[..., 1:] > indices[..., :-1]) | empty[..., :-1] & empty[..., 1:]).all())
            return Finding("blocks", case, valid and ascending, "recorded blocks must be in range and ascending")
        context = ForwardContext(grid=TokenGrid(query.shape[1], 1, 1))
        wanted = choose_blocks(query.detach(), key.detach(), context, case.config(self.name))
        same = torch.equal(wanted.indices, block_map.indices)
        return Finding("blocks", case, same, "the blocks of the router" if same else "not the blocks of the router")

    def memory(self, case: Case) -> list[Finding]:
        """NaN around the tokens, and other layouts of the same numbers, change nothing."""
        query, key, value, _ = case.tensors(self.device)
        wanted = self.run(case, query, key, value).out
        buried = self.run(case, *(_surrounded_by_nan(tensor) for tensor in (query, key, value))).out
        turned = self.run(
            case, *(tensor.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0) for tensor in (query, key, value))
        ).out
        return [
            Finding("memory around the tokens", case, torch.equal(buried, wanted), "must not reach the result"),
            Finding("layout", case, _near(turned, wanted), "other strides must give the same"),
        ]

    def independence(self, case: Case) -> list[Finding]:
        """One video and one head alone give what they give among others."""
        query, key, value, _ = case.tensors(self.device)
        wanted = self.run(case, query, key, value).out[1:, :, 1:2]
        alone = self.run(case, *(tensor[1:, :, 1:2] for tensor in (query, key, value))).out
        return [Finding("batches and heads", case, _near(alone, wanted), "must not mix")]

    def repeats(self, case: Case) -> list[Finding]:
        """Twice the same inputs give the same bits."""
        query, key, value, _ = case.tensors(self.device)
        first, second = (self.run(case, query, key, value).out for _ in range(2))
        return [Finding("repetition", case, torch.equal(first, second), "must give the same bits")]

    def unusual(self, case: Case) -> list[Finding]:
        """Zeros, constants and large numbers stay finite and right."""
        query, key, value, _ = case.tensors(self.device)
        large = math.sqrt(torch.finfo(query.dtype).max) if query.dtype == torch.float16 else 1e4
        inputs = {
            "zeros": [torch.zeros_like(tensor) for tensor in (query, key, value)],
            "constants": [torch.full_like(tensor, 3.0) for tensor in (query, key, value)],
            "large scores": [query * 100, key * 100, value],
            "large values": [query, key, value.sign() * large],
        }
        findings = []
        for label, tensors in inputs.items():
            result = self.run(case, *tensors)
            mask = None if result.block_map is None else result.block_map.token_mask()
            wanted = _masked([*(tensor.double() for tensor in tensors)], mask)[0]
            finite = bool(torch.isfinite(result.out).all())
            error = float((result.out.double() - wanted).abs().max() / tensors[2].double().abs().max().clamp(min=1.0))
            # Scores of 1e4 are rounded by a unit where plain attention rounds them; only their finiteness is held.
            limit = math.inf if label == "large scores" else self.max_relative_error or 0.02
            text = f"largest error {error:.2e} of the largest value, allowed {limit:.2e}, must be finite"
            findings.append(Finding(label, case, finite and error <= limit, text))
        return findings

    def shows_nan(self, case: Case) -> list[Finding]:
        """A NaN in a query or in a value that is attended to is a NaN in the result."""
        query, key, value, _ = case.tensors(self.device)
        broken = query.clone()
        broken[0, 0, 0, 0] = math.nan
        shown = bool(torch.isnan(self.run(case, broken, key, value).out[0, 0, 0]).any())
        all_values = value.clone()
        all_values[0, :, 0] = math.nan
        also = bool(torch.isnan(self.run(case, query, key, all_values).out[0, :, 0]).all())
        return [
            Finding("NaN in a query", case, shown, "must not be hidden"),
            Finding("NaN in values", case, also, "must not be hidden"),
        ]

    def refusal(self, case: Case) -> list[Finding]:
        """Without a backward, a wanted gradient is an error and not a tensor without history."""
        if self.has_gradients:
            return []
        query, key, value, _ = case.tensors(self.device)
        try:
            result = self.run(case, query.requires_grad_(), key, value)
        except NotImplementedError as error:
            return [Finding("refusal of gradients", case, True, str(error))]
        # Where everything is kept, dense attention may have taken over, and that has a backward.
        dense = result.block_map is not None and result.block_map.is_full and result.out.requires_grad
        return [Finding("refusal of gradients", case, dense, "must raise NotImplementedError")]


@dataclass(frozen=True)
class _Result:
    out: torch.Tensor
    block_map: BlockMap | None


def _masked(tensors: list[torch.Tensor], mask: torch.Tensor | None) -> list[torch.Tensor]:
    """Output of plain attention, and the gradients of query, key and value where a fourth tensor is given."""
    query, key, value = (tensor.detach().clone().requires_grad_(len(tensors) == 4) for tensor in tensors[:3])
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
    gradients = torch.autograd.grad(out, (query, key, value), tensors[3]) if len(tensors) == 4 else ()
    return [out.detach(), *gradients]


def _surrounded_by_nan(tokens: torch.Tensor) -> torch.Tensor:
    """The same tokens as part of a tensor that is NaN everywhere else."""
    batch, length, heads, head_dim = tokens.shape
    store = torch.full((batch, length + 256, heads, head_dim), math.nan, dtype=tokens.dtype, device=tokens.device)
    store[:, 128 : 128 + length] = tokens
    return store[:, 128 : 128 + length]


def _near(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal but for the order of sums."""
    return relative_error(left, right) <= 8 * torch.finfo(right.dtype).eps
