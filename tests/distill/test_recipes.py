"""The recipes for real models: their settings, their models without data, and one iteration at full width."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from videospark.attention.processors import install
from videospark.core.config import to_dict
from videospark.distill import run as runs
from videospark.distill.data import NEGATIVE_FILE, SETTINGS_FILE, DatasetSettings, shard_path
from videospark.distill.denoiser import Denoiser
from videospark.distill.method import build_method
from videospark.distill.plan import BOUNDARIES, HARDWARE, count_passes, plan_training, recipe_table
from videospark.distill.run import example_configs, load_config
from videospark.distill.trainable import choose_trainable
from videospark.pipelines.plan_checkpoints import CHECKPOINTS
from videospark.pipelines.plan_memory import branch_parameters
from videospark.pipelines.plan_models import MODELS

NAMES = [name for name in example_configs() if not name.startswith("tiny-")]


def shape_of(config):
    (entry,) = [entry for entry in CHECKPOINTS if entry.name == config.model.teacher]
    return MODELS[entry.model]


def transformer(shape, layers, device="meta"):
    from diffusers import WanTransformer3DModel

    with torch.device(device):
        return WanTransformer3DModel(**shape.config() | {"num_layers": layers, "cross_attn_norm": True})


def test_there_are_recipes_for_one_gpu_and_for_many():
    configs = {name: load_config(name) for name in NAMES}
    one = [c for c in configs.values() if "1.3B" in c.model.teacher]
    assert {c.training.trainable for c in one} == {"lora", "full"}
    assert all(c.training.offload for c in one if c.training.trainable == "full")
    many = [c for c in configs.values() if c not in one]
    assert all(c.training.sharding == "fsdp2" and not c.training.offload for c in many)
    assert {shape_of(c).name for c in many} == {"wan2.1-t2v-14b", "wan2.1-i2v-14b", "wan2.2-t2v-a14b"}
    for config in configs.values():
        assert config.training.gradient_checkpointing and config.training.mixed_precision == "bf16"
        if config.model.student is not None:  # the stage before comes along, and ends where this one starts
            before = load_config(config.model.student.split("/")[-2])
            assert f"{before.folder}/student" == config.model.student
            assert before.attention == config.attention and before.data == config.data


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_fits_its_model(name):
    """On the meta device: shapes alone."""
    config = load_config(name)
    shape = shape_of(config)
    boundary = BOUNDARIES.get(shape.name)
    method = build_method(config, config.model.flow_shift, boundary)
    assert method.trained_roles == (("student",) if config.method == "sparse_warmup" else ("student", "critic"))
    experts = {n: transformer(shape, 2) for n in ("transformer", "transformer_2")[: shape.experts]}
    denoiser = Denoiser(experts, boundary_ratio=boundary, expand_timesteps=False)
    assert denoiser.image_channels == shape.in_channels - shape.out_channels
    for expert in experts.values():
        # A branch has to be in memory; how many numbers it adds the planner knows.
        install(expert, dataclasses.replace(config.attention, branch="none"), device="cuda")
    if config.training.trainable == "lora":
        pytest.importorskip("peft")
    chosen = choose_trainable(denoiser, config.training, config.attention)
    plan = plan_training(config, gpu="h100", processes=8)
    two = dataclasses.replace(shape, layers=2)
    count = sum(p.numel() for p in chosen.values())
    from videospark.distill.plan import _trained_parameters

    branch = branch_parameters(two, config.attention)
    assert count == (_trained_parameters(config, two, branch) - branch) * shape.experts
    assert plan.peak_gib > 0 and plan.seconds > 0


@pytest.mark.parametrize("model", ["wan2.1-t2v-1.3b", "wan2.1-t2v-14b", "wan2.1-i2v-14b"])
def test_whole_models_build_without_data(model):
    shape = MODELS[model]
    made = transformer(shape, shape.layers)
    assert sum(p.numel() for p in made.parameters()) == shape.parameters()
    assert all(p.is_meta for p in made.parameters())


def write_data(folder, shape, latent_shape):
    """Prepared clips of random numbers."""
    folder.mkdir()
    settings = DatasetSettings(
        source="test", model="random", height=8, width=8, num_frames=1, latent_shape=latent_shape,
        text_dim=shape.text_dim, max_sequence_length=512, image_channels=shape.in_channels - shape.out_channels,
        image_dim=shape.image_dim,
    )  # fmt: skip
    (folder / SETTINGS_FILE).write_text(json.dumps(to_dict(settings)))
    generator = torch.Generator().manual_seed(0)

    def draw(*size):
        return torch.randn(*size, generator=generator).bfloat16()

    save_file({"prompt_embeds": draw(4, shape.text_dim).float()}, folder / NEGATIVE_FILE)
    items = [{"id": str(i), "caption": "x"} for i in range(2)]
    tensors = {}
    for item in items:
        tensors[f"{item['id']}/latents"] = draw(*latent_shape)
        tensors[f"{item['id']}/prompt_embeds"] = draw(6, shape.text_dim)
        if settings.image_channels:
            tensors[f"{item['id']}/image_latents"] = draw(settings.image_channels, *latent_shape[1:])
        if shape.image_dim is not None:
            tensors[f"{item['id']}/image_embeds"] = draw(5, shape.image_dim)
    save_file(tensors, shard_path(folder, 0), metadata={"items": json.dumps(items)})


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, changes",
    [
        ("wan2.1-1.3b-warmup-90-lora", {}),
        ("wan2.1-1.3b-warmup-90", {}),
        ("wan2.1-1.3b-crossdistill-3step-lora", {}),
        ("wan2.1-1.3b-crossdistill-3step", {}),
        # All weights of 14B with their optimizer want 15 GB even with two layers: adapters alone learn here.
        ("wan2.1-14b-warmup-95", {"trainable": "lora"}),
        ("wan2.1-i2v-14b-warmup-95", {"trainable": "lora"}),
        ("wan2.1-14b-crossdistill-3step", {"trainable": "lora"}),
    ],
)
def test_one_iteration_at_full_width(name, changes, fresh, tmp_path, monkeypatch):
    """Two layers on the CPU, of the width and by the settings of the recipe; `gather` for a sequence this short."""
    config = load_config(name)
    if "lora" in (config.training.trainable, changes.get("trainable")):
        pytest.importorskip("peft")
    shape = shape_of(config)
    write_data(tmp_path / "data", shape, (16, 2, 16, 16))  # 128 tokens, two blocks
    dtype = torch.bfloat16

    def pipeline(teacher, wanted):
        assert teacher == config.model.teacher
        torch.manual_seed(0)
        made = transformer(shape, 2).to_empty(device="cpu")
        for parameter in made.parameters():
            parameter.data.normal_(std=0.02)
        made.rope.__init__(made.rope.attention_head_dim, made.rope.patch_size, made.rope.max_seq_len)
        settings = SimpleNamespace(boundary_ratio=None, expand_timesteps=False)
        scheduler = SimpleNamespace(config=SimpleNamespace(num_train_timesteps=1000))
        return SimpleNamespace(
            transformer=made.to(wanted), transformer_2=None, config=settings, scheduler=scheduler,
            videospark_defaults={},
        )  # fmt: skip

    exported = {}

    def export(config, method, pipe, student, *rest, **options):
        exported.update({n: p.detach() for n, p in student.named_parameters()})
        return tmp_path / "student"

    monkeypatch.setattr(runs, "stock_pipeline", pipeline)
    monkeypatch.setattr(runs, "export_student", export)
    training = dataclasses.replace(
        config.training, num_steps=1, gradient_accumulation=1, learning_rate=1e-3, warmup_steps=0, **changes
    )
    config = dataclasses.replace(
        config,
        output=str(tmp_path / "out"),
        data=dataclasses.replace(config.data, path=str(tmp_path / "data")),
        model=dataclasses.replace(config.model, student=None),
        training=training,
        attention=dataclasses.replace(config.attention, backend="gather"),
    )
    if config.method == "crossdistill":  # the student first
        config = dataclasses.replace(config, dmd=dataclasses.replace(config.dmd, critic_updates=1))
        config = dataclasses.replace(config, training=dataclasses.replace(training, num_steps=2))
    result = runs.run(config, device="cpu")
    assert result.training.step == config.training.num_steps
    before = dict(pipeline(config.model.teacher, torch.float32).transformer.named_parameters())
    assert dtype == getattr(torch, config.model.teacher_dtype)
    if config.training.trainable == "full":
        names = [name for name in before if not torch.equal(exported[f"experts.transformer.{name}"], before[name])]
        assert len(names) == len(before)
    else:
        learned = [name for name, value in exported.items() if ".lora_B." in name and float(value.abs().max()) > 0]
        assert len(learned) > 2 * 8
    lines = (tmp_path / "out" / "log.jsonl").read_text().splitlines()
    assert all(value == value for line in lines for value in json.loads(line).values())


def test_passes_are_those_of_the_methods(toy):
    warm = count_passes(toy.config("sparse_warmup"))
    assert (warm.student, warm.student_trained, warm.teacher, warm.critic_trained) == (0, 1, 1, 0)
    # Guided teacher, and the target of the student itself.
    pcm = count_passes(toy.config("pcm"))
    assert (pcm.student, pcm.student_trained, pcm.teacher, pcm.open) == (1, 1, 2, 1)
    stored = count_passes(toy.config("ode_regression"))
    assert (stored.student, stored.student_trained, stored.teacher, stored.open) == (0, 1, 0, 1)
    dmd = count_passes(toy.config("dmd", dmd={"critic_updates": 1}))
    # Half of the iterations are the student's: a step that learns after 0, 1 or 2 that lead to it; the critic's lead to
    # a step as well, which does not learn.
    assert dmd.student_trained == 0.5 and dmd.critic_trained == 0.5
    assert dmd.student == pytest.approx(0.5 * 1 + 0.5 * 2) and dmd.teacher == 1 and dmd.critic == 0.5
    cross = count_passes(toy.config("crossdistill", dmd={"critic_updates": 1}))
    assert cross.open == 2 and cross.student_trained == 1


def test_the_plan_of_a_run_adds_up():
    config = load_config("wan2.1-14b-warmup-95")
    one, eight = (plan_training(config, gpu="h100", processes=n) for n in (1, 8))
    for part in ("weights", "gradients", "optimizer"):
        assert eight.gpu_gib[part] == pytest.approx(one.gpu_gib[part] / 8)
    parameters = MODELS["wan2.1-t2v-14b"].parameters() + branch_parameters(MODELS["wan2.1-t2v-14b"], config.attention)
    assert one.gpu_gib["optimizer"] == pytest.approx(8 * parameters / 2**30)
    assert not one.fits
    offloaded = load_config("wan2.1-1.3b-warmup-90")
    kept = dataclasses.replace(offloaded, training=dataclasses.replace(offloaded.training, offload=False))
    there, here = (plan_training(c, gpu="rtx4090") for c in (offloaded, kept))
    assert there.gpu_gib["optimizer"] == 0 and there.peak_gib < here.peak_gib and there.ram_gib > here.ram_gib
    unknown = plan_training(config, gpu="100gb", processes=8)
    assert unknown.seconds is None and unknown.hours is None


def saved_bytes(dim, ffn, tokens):
    """What a stock block keeps for its backward pass under autocast, its weights and their rounded copies left out."""
    from diffusers.models.transformers.transformer_wan import WanTransformerBlock

    block = WanTransformerBlock(dim, ffn, dim // 32, "rms_norm_across_heads", True)
    sizes = {p.numel() for p in block.parameters()}
    found = {}

    def pack(tensor):
        if tensor.numel() not in sizes:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = (storage.nbytes(), storage)
        return tensor

    x = torch.randn(1, tokens, dim, dtype=torch.bfloat16, requires_grad=True)
    text, time = torch.randn(1, 8, dim, dtype=torch.bfloat16), torch.randn(1, 6, dim)
    tables = torch.randn(1, tokens, 1, 32), torch.randn(1, tokens, 1, 32)
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = block(x, text, time, tables)
    assert out.shape == x.shape
    return sum(size for size, _ in found.values())


def test_what_a_block_saves_is_what_the_plan_counts():
    from videospark.distill.plan import SAVED, SAVED_FEED_FORWARD

    dim, tokens = 256, 320
    narrow, wide = (saved_bytes(dim, ffn, tokens) / (tokens * dim) for ffn in (640, 1152))
    print("saved", narrow, wide)
    slope = (wide - narrow) / (512 / dim)
    assert slope == pytest.approx(SAVED_FEED_FORWARD, rel=0.1)
    assert narrow - slope * 640 / dim == pytest.approx(SAVED, rel=0.1)


def test_the_table_of_the_documentation_is_the_planners():
    from pathlib import Path

    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    assert set(HARDWARE) == set(NAMES)
    assert recipe_table() in text
