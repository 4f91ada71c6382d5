"""Networks split over processes: PyTorch's `fully_shard` (FSDP2), block by block, and what is done with the parts.

Each process holds some rows of every tensor (a DTensor). A block's tensors are gathered while it runs and freed after
it, in the forward and in the backward pass; gradients arrive as the mean over the processes, rows by rows.
accelerate's own FSDP2 wants an optimizer for every network, so it cannot split the teacher, and it does not run on
CPUs; here it gives processes, device and precision, and the splitting is done with PyTorch.

Gathered tensors keep their float32, and autocast rounds them as it does without sharding: the numbers of a run do not
depend on how it is split, up to the order of sums.

A process may ask an expert that another one does not need for its samples. As gathering takes all of them, the others
run it as well, on a sample that does not count (`Denoiser.agree`).
"""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs, DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ..core.config import ConfigError
from .config import DistillConfig
from .denoiser import Denoiser

PATIENCE = datetime.timedelta(hours=2)
"""How long processes wait for each other: one reads or writes whole models while the others have nothing to do."""


def build_accelerator(config: DistillConfig, device: str | None = None) -> Accelerator:
    """accelerate for this run; multi-process settings come from `accelerate launch` or torchrun.

    Args:
        config: the run.
        device: "cpu" to stay on the CPU; None leaves the choice to accelerate.

    Raises:
        ConfigError: accelerate was told to shard by itself.
    """
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        rule = "left out of accelerate's configuration: training.sharding = \"fsdp2\" in the run's is the way"
        raise ConfigError(f"use_fsdp: got true; must be {rule}")
    handlers = [
        # Wan 2.2 has two experts, and an update may touch one of them alone.
        DistributedDataParallelKwargs(find_unused_parameters=True),
        InitProcessGroupKwargs(timeout=PATIENCE),
        # A gathered tensor is gone after its block; a rounded copy in autocast's cache would stay.
        AutocastKwargs(cache_enabled=config.training.sharding == "none"),
    ]
    return Accelerator(mixed_precision=config.training.mixed_precision, cpu=device == "cpu", kwargs_handlers=handlers)


@dataclass(frozen=True)
class Sharding:
    """The processes that share the networks of a run.

    Attributes:
        mesh: all processes in a row.
        offload: whether the parts lie in RAM.
        owns_group: whether the group of processes was made here, for one that was started alone.
    """

    mesh: DeviceMesh
    offload: bool
    owns_group: bool

    @classmethod
    def build(cls, config: DistillConfig, accelerator: Accelerator) -> Sharding | None:
        """As the settings say; None without sharding."""
        if config.training.sharding == "none":
            return None
        kind = accelerator.device.type
        alone = not dist.is_initialized()
        if alone:
            backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=PATIENCE)
        mesh = init_device_mesh(kind, (dist.get_world_size(),))
        return cls(mesh, config.training.offload, alone)

    def close(self) -> None:
        """Ends a group of one process that was made here."""
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()

    def shard(self, network: Denoiser) -> None:
        """Splits a network in place, block by block; each block goes to the device for a moment, if it is not there.

        Parameters are other objects afterwards.
        """
        policy = OffloadPolicy()
        if self.offload:
            policy = CPUOffloadPolicy(pin_memory=self.mesh.device_type == "cuda")

        def split(module: nn.Module) -> None:
            # Also the outermost part is freed after its pass: what is gathered never outlives a step of the optimizer.
            fully_shard(module, mesh=self.mesh, reshard_after_forward=True, offload_policy=policy)

        for expert in network.experts.values():
            for block in expert.blocks:  # type: ignore[union-attr]
                split(block)
        split(network)
        network.agree = self._any

    def _any(self, asked: torch.Tensor) -> torch.Tensor:
        """Whether any process said yes, bool of the same shape."""
        answers = asked.to(torch.int32)
        dist.all_reduce(answers, dist.ReduceOp.MAX, group=self.mesh.get_group())
        return answers.bool()

    def clip_gradients(self, parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
        """Scales the gradients down to a common norm of `max_norm`; returns the norm before."""
        parts = [local(p.grad) for p in parameters if p.grad is not None]
        total = torch.zeros((), device=self.mesh.device_type)
        for part in parts:
            total += part.float().square().sum().to(total.device)
        dist.all_reduce(total, group=self.mesh.get_group())
        norm = total.sqrt()
        if math.isfinite(max_norm):
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            for part in parts:
                part.mul_(factor.to(part.device))
        return norm


def in_turn(accelerator: Accelerator) -> Iterator[None]:
    """Yields once in every process, one after the other: whole models are then in the RAM of one at a time."""
    for turn in range(accelerator.num_processes):
        if turn == accelerator.process_index:
            yield
        accelerator.wait_for_everyone()


@torch.no_grad()
def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process' rows, sharing their memory; a tensor that is not split as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


@torch.no_grad()
def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All rows; all processes must ask for it together."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    mesh = tensor.device_mesh
    # Rows that lie in RAM are gathered on the device, as the group of processes may know no other.
    part = tensor.to_local().to(mesh.device_type)
    placed = DTensor.from_local(
        part, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return placed.full_tensor()


def gathered(tensors: Mapping[str, torch.Tensor], keep: bool) -> dict[str, torch.Tensor]:
    """All tensors whole and on the CPU, one after the other; empty where `keep` is false. All processes take part."""
    found = {}
    for name, tensor in tensors.items():
        full = whole(tensor)
        if keep:
            found[name] = full.cpu()
    return found


@torch.no_grad()
def rows_of(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This process' rows of `full`, which is whole, as `like` is split; all of them where it is not."""
    if not isinstance(like, DTensor):
        return full
    chunks = full.chunk(like.device_mesh.size())
    rank = like.device_mesh.get_local_rank()
    return chunks[rank] if rank < len(chunks) else full[:0]


def split_as(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`full` on the device of `like`, and split like it; a copy."""
    part = rows_of(full, like).to(local(like).device, copy=True)
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=full.shape, stride=like.stride()
    )


@contextmanager
def exchanged(parameters: Mapping[str, nn.Parameter], values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """The parameters have the values meanwhile, and the values those of the parameters."""
    # `data` leaves the version counters alone: a backward pass that is still to come finds what it saved.
    pairs = [(local(parameters[name]).data, local(value).data) for name, value in values.items()]

    def swap() -> None:
        for left, right in pairs:
            kept = left.clone()
            left.copy_(right)
            right.copy_(kept)

    swap()
    try:
        yield
    finally:
        swap()
