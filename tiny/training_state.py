"""What every stage of the tiny training shares: optimizers, averaged weights, checkpoints, logs, pictures."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn


class MuonForKernels(torch.optim.Muon):
    """`torch.optim.Muon` for weights of any rank: a kernel `[out, in, ...]` is handled as the matrix `[out, -1]`."""

    def __init__(self, parameters: Iterable[nn.Parameter], **options: Any) -> None:
        self._kernels = list(parameters)
        self._matrices = [nn.Parameter(p.detach().flatten(1)) for p in self._kernels]  # views: one storage
        super().__init__(self._matrices, **options)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for kernel, matrix in zip(self._kernels, self._matrices, strict=True):
            if kernel.data_ptr() != matrix.data_ptr():
                raise RuntimeError("a parameter was moved after the optimizer was made")
            matrix.grad = None if kernel.grad is None else kernel.grad.flatten(1)
        super().step()


class Optimizers:
    """Muon on the matrices of hidden layers, AdamW on everything else, one warm-up-hold-decay schedule."""

    def __init__(
        self,
        matrices: list[nn.Parameter],
        others: list[nn.Parameter],
        *,
        muon_lr: float,
        adamw_lr: float,
        num_steps: int,
        warmup_steps: int = 60,
        decay_share: float = 0.35,
    ) -> None:
        self.muon = MuonForKernels(matrices, lr=muon_lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW(others, lr=adamw_lr, betas=(0.9, 0.99), weight_decay=0.01)
        self.parameters = [*matrices, *others]
        self._base = (muon_lr, adamw_lr)
        self._shape = (num_steps, warmup_steps, decay_share)

    def learning_rate_factor(self, step: int) -> float:
        """Linear warm-up, constant, then a cosine to 2 % over the last `decay_share` of the steps."""
        num_steps, warmup, decay_share = self._shape
        if step < warmup:
            return (step + 1) / warmup
        u = (step - num_steps * (1 - decay_share)) / (num_steps * decay_share)
        return 1.0 if u <= 0 else 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(u, 1.0)))

    def step(self, step: int, clip: float) -> float:
        """Clip, update, clear; returns the gradient's norm before clipping."""
        norm = float(nn.utils.clip_grad_norm_(self.parameters, clip))
        if not math.isfinite(norm):
            raise FloatingPointError(f"step {step}: the gradient's norm is {norm}")
        factor = self.learning_rate_factor(step)
        for optimizer, base in zip((self.muon, self.adamw), self._base, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = base * factor
            optimizer.step()
        for p in self.parameters:
            p.grad = None
        return norm

    def state_dict(self) -> dict:
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.muon.load_state_dict(state["muon"])
        self.adamw.load_state_dict(state["adamw"])


class AveragedWeights:
    """Exponential moving average of parameters, with a short memory at the start."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.values = {name: p.detach().clone() for name, p in module.named_parameters()}

    @torch.no_grad()
    def update(self, module: nn.Module, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        names, parameters = zip(*module.named_parameters(), strict=True)
        torch._foreach_lerp_([self.values[n] for n in names], [p.detach() for p in parameters], 1 - decay)

    @torch.no_grad()
    def copy_to(self, module: nn.Module) -> None:
        for name, p in module.named_parameters():
            p.copy_(self.values[name])


class StageFolder:
    """One stage's folder: `state.pt`-free checkpoints (safetensors and JSON), `log.jsonl`, TensorBoard, pictures."""

    def __init__(self, root: Path, stage: str) -> None:
        self.path = root / stage
        self.path.mkdir(parents=True, exist_ok=True)
        self._writer: Any = None
        self._log = (self.path / "log.jsonl").open("a", encoding="utf-8")
        self._start = time.time()

    def log(self, step: int, **values: float) -> None:
        """Append a record to the JSONL log and to TensorBoard."""
        record = {"step": step, "seconds": round(time.time() - self._start, 2)} | values
        self._log.write(json.dumps(record) + "\n")
        self._log.flush()
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # slow import, wanted by training alone

            self._writer = SummaryWriter(str(self.path / "tensorboard"))
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def save(self, step: int, tensors: dict[str, torch.Tensor], optimizer_state: dict) -> None:
        """Write a checkpoint under a temporary name and rename it: it is complete or not there."""
        flat, numbers = _flatten(optimizer_state)
        temporary = self.path / "checkpoint.tmp.safetensors"
        save_file(
            {k: v.contiguous() for k, v in tensors.items()} | {f"optimizer.{k}": v for k, v in flat.items()},
            temporary,
            metadata={"step": str(step), "numbers": json.dumps(numbers)},
        )
        os.replace(temporary, self.path / "checkpoint.safetensors")

    def load(self) -> tuple[int, dict[str, torch.Tensor], dict] | None:
        """The newest checkpoint as (step, tensors, optimizer state), or None if there is none."""
        path = self.path / "checkpoint.safetensors"
        if not path.exists():
            return None
        from safetensors import safe_open

        with safe_open(path, "pt") as handle:
            metadata = handle.metadata()
        everything = load_file(path)
        flat = {k[len("optimizer.") :]: v for k, v in everything.items() if k.startswith("optimizer.")}
        tensors = {k: v for k, v in everything.items() if not k.startswith("optimizer.")}
        return int(metadata["step"]), tensors, _unflatten(flat, json.loads(metadata["numbers"]))


def _flatten(state: dict) -> tuple[dict[str, torch.Tensor], dict[str, list]]:
    """Split optimizer states into tensors and JSON numbers, by path."""
    tensors: dict[str, torch.Tensor] = {}
    groups: dict[str, list] = {}
    for name, part in state.items():
        groups[name] = part["param_groups"]
        for index, slots in part["state"].items():
            for slot, value in slots.items():
                tensors[f"{name}/{index}/{slot}"] = torch.as_tensor(value).clone()
    return tensors, groups


def _unflatten(tensors: dict[str, torch.Tensor], groups: dict[str, list]) -> dict:
    state: dict = {name: {"state": {}, "param_groups": g} for name, g in groups.items()}
    for path, value in tensors.items():
        name, index, slot = path.split("/")
        state[name]["state"].setdefault(int(index), {})[slot] = value
    return state
