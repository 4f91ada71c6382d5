"""The stock Wan transformer, or its two experts, as one velocity field; and a recorder of what its layers give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..attention.config import AttentionConfig
from ..attention.grid import TokenGrid, inverse_order
from ..core.config import ConfigError, require
from .flow import Condition, VelocityField

EXPERTS = ("transformer", "transformer_2")


class Denoiser(nn.Module):
    """Velocity of noisy latents, by the expert that the noise level belongs to.

    Args:
        experts: "transformer" and, for Wan 2.2, "transformer_2" for the levels below the boundary.
        boundary_ratio: share of the largest time from which on "transformer" is asked; None with one expert.
        expand_timesteps: the model takes one time per token, so a first frame can be given at time 0.
        num_train_timesteps: time of the noise level 1.

    Attributes:
        image_channels: beside those of the noisy latents; 0 for a model without.
        agree: where experts can only be run by all processes together: from what this one asks for, bool [experts], to
            what any of them asks for.
    """

    def __init__(
        self,
        experts: Mapping[str, nn.Module],
        *,
        boundary_ratio: float | None,
        expand_timesteps: bool,
        num_train_timesteps: int = 1000,
    ) -> None:
        super().__init__()
        two = len(experts) == 2
        require(two == (boundary_ratio is not None), "boundary_ratio", boundary_ratio, "given for two experts alone")
        configs: dict[str, Any] = {name: expert.config for name, expert in experts.items()}
        extra = {name: config.in_channels - config.out_channels for name, config in configs.items()}
        self.image_channels: int = next(iter(extra.values()))
        for name, config in configs.items():
            fits = extra[name] == self.image_channels >= 0
            rule = f"{config.out_channels} and channels for an image, as many in each expert"
            require(fits, f"{name}.in_channels", config.in_channels, rule)
        self.agree: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.experts = nn.ModuleDict(experts)
        self.boundary_ratio = boundary_ratio
        self.expand_timesteps = expand_timesteps
        self.num_train_timesteps = num_train_timesteps

    def forward(
        self,
        latents: torch.Tensor,
        sigma: torch.Tensor,
        prompt_embeds: torch.Tensor,
        first_frame: torch.Tensor | None = None,
        keeps_first: torch.Tensor | None = None,
        image_latents: torch.Tensor | None = None,
        image_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Velocity, float32 [B, C, F, h, w]; zero in a first frame that is given.

        Args:
            latents: [B, C, F, h, w].
            sigma: noise levels, float32 [B].
            prompt_embeds: [B, S, text_dim].
            first_frame: clean first latent frame [B, C, 1, h, w], or None.
            keeps_first: bool [B], which clips use it.
            image_latents: [B, image_channels, F, h, w]; None for a model without such channels.
            image_embeds: [B, tokens, image_dim], or None.
        """
        condition = Condition(prompt_embeds, prompt_embeds[:1], first_frame, keeps_first, image_latents, image_embeds)
        given = 0 if image_latents is None else image_latents.shape[1]
        require(given == self.image_channels, "channels of the image", given, f"{self.image_channels}, the model's")
        latents = condition.hold(latents)
        if self.boundary_ratio is None:
            velocity = self._ask("transformer", latents, sigma, condition)
        else:
            velocity = self._ask_both(latents, sigma, condition)
        return condition.still(velocity)

    def _ask_both(self, latents: torch.Tensor, sigma: torch.Tensor, condition: Condition) -> torch.Tensor:
        """Each clip by its expert; an expert that only other processes need is run without effect."""
        assert self.boundary_ratio is not None
        high = sigma >= self.boundary_ratio
        mine = torch.stack([high.any(), (~high).any()])
        asked = (mine if self.agree is None else self.agree(mine)).tolist()
        if sum(asked) == 1:
            return self._ask(EXPERTS[asked.index(True)], latents, sigma, condition)
        velocity = torch.zeros(latents.shape, dtype=torch.float32, device=latents.device)
        for name, chosen in zip(EXPERTS, (high, ~high), strict=True):
            rows = chosen.nonzero().flatten()
            if len(rows) > 0:
                part = self._ask(name, latents[rows], sigma[rows], condition.rows(rows))
                velocity = velocity.index_put((rows,), part)
            else:
                first = torch.zeros(1, dtype=torch.long, device=latents.device)
                velocity = velocity + 0 * self._ask(name, latents[first], sigma[first], condition.rows(first))
        return velocity

    def _ask(self, name: str, latents: torch.Tensor, sigma: torch.Tensor, condition: Condition) -> torch.Tensor:
        expert: Any = self.experts[name]
        dtype = expert.dtype
        time = self._times(expert, latents, sigma, condition)
        if condition.image_latents is not None:
            latents = torch.cat([latents, condition.image_latents.to(latents.dtype)], dim=1)
        image = None if condition.image_embeds is None else condition.image_embeds.to(dtype)
        prompt = condition.prompt_embeds.to(dtype)
        out = expert(latents.to(dtype), time, prompt, encoder_hidden_states_image=image, return_dict=False)[0]
        return out.float()

    def _times(self, expert: Any, latents: torch.Tensor, sigma: torch.Tensor, condition: Condition) -> torch.Tensor:
        """Network times [B], or [B, tokens] where a first frame is given; with equal times both agree."""
        time = sigma * self.num_train_timesteps
        if condition.keeps_first is None:
            return time
        require(self.expand_timesteps, "image_share", "more than 0", "0 for a model without one time per token")
        p_t, p_h, p_w = expert.config.patch_size
        frames, per_frame = latents.shape[2] // p_t, (latents.shape[3] // p_h) * (latents.shape[4] // p_w)
        rows = time[:, None].repeat(1, frames)
        rows[:, 0] = torch.where(condition.keeps_first, torch.zeros_like(time), rows[:, 0])
        return rows.repeat_interleave(per_frame, dim=1)


def experts_of(pipe: Any) -> list[str]:
    """Names of the transformers that a pipeline has."""
    return [name for name in EXPERTS if getattr(pipe, name, None) is not None]


def denoiser_of(pipe: Any, experts: dict[str, Any] | None = None) -> Denoiser:
    """The experts of a pipeline, or others in their place, as one velocity field, with its boundary and times."""
    return Denoiser(
        experts or {name: getattr(pipe, name) for name in experts_of(pipe)},
        boundary_ratio=pipe.config.boundary_ratio,
        expand_timesteps=pipe.config.expand_timesteps,
        num_train_timesteps=pipe.scheduler.config.num_train_timesteps,
    )


def scheduler_shift(pipe: Any) -> float:
    """Shift of the noise levels that a pipeline's scheduler has.

    Raises:
        ConfigError: it has none.
    """
    for name in ("flow_shift", "shift"):
        if pipe.scheduler.config.get(name) is not None:
            return float(pipe.scheduler.config[name])
    kind = type(pipe.scheduler).__name__
    raise ConfigError(f"model.flow_shift: got None; must be given, as the teacher's {kind} has no shift")


def _arguments(latents: torch.Tensor, sigma: torch.Tensor, condition: Condition) -> tuple[torch.Tensor | None, ...]:
    """Of `Denoiser.forward`."""
    first = (condition.first_frame, condition.keeps_first)
    return latents, sigma, condition.prompt_embeds, *first, condition.image_latents, condition.image_embeds


def as_field(module: nn.Module) -> VelocityField:
    """The velocity field of a `Denoiser`, wrapped or not."""

    def field(latents: torch.Tensor, sigma: torch.Tensor, condition: Condition) -> torch.Tensor:
        out: torch.Tensor = module(*_arguments(latents, sigma, condition))
        return out.float()

    return field


def as_averaged_field(module: nn.Module, values: Mapping[str, torch.Tensor]) -> VelocityField:
    """The field of a `Denoiser` with some of its parameters replaced by `values`; never has a gradient."""

    def field(latents: torch.Tensor, sigma: torch.Tensor, condition: Condition) -> torch.Tensor:
        with torch.no_grad():
            out: torch.Tensor = torch.func.functional_call(module, dict(values), _arguments(latents, sigma, condition))
        return out.float()

    return field


class LayerRecorder:
    """Keeps the self-attention outputs of the latest pass of a `Denoiser`, in raster order.

    Attributes:
        outputs: [B, tokens, dim] by "expert.layer".
    """

    def __init__(self, denoiser: Denoiser, attention: AttentionConfig | None = None) -> None:
        self.outputs: dict[str, torch.Tensor] = {}
        self._handles: list[RemovableHandle] = [denoiser.register_forward_pre_hook(lambda *_: self.outputs.clear())]
        for name, expert in denoiser.experts.items():
            inverse = _InverseOrder(attention, tuple(expert.config.patch_size))  # type: ignore[union-attr, arg-type]
            self._handles.append(expert.register_forward_pre_hook(inverse.look))
            for index, block in enumerate(expert.blocks):  # type: ignore[union-attr, arg-type]
                hook = self._keeper(f"{name}.{index}", inverse)
                self._handles.append(block.attn1.register_forward_hook(hook))  # type: ignore[union-attr]

    def _keeper(self, key: str, inverse: _InverseOrder) -> Any:
        def keep(module: nn.Module, args: Any, out: torch.Tensor) -> None:
            self.outputs[key] = inverse.apply(out)

        return keep

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()


class _InverseOrder:
    """Puts tokens that an attention backend laid out back into raster order."""

    def __init__(self, attention: AttentionConfig | None, patch_size: tuple[int, int, int]) -> None:
        self._attention, self._patch_size = attention, patch_size
        self._inverse: torch.Tensor | None = None

    def look(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._attention is None or self._attention.token_order == "raster":
            return
        grid = TokenGrid.from_latents(tuple(args[0].shape), self._patch_size)
        order = grid.order(self._attention.token_order, self._attention.tile)
        self._inverse = None if order is None else inverse_order(order)

    def apply(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens if self._inverse is None else tokens.index_select(1, self._inverse.to(tokens.device))
