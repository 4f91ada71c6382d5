"""A world where everything is known in closed form: every number of a clip is normal, its mean in the prompt.

With x_0 ~ N(mean, std^2) the velocity of the flow, its trajectories and the scores of noised samples are exact.
Guidance turns the means m_c and m_u into m_u + g (m_c - m_u) and leaves the rest as it is.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

from videospark.core.config import from_dict
from videospark.distill.config import DistillConfig
from videospark.distill.draws import Draws
from videospark.distill.flow import Condition, broadcast
from videospark.distill.method import Batch
from videospark.distill.prepare import prepare
from videospark.distill.run import stock_pipeline
from videospark.distill.sources import ClipSize, clips_from_tiny_world

SHAPE = (1, 2, 2, 2)
MEAN, NEGATIVE_MEAN, STD = 0.6, -0.2, 0.5


def mean_of(condition):
    return condition.prompt_embeds[:, 0, 0].view(-1, 1, 1, 1, 1)


class GaussianField:
    """Velocity of N(mean, std^2) data; `calls` holds the noise levels asked for and whether a gradient was wanted."""

    def __init__(self, std=STD, mean=None):
        self.std, self.mean, self.calls = std, mean, []

    def __call__(self, latents, sigma, condition):
        self.calls.append((sigma.clone(), torch.is_grad_enabled()))
        mean = mean_of(condition) if self.mean is None else self.mean
        s = broadcast(sigma, latents)
        residual = (latents - (1 - s) * mean) / ((1 - s) ** 2 * self.std**2 + s**2)
        return s * residual - (mean + (1 - s) * self.std**2 * residual)


class TrajectoryField:
    """A perfect student: one Euler step from s ends where the trajectory of N(mean, std^2) meets the next knot."""

    def __init__(self, knots, mean, std=STD):
        self.knots, self.mean, self.std, self.calls = knots, mean, std, []

    def __call__(self, latents, sigma, condition):
        self.calls.append((sigma.clone(), torch.is_grad_enabled()))
        lower = torch.tensor([max((k for k in self.knots if k < float(s) - 1e-6), default=0.0) for s in sigma])
        s, b = broadcast(sigma, latents), broadcast(lower, latents)
        spread = [((1 - t) ** 2 * self.std**2 + t**2).sqrt() for t in (s, b)]
        end = (1 - b) * self.mean + (latents - (1 - s) * self.mean) * spread[1] / spread[0]
        return (end - latents) / torch.where(s > b, b - s, -torch.ones_like(s))


class StepField:
    """A student whose step from `start` to `end` maps x to mean + spread x."""

    def __init__(self, start, end, mean, spread):
        self.start, self.end, self.mean, self.spread = start, end, mean, spread

    def __call__(self, latents, sigma, condition):
        return (self.mean + self.spread * latents - latents) / (self.end - self.start)


class NoisedField:
    """Velocity of samples that are N(mean, spread^2) at the level `end` and noised further: the perfect critic."""

    def __init__(self, end, mean, spread):
        self.end, self.mean, self.spread = end, mean, spread

    def __call__(self, latents, sigma, condition):
        s = broadcast(sigma, latents)
        scale = (1 - s) / (1 - self.end)
        variance = scale**2 * self.spread**2 + s**2 - scale**2 * self.end**2
        noise = s * (latents - scale * self.mean) / variance
        return (noise - latents) / (1 - s)


def make_batch(size, first=0, seed=0, mean=MEAN, std=STD, first_frames=False):
    draws = Draws(seed, range(first, first + size))
    latents = mean + std * draws.normal("data", SHAPE)
    condition = Condition(torch.full((size, 1, 1), mean), torch.full((1, 1, 1), NEGATIVE_MEAN))
    if first_frames:
        keeps = torch.arange(size) % 2 == 0
        condition = Condition(condition.prompt_embeds, condition.negative_embeds, latents[:, :, :1], keeps)
    return Batch(latents, condition, draws)


def make_config(method, **changes):
    data = {"name": "toy", "method": method, "data": {"path": "nowhere"}}
    if method == "sparse_warmup":
        data["attention"] = {"backend": "gather", "keep_ratio": 0.1}
    else:
        data["model"] = {"sigmas": [0.999, 0.85, 0.5], "guidance_scale": 3.0}
    return from_dict(DistillConfig, data | changes)


@pytest.fixture
def toy():
    guided = NEGATIVE_MEAN + 3.0 * (MEAN - NEGATIVE_MEAN)
    return SimpleNamespace(
        GaussianField=GaussianField,
        TrajectoryField=TrajectoryField,
        StepField=StepField,
        NoisedField=NoisedField,
        batch=make_batch,
        config=make_config,
        mean=MEAN,
        negative_mean=NEGATIVE_MEAN,
        std=STD,
        guided_mean=guided,
    )


DEFAULTS = {
    "height": 64, "width": 64, "num_frames": 5, "fps": 8, "num_inference_steps": 4, "guidance_scale": 3.0,
    "max_sequence_length": 32,
}  # fmt: skip
SPARSE = {
    "backend": "gather", "keep_ratio": 0.3, "block_size_q": 16, "block_size_k": 16, "tile": [1, 2, 2],
}  # fmt: skip
SIGMAS = [0.999, 0.9, 0.6]


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """A saved random pipeline with two layers, and eight prepared clips."""
    from diffusers import WanTransformer3DModel

    from videospark.tiny.components import build_pipeline

    torch.manual_seed(0)
    pipe = build_pipeline()
    settings = dict(pipe.transformer.config) | {"num_layers": 2, "ffn_dim": 64, "num_attention_heads": 1}
    pipe.transformer = WanTransformer3DModel.from_config(settings)
    torch.nn.init.normal_(pipe.transformer.proj_out.weight, std=0.05)
    pipe.register_modules(transformer=pipe.transformer)
    folder = tmp_path_factory.mktemp("world")
    pipe.save_pretrained(folder / "model")
    (folder / "model" / "videospark_defaults.json").write_text(json.dumps(DEFAULTS))
    size = ClipSize(height=64, width=64, num_frames=5)
    prepare(
        stock_pipeline(str(folder / "model"), torch.float32),
        clips_from_tiny_world(8, size),
        folder / "data",
        source="tiny-world",
        model="random",
        size=size,
        max_sequence_length=32,
        shard_size=3,
    )
    return folder


def build_config(world, output, method, training=None, **changes):
    data = {
        "name": "smoke",
        "method": method,
        "output": str(output),
        "data": {"path": str(world / "data"), "image_share": 0.5},
        "model": {"teacher": str(world / "model"), "guidance_scale": 2.0, "export_dtype": "float32"},
        "training": {"num_steps": 6, "batch_size": 2, "learning_rate": 1e-3, "critic_learning_rate": 1e-3,
                     "checkpoint_every": 3, "log_every": 1, "ema_decay": 0.9} | (training or {}),
        "attention": SPARSE,
    }  # fmt: skip
    if method != "sparse_warmup":
        data["model"]["sigmas"] = SIGMAS
    for key, value in changes.items():
        data[key] = data.get(key, {}) | value
    return from_dict(DistillConfig, data)


@pytest.fixture
def build():
    """Settings of a short run in the random world."""
    return build_config


@pytest.fixture
def fresh():
    """Lets accelerate forget its settings, which it keeps for the life of a process."""

    def forget():
        AcceleratorState._reset_state(True)
        GradientState._reset_state()

    yield forget
    forget()


@pytest.fixture(autouse=True)
def _fresh_accelerate(fresh):
    """For every test."""
