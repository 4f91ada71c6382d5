"""Of two experts one is on the device and the other in the memory of the CPU, and the change costs nearly no time.

Both experts have the same shapes, so they share one set of tensors on the device. While the first one runs for the last
time, each of its blocks is overwritten by that of the second one as soon as it is done, on a stream of its own; the
second one then finds its blocks there. Likewise back, in the last step of a clip, for the next one. No second set of
tensors is ever on the device.

Which pass is the last one is read off the scheduler: a guess, on which only the time depends. Before a block runs its
weights are made sure of in any case. On a CPU everything is copied where it is needed: slower, and the same numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..core.config import ConfigError, require

EXPERTS = ("transformer", "transformer_2")


@dataclass
class _Slot:
    """One tensor of both experts: the objects that modules hold, their data on the CPU, and the place on the device."""

    tensors: tuple[torch.Tensor, torch.Tensor]
    waiting: tuple[torch.Tensor, torch.Tensor]
    place: torch.Tensor


class ExpertSwap:
    """The swap at work in a pipeline of two experts; `remove` ends it.

    Args:
        pipe: a Wan pipeline with two experts, as it will run: accelerated, with its LoRAs or without.
        device: where they run.

    Raises:
        ConfigError: one expert, experts of different shapes, or blocks that are compiled.

    Attributes:
        early: groups that were brought while the other expert still ran.
        late: groups that were asked for only when their expert began.
    """

    def __init__(self, pipe: Any, device: torch.device) -> None:
        found: list[Any] = [getattr(pipe, name, None) for name in EXPERTS]
        require(all(part is not None for part in found), "offload", "experts", "used with a pipeline of two experts")
        self._experts: tuple[nn.Module, nn.Module] = (found[0], found[1])
        self._pipe = weakref.ref(pipe)
        self.device = device
        self.early = self.late = 0
        self._check()
        streamed = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if streamed else None
        self._groups = [self._slots(part) for part in self._parts()]
        for expert in self._experts:
            kept = {id(tensor) for _, tensor in _tensors(expert)}
            for buffer in expert.buffers():
                if id(buffer) not in kept:  # tables, which both keep on the device
                    buffer.data = buffer.data.to(device)
        self._owner = [0] * len(self._groups)
        self._ready: list[Any] = [None] * len(self._groups)
        self._leaving = False
        self._step: tuple[int, int] | None = None
        self._passes = 0
        self._handles: list[Any] = []
        self._install()

    def remove(self, device: torch.device | None = None) -> None:
        """Give both experts tensors of their own again, on the CPU or on `device`, and take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        for slots in self._groups:
            for slot in slots:
                for tensor, data in zip(slot.tensors, slot.waiting, strict=True):
                    tensor.data = data if device is None else data.to(device)
        self._groups = []

    def device_bytes(self) -> int:
        """Bytes of the tensors on the device, shared by both experts."""
        return sum(slot.place.numel() * slot.place.element_size() for slots in self._groups for slot in slots)

    def _check(self) -> None:
        first, second = ({name: (tuple(t.shape), t.dtype) for name, t in _tensors(part)} for part in self._experts)
        differing = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
        if differing:
            shown = ", ".join(differing[:3])
            raise ConfigError(f"offload: got experts that differ in {len(differing)} tensors ({shown}); must be alike")
        for name, expert in zip(EXPERTS, self._experts, strict=True):
            for index, block in enumerate(expert.blocks):  # type: ignore[arg-type]
                free = block._compiled_call_impl is None and not hasattr(block, "_diffusers_hook")
                rule = "neither compiled nor offloaded: their weights come and go between blocks"
                require(free, f"{name}.blocks.{index}", "one that is compiled or offloaded", rule)

    def _parts(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        """The blocks of both experts in order; last, the experts as a whole for what lies outside of the blocks."""
        first, second = self._experts
        yield from zip(first.blocks, second.blocks, strict=True)  # type: ignore[arg-type]
        yield first, second

    def _slots(self, parts: tuple[nn.Module, nn.Module]) -> list[_Slot]:
        whole = parts[0] is self._experts[0]
        named = [{n: t for n, t in _tensors(part) if not (whole and n.startswith("blocks."))} for part in parts]
        slots = []
        for name, first in named[0].items():
            pair = (first, named[1][name])
            waiting = (self._park(pair[0]), self._park(pair[1]))
            place = pair[0].data.to(self.device, copy=True)
            pair[0].data, pair[1].data = place, waiting[1]
            slots.append(_Slot(pair, waiting, place))
        return slots

    def _park(self, tensor: torch.Tensor) -> torch.Tensor:
        data = tensor.detach().to("cpu", copy=True)
        return data.pin_memory() if self._stream is not None else data

    def _install(self) -> None:
        for who, expert in enumerate(self._experts):
            blocks = list(expert.blocks)  # type: ignore[arg-type]
            self._handles += [
                expert.register_forward_pre_hook(lambda *_, who=who: self._begin(who), prepend=True),
                expert.register_forward_hook(lambda *_, who=who: self._end(who), always_call=True),
            ]
            for index, block in enumerate(blocks):
                self._handles += [
                    block.register_forward_pre_hook(lambda *_, who=who, i=index: self._need(i, who), prepend=True),
                    block.register_forward_hook(lambda *_, who=who, i=index: self._done(i, who)),
                ]

    def _begin(self, who: int) -> None:
        self._leaving = self._is_last_pass(who)
        rest = len(self._groups) - 1
        # What lies outside of the blocks is needed first; the other expert is idle, so all can be asked for at once.
        for index in (rest, *range(rest)):
            if self._owner[index] != who:
                self.late += 1
                self._bring(index, who)
        self._need(rest, who)

    def _end(self, who: int) -> None:
        if self._leaving:
            self._done(len(self._groups) - 1, who)
        self._leaving = False

    def _done(self, index: int, who: int) -> None:
        if self._leaving:
            self.early += 1
            self._bring(index, 1 - who)

    def _need(self, index: int, who: int) -> None:
        if self._owner[index] != who:
            self.late += 1
            self._bring(index, who)
        event = self._ready[index]
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)
            self._ready[index] = None

    def _bring(self, index: int, who: int) -> None:
        """Overwrite a group on the device by that of an expert, once the work that was asked for before is done."""
        if self._stream is None:
            self._copy(index, who)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                self._copy(index, who)
                self._ready[index] = self._stream.record_event()
        self._owner[index] = who

    def _copy(self, index: int, who: int) -> None:
        for slot in self._groups[index]:
            slot.place.copy_(slot.waiting[who], non_blocking=True)
            slot.tensors[who].data, slot.tensors[1 - who].data = slot.place, slot.waiting[1 - who]

    def _is_last_pass(self, who: int) -> bool:
        """Whether this expert is not wanted again before the other one is."""
        pipe = self._pipe()
        if pipe is None or getattr(pipe, "_guidance_scale", None) is None:  # not inside a run of the pipeline
            return False
        times = getattr(pipe.scheduler, "timesteps", None)
        step = getattr(pipe.scheduler, "step_index", None) or 0
        if times is None or step >= len(times):
            return False
        self._passes = self._passes + 1 if self._step == (who, step) else 1
        self._step = (who, step)
        if self._passes < (2 if pipe.do_classifier_free_guidance else 1):
            return False
        if step + 1 == len(times):
            return who == 1  # the next clip begins with the first expert
        boundary = (pipe.config.boundary_ratio or 0.0) * pipe.scheduler.config.num_train_timesteps
        return bool(float(times[step + 1]) < boundary) == (who == 0)


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and the buffers that are part of the state: tables are computed anew on any device."""
    yield from module.named_parameters()
    kept = set(module.state_dict(keep_vars=True))
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in kept)
