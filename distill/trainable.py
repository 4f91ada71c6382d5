"""Which tensors learn, which optimizers move them, and the average of their values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..attention.config import AttentionConfig
from ..core.config import ConfigError, require
from .config import LoRAConfig, TrainingConfig
from .denoiser import Denoiser
from .sharding import local, rows_of, split_as

BRANCH = ".linear_branch."
FINAL_FACTOR = 0.02


def add_adapters(denoiser: Denoiser, config: LoRAConfig) -> None:
    """Puts peft adapters on every layer that the settings name; they start without effect.

    Raises:
        ConfigError: peft is not installed, or a target names no layer.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ConfigError("training.trainable: got 'lora'; must be another one, as peft is not installed") from error
    for name, expert in denoiser.experts.items():
        layers = [path for path, module in expert.named_modules() if isinstance(module, nn.Linear)]
        for target in config.targets:
            found = any(path == target or path.endswith(f".{target}") for path in layers)
            require(found, "training.lora.targets", target, f"the end of a linear layer's name in {name}")
        expert.add_adapter(LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=list(config.targets)))  # type: ignore[operator]


def merge_adapters(denoiser: Denoiser) -> None:
    """Adds the adapters to the weights and takes them away; leaves a stock transformer."""
    for expert in denoiser.experts.values():
        if getattr(expert, "peft_config", None):
            expert.fuse_lora()  # type: ignore[operator]
            expert.unload_lora()  # type: ignore[operator]


def choose_trainable(
    denoiser: Denoiser, training: TrainingConfig, attention: AttentionConfig | None
) -> dict[str, nn.Parameter]:
    """Lets the parameters of the settings learn and no others; returns them by name.

    Args:
        denoiser: the network.
        training: says which: all, adapters, or branches.
        attention: of the student; None for a dense network, which has no branch and learns all where the student would
            learn its branch. The branches of dense layers never run and so never learn.

    Raises:
        ConfigError: nothing is left to learn.
    """
    if training.trainable == "lora":
        add_adapters(denoiser, training.lora)
    idle = () if attention is None else tuple(f".blocks.{layer}.attn1{BRANCH}" for layer in attention.dense_layers)
    chosen = {}
    for name, parameter in denoiser.named_parameters():
        branch = BRANCH in name
        wanted = {
            "full": True,
            "lora": ".lora_" in name or branch,
            "branch": branch or attention is None,
        }[training.trainable]
        wanted = wanted and not any(part in name for part in idle)
        parameter.requires_grad_(wanted)
        if wanted:
            chosen[name] = parameter
    require(len(chosen) > 0, "training.trainable", training.trainable, "one that leaves something to learn")
    return chosen


def build_optimizers(
    parameters: Mapping[str, nn.Parameter], training: TrainingConfig, learning_rate: float
) -> dict[str, torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the matrices of the blocks and AdamW for the rest."""
    matrices = {n: p for n, p in parameters.items() if p.ndim == 2 and ".blocks." in n} if _muon(training) else {}
    rest = [p for n, p in parameters.items() if n not in matrices]
    made: dict[str, torch.optim.Optimizer] = {}
    if rest:
        made["adamw"] = torch.optim.AdamW(
            rest, lr=learning_rate, betas=training.betas, weight_decay=training.weight_decay
        )
    if matrices:
        made["muon"] = torch.optim.Muon(
            list(matrices.values()),
            lr=training.muon_learning_rate,
            weight_decay=training.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
    return made


def _muon(training: TrainingConfig) -> bool:
    return training.optimizer == "muon"


def learning_rate_factor(training: TrainingConfig, step: int, updates: int) -> float:
    """What the learning rates are multiplied by: a linear rise over the first updates, then constant or a cosine.

    Args:
        training: the settings.
        step: iterations done, for the cosine.
        updates: updates of this role done, for the rise.
    """
    rise = min(1.0, (updates + 1) / training.warmup_steps) if training.warmup_steps else 1.0
    if training.schedule == "constant":
        return rise
    share = min(step / training.num_steps, 1.0)
    return rise * (FINAL_FACTOR + (1 - FINAL_FACTOR) * 0.5 * (1 + math.cos(math.pi * share)))


class WeightAverage:
    """Exponential moving average of the trained parameters; its memory is short in the first updates."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self.decay = decay
        self.values = {name: p.detach().clone() for name, p in parameters.items()}

    @torch.no_grad()
    def update(self, parameters: Mapping[str, nn.Parameter], updates: int) -> None:
        """Takes the parameters in after update number `updates` (from 0)."""
        decay = min(self.decay, (1 + updates) / (10 + updates))
        names = list(self.values)
        torch._foreach_lerp_([local(self.values[n]) for n in names], [local(parameters[n]) for n in names], 1 - decay)


@torch.no_grad()
def copy_values(parameters: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Writes `values`, which are whole, into the parameters of the same names; of a split one this process' rows.

    Raises:
        ConfigError: names or shapes differ.
    """
    unlike = sorted(set(parameters) ^ set(values))
    require(not unlike, "checkpoint tensors", unlike[:4], "those that are trained, no more and no fewer")
    for name, parameter in parameters.items():
        value = values[name]
        shape = tuple(value.shape)
        require(shape == tuple(parameter.shape), name, shape, f"of shape {tuple(parameter.shape)}")
        local(parameter).copy_(rows_of(value, parameter))


def optimizer_tensors(
    optimizers: Mapping[str, torch.optim.Optimizer], parameters: Mapping[str, nn.Parameter]
) -> dict[str, torch.Tensor]:
    """Every tensor of the optimizers' states under "optimizer/parameter/slot"; not copied."""
    names = {id(p): name for name, p in parameters.items()}
    tensors = {}
    for key, optimizer in optimizers.items():
        for parameter, slots in optimizer.state.items():
            for slot, value in slots.items():
                tensors[f"{key}/{names[id(parameter)]}/{slot}"] = torch.as_tensor(value).detach()
    return tensors


def load_optimizer_tensors(
    optimizers: Mapping[str, torch.optim.Optimizer],
    parameters: Mapping[str, nn.Parameter],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Undoes `optimizer_tensors`, value for value; `tensors` are whole, also where parameters are split."""
    states: dict[str, dict[str, dict[str, torch.Tensor]]] = {key: {} for key in optimizers}
    for path, value in tensors.items():
        key, name, slot = path.split("/")
        if key not in states or name not in parameters:
            raise ConfigError(f"checkpoint optimizer: got {path!r}; must belong to a tensor that is trained")
        # The count of steps is one number; the others have the parameter's shape, and are split as it is.
        counts = value.shape != parameters[name].shape
        states[key].setdefault(name, {})[slot] = value if counts else split_as(value, parameters[name])
    names = {id(p): name for name, p in parameters.items()}
    for key, optimizer in optimizers.items():
        whole = optimizer.state_dict()
        order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
        whole["state"] = {i: states[key][name] for i, name in enumerate(order) if name in states[key]}
        optimizer.load_state_dict(whole)


def without_gradient(parameters: Mapping[str, nn.Parameter], names: Iterable[str]) -> set[str]:
    """Those of `names` whose parameters got no gradient."""
    return {name for name in names if parameters[name].grad is None}


def describe(parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """How much is trained, for the log."""
    return {"tensors": len(parameters), "parameters": sum(p.numel() for p in parameters.values())}
