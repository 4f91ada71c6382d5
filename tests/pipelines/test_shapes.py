"""Every recipe on every published shape, on tensors that have shapes and no data, against numbers computed by hand.

The models are those of 1.3 to 28 billion parameters; `FakeTensorMode` runs the very code of `accelerate` on them
without memory. Questions that need data ("is every weight finite?") are answered with yes.
"""

import contextlib

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from videospark.core.config import ConfigError
from videospark.pipelines.acceleration import accelerate, restore
from videospark.pipelines.convert.students import Found, Wishes, student_of
from videospark.pipelines.plan_models import MODELS, operations
from videospark.pipelines.recipe import preset, preset_names
from videospark.quantization import primitives
from videospark.quantization.engines import choose_engine
from videospark.tiny.components import build_scheduler

# By hand, for one transformer: layers, weights of the ten products of a block, their output channels, and the numbers
# that a RoLA layer of rank 64 (2 r d + d + H) and an SLA layer (d^2 + d) add.
#   1.3B: 8 D^2 + 2 D F = 8 * 1536^2 + 2 * 1536 * 8960;    rows 9 D + F = 9 * 1536 + 8960
#   14B:  8 * 5120^2 + 2 * 5120 * 13824;                   rows 9 * 5120 + 13824
#   5B:   8 * 3072^2 + 2 * 3072 * 14336;                   rows 9 * 3072 + 14336
BY_HAND = {
    "wan2.1-t2v-1.3b": (30, 46_399_488, 22_784, 16_524, 16_512),
    "wan2.1-t2v-14b": (40, 351_272_960, 59_904, 16_552, 16_512),
    "wan2.1-i2v-14b": (40, 351_272_960, 59_904, 16_552, 16_512),
    "wan2.2-t2v-a14b": (40, 351_272_960, 59_904, 16_552, 16_512),
    "wan2.2-i2v-a14b": (40, 351_272_960, 59_904, 16_552, 16_512),
    "wan2.2-ti2v-5b": (30, 163_577_856, 41_984, 16_536, 16_512),
}
FILES_GB = {"wan2.1-t2v-1.3b": 2.8, "wan2.1-t2v-14b": 28.6, "wan2.1-i2v-14b": 32.8}
"""Sizes of the published students in bfloat16."""


class Agreeable(TorchDispatchMode):
    """Answers yes to what only data could tell."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            return True
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_data():
    before = torch.get_default_dtype()
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=True), Agreeable():
        # All of it is on the CPU already, and PyTorch cannot move parameters of this kind.
        patch.setattr(torch.nn.Module, "to", lambda self, *_, **__: self)
        # Weights are quantized in runs of rows to save memory; without memory one run does, 20 times as fast.
        patch.setattr(primitives, "_WEIGHT_CHUNK_ELEMENTS", 2**40)
        torch.set_default_dtype(torch.bfloat16)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


@pytest.fixture(scope="module", autouse=True)
def _engines_are_found_with_data():
    for number in ("fp8", "int8"):
        choose_engine("auto", number, "row", torch.device("cpu"), torch.bfloat16)


def build(name):
    shape = MODELS[name]

    def transformer():
        model = WanTransformer3DModel(**shape.config()).eval()
        return model.requires_grad_(False)

    second = transformer() if shape.experts == 2 else None
    boundary = None if second is None else 0.9 if shape.image_to_video else 0.875
    return WanPipeline(
        tokenizer=None, text_encoder=None, vae=None, scheduler=build_scheduler(), transformer=transformer(),
        transformer_2=second, boundary_ratio=boundary, expand_timesteps=shape.per_token_time,
    )  # fmt: skip


def numbers(pipe):
    models = [model for model in (pipe.transformer, pipe.transformer_2) if model is not None]
    return sum(p.numel() for model in models for p in model.parameters())


def recipes(name):
    """All presets, and the recipes of the students that this shape could be."""
    shape = MODELS[name]
    made = {preset_name: preset(preset_name) for preset_name in preset_names()}
    branch = {"blocks.0.attn1.linear_branch.proj_q.weight": (64, shape.head_dim)}
    for kind, file in (("spark", "SparkWan-480P-0.95Sparsity"), ("turbodiffusion", "TurboWan-480P")):
        found = Found(file, branch, shape.experts, shape.in_channels)
        if kind == "spark" and shape.experts == 2 and shape.image_to_video:
            continue  # no such student is published
        made[kind] = student_of(kind, found, Wishes()).recipe
    return made


def test_sizes_are_those_of_the_published_files():
    for name, size in FILES_GB.items():
        assert 2 * MODELS[name].parameters() / 1e9 == pytest.approx(size, abs=0.05)


@pytest.mark.filterwarnings("ignore:.*needs weights trained.*")
def test_some_recipes_of_the_smallest_model():
    check_recipes("wan2.1-t2v-1.3b", ("spark", "int8"))


KINDS = ("students", "eight bits", "others")
"""Parts of all recipes, so that each test ends in minutes."""


def recipes_of_kind(name, kind):
    made = recipes(name)
    students = {"spark", "turbodiffusion"} & set(made)
    eight_bits = {key for key, recipe in made.items() if recipe.quantization.mode != "none"} - students
    return {"students": students, "eight bits": eight_bits, "others": set(made) - students - eight_bits}[kind]


def test_the_parts_are_the_whole():
    for name in BY_HAND:
        parts = [recipes_of_kind(name, kind) for kind in KINDS]
        assert sum(map(len, parts)) == len(set().union(*parts)) == len(recipes(name)) and all(parts)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*needs weights trained.*")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BY_HAND)
def test_every_recipe(name, kind):
    check_recipes(name, recipes_of_kind(name, kind))


def check_recipes(name, only):
    """Apply recipes one after the other, count what changed and what was added, and take them off again."""
    layers, weights, rows, rola, sla = BY_HAND[name]
    experts = MODELS[name].experts
    with no_data():
        pipe = build(name)
        whole = numbers(pipe)
        assert whole == experts * MODELS[name].parameters()
        for recipe_name in sorted(only):
            recipe = recipes(name)[recipe_name]
            boundary = recipe.sampler.boundary_ratio
            if boundary is not None and boundary != pipe.config.boundary_ratio:
                with pytest.raises(ConfigError, match="boundary_ratio"):
                    accelerate(pipe, recipe, allow_untrained=True)
                continue
            processors = dict(pipe.transformer.attn_processors)
            report = accelerate(pipe, recipe, allow_untrained=True)
            assert len(report.modules) == experts and len(report.layers) == experts * layers, recipe_name
            changed = sum(pipe.transformer.attn_processors[key] is not value for key, value in processors.items())
            assert changed == layers, recipe_name
            added = {"none": 0, "rola": rola, "sla": sla}[recipe.attention.branch] * layers * experts
            eight_bits = recipe.quantization.mode != "none"
            if eight_bits:
                assert [part["num_quantized"] for part in report.quantization.values()] == [10 * layers] * experts
                for part in report.quantization.values():
                    # A byte less for every weight, and four for the scale of every output channel.
                    saved = part["bytes_before"] - part["bytes_after"]
                    assert saved == layers * (weights - 4 * rows), recipe_name
                # Eight-bit weights are buffers: what is left of the parameters is the rest of the model.
                assert numbers(pipe) == whole - experts * layers * (weights + rows)
            else:
                assert numbers(pipe) == whole + added, recipe_name
            restore(pipe)
            assert numbers(pipe) == whole
            assert all(pipe.transformer.attn_processors[key] is value for key, value in processors.items())


TOKENS = {"wan2.1-t2v-1.3b": 32_760, "wan2.2-ti2v-5b": 27_280}
"""Of the published sizes; 75,600 for the others, at 720p."""
PER_LAYER = {
    # By hand, in 10^12 operations: linear layers 2 L (6 D^2 + 2 D F) + 4 C D^2, cross-attention 4 L C D and
    # self-attention 4 L^2 D, with C = 512 tokens of text and for Wan 2.1 I2V 257 of the picture.
    "wan2.1-t2v-1.3b": (2.73576, 0.103054, 6.59385),
    "wan2.1-t2v-14b": (45.2389, 0.792723, 117.0506),
    "wan2.1-i2v-14b": (45.2659, 1.190633, 117.0506),
    "wan2.2-t2v-a14b": (45.2389, 0.792723, 117.0506),
    "wan2.2-i2v-a14b": (45.2389, 0.792723, 117.0506),
    "wan2.2-ti2v-5b": (7.91435, 0.171631, 9.14471),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_operations_by_hand_by_formula_and_by_counting(name):
    """A block is run on tensors without data while PyTorch counts, and held against the formula and the hand."""
    shape, tokens = MODELS[name], TOKENS.get(name, 75_600)
    formula = operations(shape, tokens)
    per_layer = [value / shape.layers / 1e12 for value in (formula.linear, formula.cross, formula.attention)]
    assert per_layer == pytest.approx(PER_LAYER[name], rel=1e-3)
    image = shape.dim if shape.image_dim is not None else None
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        block = WanTransformerBlock(shape.dim, shape.ffn, shape.heads, "rms_norm_across_heads", True, 1e-6, image)
        block.bfloat16()
        for norm in (block.norm1, block.norm2, block.norm3):
            norm.float()
        angles = torch.empty(1, tokens, 1, shape.head_dim)
        block(
            torch.empty(1, tokens, shape.dim, dtype=torch.bfloat16),
            torch.empty(1, shape.context_tokens, shape.dim, dtype=torch.bfloat16),
            torch.empty(1, 6, shape.dim), (angles, angles),
        )  # fmt: skip
    assert counter.get_total_flops() == pytest.approx(formula.total / shape.layers, rel=1e-9)


@pytest.mark.parametrize("name", BY_HAND)
def test_operations_of_a_step_of_every_recipe(name):
    """Per forward pass: what is kept of the pairs, and all else, by hand from the number of blocks."""
    shape, tokens = MODELS[name], TOKENS.get(name, 75_600)
    linear, cross, dense = (value * shape.layers * 1e12 for value in PER_LAYER[name])
    for recipe_name, recipe in recipes(name).items():
        counted, attention = operations(shape, tokens, recipe.attention), recipe.attention
        share = 1.0
        if attention.backend != "dense":
            blocks = -(-tokens // attention.block_size_k)
            share = max(1, int(attention.keep_ratio * blocks + 1e-6)) * attention.block_size_k / tokens
        assert counted.attention == pytest.approx(share * dense, rel=2e-3), recipe_name
        assert counted.linear + counted.cross == pytest.approx(linear + cross, rel=1e-3)
        assert counted.branch < 0.03 * dense and (counted.branch > 0) == (attention.backend != "dense")
