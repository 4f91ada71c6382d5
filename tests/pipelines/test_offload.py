"""Offloading under every acceleration: the same numbers, everything moves along, and the planner's choice.

Where there is no GPU the device is the CPU: the hooks run all the same, and whether new tensors belong to what is moved
is read off the groups and modules.
"""

import dataclasses
import json

import pytest
import torch
from diffusers import WanPipeline
from diffusers.hooks.group_offloading import _GROUP_OFFLOADING
from safetensors.torch import save_file
from torch import nn

from videospark.core.config import ConfigError
from videospark.pipelines.acceleration import accelerate, restore
from videospark.pipelines.generation import GenerationRequest, generate
from videospark.pipelines.loading import load
from videospark.pipelines.lora import load_lora
from videospark.pipelines.offload import choose, offload_of, place, planned_peak, shape_of, take_back
from videospark.pipelines.plan import make_plan
from videospark.pipelines.plan_cards import CARDS, Card
from videospark.pipelines.plan_memory import Clip
from videospark.pipelines.plan_models import MODELS
from videospark.pipelines.recipe import Recipe, resolve
from videospark.tiny.components import LATENT_CHANNELS, build_pipeline, build_scheduler, build_transformer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REQUEST = GenerationRequest(
    "a red circle", height=64, width=64, num_frames=5, num_inference_steps=3, guidance_scale=2.0, seed=0
)
SPARSE = {"backend": "gather", "keep_ratio": 0.5, "block_size_q": 16, "block_size_k": 16}
RECIPES = {
    "none": None,
    "sparse": {"name": "a", "attention": SPARSE},
    "rola": {"name": "b", "attention": SPARSE | {"branch": "rola"}},
    "int8 fused": {"name": "c", "quantization": {"mode": "int8", "fused": True}},
    "fp8": {"name": "d", "quantization": {"mode": "fp8"}},
    "all": {"name": "e", "attention": SPARSE | {"branch": "sla"}, "quantization": {"mode": "int8", "fused": True}},
}


def make(experts=1):
    torch.manual_seed(0)
    pipe = build_pipeline()
    torch.nn.init.normal_(pipe.transformer.proj_out.weight, std=0.05)
    if experts == 2:
        second = build_transformer()
        torch.nn.init.normal_(second.proj_out.weight, std=0.05)
        parts = {**pipe.components, "transformer_2": second, "scheduler": build_scheduler()}
        pipe = WanPipeline(**parts, boundary_ratio=0.9, expand_timesteps=False)
    pipe.videospark_defaults = {"max_sequence_length": 32, "fps": 8}
    pipe.set_progress_bar_config(disable=True)
    return pipe


def lora_file(folder):
    generator = torch.Generator().manual_seed(0)
    state = {}
    for block in range(6):
        stem = f"diffusion_model.blocks.{block}.self_attn.v"
        state[f"{stem}.lora_down.weight"] = torch.randn(4, 192, generator=generator) * 0.3
        state[f"{stem}.lora_up.weight"] = torch.randn(192, 4, generator=generator) * 0.3
        # Whole differences of parameters that are no products, which are changed rather than added to.
        state[f"diffusion_model.blocks.{block}.self_attn.norm_q.diff"] = torch.randn(192, generator=generator) * 0.3
        state[f"diffusion_model.blocks.{block}.diff_m"] = torch.randn(1, 6, 192, generator=generator) * 0.1
    save_file(state, folder / "lora.safetensors")
    return folder / "lora.safetensors"


def prepare(recipe, folder, experts=1):
    pipe = make(experts)
    if recipe is not None:
        accelerate(pipe, recipe)
    load_lora(pipe, lora_file(folder))
    return pipe


def loose_tensors(module):
    """Tensors of a model that are neither parameters nor buffers, which `to` would leave behind."""
    found = []
    for name, part in module.named_modules():
        holders = [part, getattr(part, "processor", None), part.__dict__.get("forward")]
        for holder in holders:
            values = getattr(holder, "__dict__", {})
            found += [f"{name}.{key}" for key, value in values.items() if isinstance(value, torch.Tensor)]
    return found


def owned(module):
    """Data pointers of all tensors that diffusers' groups move, and of all there are."""
    moved = set()
    for part in module.modules():
        registry = getattr(part, "_diffusers_hook", None)
        hook = None if registry is None else registry.get_hook(_GROUP_OFFLOADING)
        if hook is not None:
            tensors = [*hook.group.parameters, *hook.group.buffers]
            for one in hook.group.modules:
                tensors += [*one.parameters(), *one.buffers()]
            moved |= {id(tensor) for tensor in tensors}
    return moved, {id(tensor) for tensor in [*module.parameters(), *module.buffers()]}


@pytest.mark.parametrize("name", RECIPES)
def test_the_same_numbers_under_diffusers_offloading(name, tmp_path):
    pipe = prepare(RECIPES[name], tmp_path)
    pipe.to(DEVICE)
    wanted = generate(pipe, REQUEST).frames
    pipe.to("cpu")
    before = {key: value.clone() for key, value in pipe.transformer.state_dict().items()}
    assert loose_tensors(pipe.transformer) == []
    for mode in ("model", "group"):
        place(pipe, mode, DEVICE)
        if mode == "group":
            moved, there = owned(pipe.transformer)
            assert moved == there
        for _ in range(2):  # the second pass of group offloading runs ahead
            assert (generate(pipe, REQUEST).frames == wanted).all(), mode
        assert all(parameter.device.type == "cpu" for parameter in pipe.transformer.blocks.parameters())
        with pytest.raises(ConfigError, match="offloaded"):
            place(pipe, "none", DEVICE)
        take_back(pipe)
        assert offload_of(pipe) is None
    after = pipe.transformer.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(value, after[key]) for key, value in before.items())
    restore(pipe)  # nothing looks wrapped
    accelerate(pipe, RECIPES["int8 fused"])


def test_a_recipe_before_or_after_model_offloading(tmp_path):
    first, second = make(), make()
    accelerate(first, RECIPES["sparse"])
    place(first, "model", DEVICE)
    place(second, "model", DEVICE)
    accelerate(second, RECIPES["sparse"])
    assert (generate(first, REQUEST).frames == generate(second, REQUEST).frames).all()


@pytest.mark.parametrize("name", ["none", "rola", "int8 fused"])
def test_experts_take_turns_in_one_place(name, tmp_path):
    pipe = prepare(RECIPES[name], tmp_path, experts=2)
    pipe.to(DEVICE)
    wanted = generate(pipe, REQUEST).frames
    again = generate(pipe, dataclasses.replace(REQUEST, seed=1)).frames
    pipe.to("cpu")
    states = [{k: v.clone() for k, v in part.state_dict().items()} for part in (pipe.transformer, pipe.transformer_2)]
    installed = place(pipe, "experts", DEVICE)
    swap = installed.swap
    one = sum(t.numel() * t.element_size() for t in pipe.transformer.state_dict().values())
    assert swap.device_bytes() == one
    assert (generate(pipe, REQUEST).frames == wanted).all()
    # Every group went over while the other expert still ran: there and, for the next clip, back.
    groups = len(pipe.transformer.blocks) + 1
    assert (swap.early, swap.late) == (2 * groups, 0)
    assert (generate(pipe, dataclasses.replace(REQUEST, seed=1)).frames == again).all()
    assert (swap.early, swap.late) == (4 * groups, 0) and installed.to_dict()["groups_late"] == 0
    take_back(pipe)
    for part, state in zip((pipe.transformer, pipe.transformer_2), states, strict=True):
        assert all(torch.equal(value, state[key]) for key, value in part.state_dict().items())
        assert not {t.data_ptr() for t in part.parameters()} & {
            t.data_ptr() for other in (pipe.transformer, pipe.transformer_2) if other is not part
            for t in other.parameters()
        }  # fmt: skip


@torch.no_grad()
def test_a_wrong_guess_costs_time_alone(tmp_path):
    """The experts called by hand in any order, out of any pipeline run, are the experts."""
    pipe = make(2)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(1, LATENT_CHANNELS, 2, 8, 8, generator=generator)
    text = torch.randn(1, 16, 128, generator=generator)

    def run(expert):
        return expert(x.to(DEVICE), torch.tensor([400.0], device=DEVICE), text.to(DEVICE), return_dict=False)[0]

    pipe.to(DEVICE)
    wanted = [run(pipe.transformer), run(pipe.transformer_2)]
    pipe.to("cpu")
    swap = place(pipe, "experts", DEVICE).swap
    for who in (0, 1, 1, 0, 1, 0, 0):
        assert torch.equal(run((pipe.transformer, pipe.transformer_2)[who]), wanted[who])
    assert swap.early == 0 and swap.late == 4 * (len(pipe.transformer.blocks) + 1)
    swap._leaving = True  # as if the last pass had been guessed wrongly
    monkey = swap._is_last_pass
    swap._is_last_pass = lambda who: True
    for who in (0, 0, 1, 1):
        assert torch.equal(run((pipe.transformer, pipe.transformer_2)[who]), wanted[who])
    swap._is_last_pass = monkey


def test_what_cannot_be_swapped_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="two experts"):
        place(make(), "experts", DEVICE)
    pipe = make(2)
    pipe.transformer_2 = build_transformer()
    pipe.transformer_2.blocks = pipe.transformer_2.blocks[:-1]
    with pytest.raises(ConfigError, match="differ"):
        place(pipe, "experts", DEVICE)
    with pytest.raises(ConfigError, match="offload"):
        place(make(), "disk", DEVICE)
    compiled = make(2)
    accelerate(compiled, {"name": "c", "compile": "default"})
    with pytest.raises(ConfigError, match="compiled"):
        place(compiled, "experts", DEVICE)
    graphs = make()
    accelerate(graphs, {"name": "g", "compile": "reduce-overhead"})
    with pytest.raises(ConfigError, match="CUDA graphs"):
        place(graphs, "group", DEVICE)


class Stand(nn.Module):
    """A part of a pipeline that has a configuration and a size, and no data."""

    def __init__(self, config, numbers):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(int(numbers), dtype=torch.bfloat16, device="meta"), requires_grad=False)
        self.dtype, self.use_tiling = torch.float32, False


def pipeline_of(name):
    """A stand-in with the shape of a published model."""
    from types import SimpleNamespace

    shape = MODELS[name]
    values = {**shape.config(), "num_attention_heads": shape.heads}
    transformer = Stand(SimpleNamespace(**values), shape.parameters())
    vae = Stand(SimpleNamespace(scale_factor_spatial=8 if shape.vae == "wan2.1" else 16,
                                z_dim=16 if shape.vae == "wan2.1" else 48), 1e8)  # fmt: skip
    second = transformer if shape.experts == 2 else None
    config = SimpleNamespace(expand_timesteps=shape.per_token_time)
    parts = {"transformer": transformer, "transformer_2": second, "vae": vae}
    return SimpleNamespace(**parts, components=parts, config=config)


HD = (1280, 720, 81)


def chosen(name, card, recipe="dense", size=HD):
    return choose(pipeline_of(name), torch.device("cuda"), size=size, recipe=resolve(recipe), card=CARDS[card])


@pytest.fixture
def much_ram(monkeypatch):
    monkeypatch.setattr("videospark.pipelines.offload._available_ram_gib", lambda: 256.0)


@pytest.mark.parametrize(
    ("name", "card", "recipe", "size", "mode"),
    [
        ("wan2.1-t2v-1.3b", "rtx4090", "dense", (832, 480, 81), "none"),
        ("wan2.1-t2v-14b", "h100", "dense", HD, "none"),
        ("wan2.2-t2v-a14b", "h200", "dense", HD, "none"),
        ("wan2.2-t2v-a14b", "h100", "dense", HD, "experts"),
        ("wan2.2-t2v-a14b", "l40s", "fp8", (832, 480, 81), "experts"),
        ("wan2.1-t2v-14b", "rtx5090", "fp8", (832, 480, 81), "model"),
        ("wan2.2-t2v-a14b", "rtx5090", "dense", (832, 480, 81), "group"),
        ("wan2.1-t2v-1.3b", "rtx3060-12", "dense", (832, 480, 81), "group"),
    ],
)
def test_auto_takes_the_first_that_the_plan_fits(name, card, recipe, size, mode, much_ram):
    got, reason, peaks = chosen(name, card, recipe, size)
    assert got == mode, (reason, peaks)
    plan = make_plan(name, size, recipe, card)
    # The plan of the command is that of the choice.
    assert peaks["none"] == pytest.approx(plan.peak_gib, abs=0.02)
    assert all(peak > plan.budget_gib for other, peak in peaks.items() if other != mode)
    assert peaks[mode] <= plan.budget_gib and f"{plan.budget_gib:.1f} GiB usable" in reason


def test_auto_says_what_was_tried_where_nothing_fits(much_ram):
    with pytest.raises(ConfigError, match=r"nothing fits.*none .* GiB.*group .* GiB.*videospark plan"):
        chosen("wan2.1-t2v-14b", "rtx3060-12")
    # Modes that a recipe excludes are not tried: CUDA graphs need weights that stay where they are.
    graphs = {"name": "g", "compile": "reduce-overhead"}
    with pytest.raises(ConfigError, match=r"nothing fits .*planned: none [\d.]+ GiB\)"):
        chosen("wan2.1-t2v-14b", "rtx5090", graphs)
    broken = pipeline_of("wan2.1-t2v-1.3b")
    broken.vae.config.z_dim = 7
    with pytest.raises(ConfigError, match="VAE"):
        choose(broken, torch.device("cuda"), card=CARDS["rtx4090"], size=HD, recipe=Recipe("dense"))


def test_auto_without_room_in_ram_and_for_tiny_models(monkeypatch):
    monkeypatch.setattr("videospark.pipelines.offload._available_ram_gib", lambda: 8.0)
    with pytest.raises(ConfigError, match="nothing fits"):
        chosen("wan2.2-t2v-a14b", "rtx5090")
    pipe = make()
    mode, reason, _ = choose(pipe, torch.device("cuda"), card=Card("x", 16, 0, 0, 0, 0))
    assert mode == "none" and "weights" in reason
    assert choose(pipe, torch.device("cpu"))[0] == "none"


def test_the_shape_of_a_pipeline_is_that_of_its_model():
    for name, shape in MODELS.items():
        found = shape_of(pipeline_of(name))
        for field in ("layers", "heads", "head_dim", "ffn", "in_channels", "experts", "vae", "image_dim", "patch"):
            assert getattr(found, field) == getattr(shape, field), (name, field)
        if not shape.image_to_video:
            assert found.parameters() == shape.parameters()
    tiled = pipeline_of("wan2.1-t2v-14b")
    clip, recipe = Clip(*HD), Recipe("dense")
    whole = planned_peak(tiled, shape_of(tiled), clip, recipe, "model")[0]
    tiled.vae.use_tiling = True
    assert planned_peak(tiled, shape_of(tiled), clip, recipe, "model")[0] <= whole


def test_loading_accelerates_in_ram_and_offloads_then(tmp_path):
    pipe = make()
    folder = tmp_path / "model"
    pipe.save_pretrained(folder)
    (folder / "videospark_defaults.json").write_text(json.dumps({"max_sequence_length": 32, "fps": 8}))
    recipe = RECIPES["int8 fused"]
    wanted = generate(load(folder, device=DEVICE, recipe=recipe), REQUEST).frames
    for mode in ("model", "group", "auto"):
        loaded = load(folder, device=DEVICE, recipe=recipe, offload=mode, size=(32, 32, 5))
        assert offload_of(loaded).mode == ("none" if mode == "auto" else mode)
        assert (generate(loaded, REQUEST).frames == wanted).all()
    with pytest.raises(ConfigError, match="offload"):
        load(folder, device=DEVICE, offload="disk")


def test_the_backend_is_that_of_the_device_that_will_run_it():
    pipe = make()
    with pytest.raises(ConfigError, match="device is mps"):
        accelerate(pipe, {"name": "t", "attention": SPARSE | {"backend": "triton"}}, device="mps")
    report = accelerate(pipe, {"name": "t", "attention": SPARSE | {"backend": "auto", "dense_below": 0}}, device="mps")
    assert "device is mps" in report.layers[0]["backend_reason"]
