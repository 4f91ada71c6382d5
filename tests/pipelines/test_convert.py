"""Checkpoints in the namings of their publishers, at tiny width, through to equal outputs."""

import json

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from safetensors.torch import load_file, save_file

from videospark.core.config import ConfigError
from videospark.pipelines.acceleration import accelerate, current_report, restore
from videospark.pipelines.convert import convert_checkpoint, revert_checkpoint
from videospark.pipelines.convert.keys import strip_prefixes, tensor_to_diffusers, tensor_to_native
from videospark.pipelines.convert.writer import made_parents, whole_folder
from videospark.pipelines.loading import load
from videospark.tiny.components import build_pipeline, build_scheduler, build_transformer

HEADS, HEAD_DIM, LAYERS = 2, 64, 2
IMAGE = {"image_dim": 48, "added_kv_proj_dim": 128, "in_channels": 36}

# Wan's names, written down apart from the product's tables and held against diffusers' own conversion below.
_TOP = [
    ("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
    ("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
    ("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
    ("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
    ("condition_embedder.time_proj", "time_projection.1"),
    ("condition_embedder.image_embedder.norm1", "img_emb.proj.0"),
    ("condition_embedder.image_embedder.ff.net.0.proj", "img_emb.proj.1"),
    ("condition_embedder.image_embedder.ff.net.2", "img_emb.proj.3"),
    ("condition_embedder.image_embedder.norm2", "img_emb.proj.4"),
    ("proj_out", "head.head"),
]
_INNER = [
    ("attn1", "self_attn"), ("attn2", "cross_attn"), ("to_out.0", "o"), ("to_q", "q"), ("to_k", "k"), ("to_v", "v"),
    ("norm_added_k", "norm_k_img"), ("add_k_proj", "k_img"), ("add_v_proj", "v_img"), ("ffn.net.0.proj", "ffn.0"),
    ("ffn.net.2", "ffn.2"), (".norm2.", ".norm3."), ("scale_shift_table", "modulation"),
]  # fmt: skip


def native(state):
    named = {}
    for name, tensor in state.items():
        if name == "scale_shift_table":
            name = "head.modulation"
        elif name.startswith("blocks."):
            for ours, theirs in _INNER:
                name = name.replace(ours, theirs)
        else:
            for ours, theirs in _TOP:
                name = name.replace(ours, theirs)
        named[name] = tensor.clone()
    return named


def make_model(seed=0, **changes):
    torch.manual_seed(seed)
    settings = {
        "num_attention_heads": HEADS, "attention_head_dim": HEAD_DIM, "in_channels": 16, "out_channels": 16,
        "text_dim": 32, "freq_dim": 32, "ffn_dim": 192, "num_layers": LAYERS,
    } | changes  # fmt: skip
    model = WanTransformer3DModel(**settings).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return model


def rola(heads, layers, head_dim=64, seed=7, rank=64):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"proj_q.weight": (rank, head_dim), "proj_k.weight": (rank, head_dim), "gate_proj.weight": (1, head_dim),
              "gate_bias": (1, heads, 1, 1)}  # fmt: skip
    return {
        f"blocks.{i}.self_attn.{name}": torch.randn(shape, generator=generator) * 0.1
        for i in range(layers)
        for name, shape in shapes.items()
    }


def flattened(state):
    return state | {"patch_embedding.weight": state["patch_embedding.weight"].flatten(1)}


@torch.no_grad()
def run(model, seed=3):
    config = model.config
    generator = torch.Generator().manual_seed(seed)
    images = None if config.image_dim is None else torch.randn(1, 257, config.image_dim, generator=generator)
    return model(
        torch.randn(1, config.in_channels, 2, 6, 8, generator=generator), torch.tensor([500.0]),
        torch.randn(1, 512, config.text_dim, generator=generator), images, return_dict=False,
    )[0]  # fmt: skip


def config_beside(folder, heads=HEADS):
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps({"dim": heads * HEAD_DIM, "num_heads": heads}))


def loaded(folder, name="transformer"):
    return settled(WanTransformer3DModel.from_pretrained(folder / name))


def settled(model):
    """Weights in memory of their own: products of mapped ones, which lie at odd addresses, round differently."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def nothing_left(folder, *allowed):
    return {path.name for path in folder.iterdir()} == set(allowed)


def test_names_agree_with_diffusers_and_go_both_ways():
    state = make_model(**IMAGE, pos_embed_seq_len=514).state_dict()
    state.pop("condition_embedder.image_embedder.pos_embed")  # diffusers' converter does not know it
    named = native(state)
    assert set(convert_wan_transformer_to_diffusers(dict(named))) == set(state)
    for theirs in [*named, *rola(HEADS, LAYERS), "img_emb.emb_pos"]:
        ours = tensor_to_diffusers(theirs)
        assert ours in state or "linear_branch" in ours or "pos_embed" in ours
        assert tensor_to_native(ours) == theirs
    assert tensor_to_diffusers("blocks.0.self_attn.rope") is None
    assert tensor_to_diffusers("blocks.0.attn1.to_q.weight") is None


@pytest.mark.parametrize("changes", [{}, IMAGE, IMAGE | {"pos_embed_seq_len": 514}])
@pytest.mark.parametrize("kind", ["safetensors", "pth", "sharded"])
def test_native_wan(tmp_path, changes, kind):
    model = make_model(**changes)
    state = native(model.state_dict())
    if "condition_embedder.image_embedder.pos_embed" in state:
        state["img_emb.emb_pos"] = state.pop("condition_embedder.image_embedder.pos_embed")
    source = tmp_path / "wan"
    config_beside(source)
    if kind == "sharded":
        names = sorted(state)
        parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, part in parts.items():
            save_file({name: state[name].contiguous() for name in part}, source / file)
        index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
        (source / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    elif kind == "pth":
        source = source / "model.pth"
        torch.save({"model": state, "step": 3}, source)
    else:
        source = source / "model.safetensors"
        save_file({f"model.diffusion_model.{name}": tensor for name, tensor in state.items()}, source)
    report = convert_checkpoint(source, tmp_path / "out", max_shard_bytes=200_000)
    assert report.format == "wan" and report.recipe is None and not report.complete
    assert report.transformers["transformer"]["files"] > 1
    assert report.transformers["transformer"]["parameters"] == sum(p.numel() for p in model.parameters())
    if changes.get("pos_embed_seq_len") is None:
        assert torch.equal(run(loaded(tmp_path / "out")), run(model))
    again = loaded(tmp_path / "out").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


def test_missing_shard(tmp_path):
    (tmp_path / "wan").mkdir()
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "wan" / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="2 of the 2 files"):
        convert_checkpoint(tmp_path / "wan", tmp_path / "out")


@pytest.fixture(scope="module")
def tiny_base(tmp_path_factory):
    torch.manual_seed(0)
    pipe = build_pipeline()
    folder = tmp_path_factory.mktemp("base") / "base"
    pipe.save_pretrained(folder)
    return folder


def student_transformer(seed):
    torch.manual_seed(seed)
    model = build_transformer()
    torch.nn.init.normal_(model.proj_out.weight, std=0.05)
    return model


def few(pipe, steps):
    pipe.set_progress_bar_config(disable=True)
    return pipe(
        prompt="a red circle", height=64, width=64, num_frames=5, num_inference_steps=steps, guidance_scale=1.0,
        output_type="latent", max_sequence_length=32, generator=torch.Generator().manual_seed(0),
    ).frames  # fmt: skip


def branch_state(raw):
    return {name.replace("self_attn.", "attn1.linear_branch."): tensor for name, tensor in raw.items()}


def test_spark_student_runs_as_it_was_trained(tmp_path, tiny_base):
    model, branch = student_transformer(1), rola(3, 6)
    file = tmp_path / "SparkWan2.1-T2V-14B-720P-0.95Sparsity-3Step.pth"
    state = flattened(native(model.state_dict())) | branch
    torch.save({f"net.{name}": tensor for name, tensor in state.items()}, file)
    report = convert_checkpoint(file, tmp_path / "student", base=tiny_base)
    assert report.format == "spark" and report.complete and report.recipe == "spark-95-3step"
    assert report.transformers["transformer"]["branch_tensors"] == 24
    pipe = load(tmp_path / "student", device="cpu")
    recipe = current_report(pipe).recipe
    attention, sampler = recipe["attention"], recipe["sampler"]
    assert attention["keep_ratio"] == 0.05 and attention["token_order"] == "raster" and attention["branch"] == "rola"
    assert attention["rola"]["angle_dtype"] == "bfloat16" and attention["rola"]["frequencies"] == "prefix"
    assert sampler["sigmas"] == pytest.approx([0.999375, 0.933781, 0.852895], abs=1e-6)
    assert pipe.videospark_defaults["height"] == 720 and pipe.videospark_defaults["provides"] == ["few-step"]
    settled(pipe.transformer)
    got = few(pipe, 3)
    direct = WanPipeline.from_pretrained(tiny_base)
    direct.transformer = model
    accelerate(direct, recipe, allow_untrained=True, branch_state={"transformer": branch_state(branch)})
    assert torch.equal(got, few(direct, 3))
    # The branch is at work: other branch tensors give another video.
    other = {name: tensor + 0.5 for name, tensor in branch_state(branch).items()}
    restore(direct)
    accelerate(direct, recipe, allow_untrained=True, branch_state={"transformer": other})
    assert not torch.equal(got, few(direct, 3))


def test_spark_pair_and_back(tmp_path, tiny_base):
    both = [student_transformer(seed) for seed in (1, 2)]
    torch.manual_seed(0)
    pipe = build_pipeline()
    pair = WanPipeline(
        **pipe.components | {"transformer_2": student_transformer(9), "scheduler": build_scheduler()},
        boundary_ratio=0.9,
    )
    pair.save_pretrained(tmp_path / "base")
    states = {}
    for half, model, seed in zip(("High", "Low"), both, (7, 8), strict=True):
        states[half] = flattened(native(model.state_dict())) | rola(3, 6, seed=seed)
        torch.save(states[half], tmp_path / f"SparkWan2.2-T2V-14B-480P-0.95Sparsity-{half}.pth")
    high = tmp_path / "SparkWan2.2-T2V-14B-480P-0.95Sparsity-High.pth"
    report = convert_checkpoint(high, tmp_path / "student", base=tmp_path / "base")
    assert list(report.transformers) == ["transformer", "transformer_2"]
    loaded_pipe = load(tmp_path / "student", device="cpu")
    assert loaded_pipe.config.boundary_ratio == 0.875
    assert torch.equal(loaded_pipe.transformer_2.proj_out.weight, both[1].proj_out.weight)
    assert few(loaded_pipe, 4).isfinite().all()
    files = revert_checkpoint(tmp_path / "student", tmp_path / "back.safetensors")
    assert [file.name for file in files] == ["back-High.safetensors", "back-Low.safetensors"]
    for file, half in zip(files, ("High", "Low"), strict=True):
        back = load_file(file)
        assert back.keys() == states[half].keys()
        assert all(torch.equal(back[name], tensor) for name, tensor in states[half].items())


def test_half_a_pair(tmp_path):
    for name in ("X-High.pth", "y_low_noise.safetensors"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"X-Low\.pth is missing"):
        convert_checkpoint(tmp_path / "X-High.pth", tmp_path / "out")
    with pytest.raises(ConfigError, match="must be the high-noise one"):
        convert_checkpoint(tmp_path / "y_low_noise.safetensors", tmp_path / "out")


def spoilt_spark(tmp_path, change, name="SparkWan2.1-T2V-1.3B-480P-0.90Sparsity.pth", **settings):
    state = flattened(native(make_model(**settings).state_dict())) | rola(HEADS, LAYERS)
    change(state)
    torch.save(state, tmp_path / name)
    return tmp_path / name


def drop(pattern):
    def change(state):
        for name in [name for name in state if pattern in name]:
            del state[name]

    return change


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (drop("proj_q"), {}, r"2 missing of the linear branch, without which this is no student"),
        (drop("self_attn.gate"), {}, r"4 missing of the linear branch"),
        (drop("ffn.2.bias"), {}, r"2 missing \(blocks\.0\.ffn\.net\.2\.bias, blocks\.1"),
        (drop("k_img"), IMAGE, "half an image branch"),
        (drop("blocks.1.cross_attn.v_img"), IMAGE, r"2 missing \(blocks\.1\.attn2\.add_v_proj\.bias"),
        (lambda s: s.update({"blocks.0.extra.weight": torch.ones(2)}), {}, r"1 unknown \(blocks\.0\.extra\.weight\)"),
        (lambda s: s.update({"blocks.0.ffn.2.bias": torch.ones(3)}), {}, r"1 of the wrong shape .*\[3\], not \[128\]"),
        (lambda s: s.update({"blocks.1.self_attn.gate_bias": torch.ones(1, 3, 1, 1)}), {}, "of the wrong shape"),
        (lambda s: s["blocks.0.ffn.2.bias"].fill_(torch.nan), {}, "NaN or infinite"),
    ],
)
def test_spoilt_files_leave_nothing(tmp_path, change, settings, message):
    file = spoilt_spark(tmp_path, change, **settings)
    with pytest.raises(ConfigError, match=message):
        convert_checkpoint(file, tmp_path / "out", format="spark")
    assert nothing_left(tmp_path, file.name)


def test_image_student_without_its_branch_beside_a_base(tmp_path):
    base = tmp_path / "base"
    make_model(**IMAGE).save_pretrained(base / "transformer")
    (base / "model_index.json").write_text(json.dumps({"transformer": ["diffusers", "WanTransformer3DModel"]}))
    file = spoilt_spark(tmp_path, lambda state: None, "SparkWan2.1-I2V-14B-720P-0.97Sparsity.pth", in_channels=36)
    with pytest.raises(ConfigError, match="image branch is missing"):
        convert_checkpoint(file, tmp_path / "out", base=base)
    whole = spoilt_spark(tmp_path, lambda state: None, "SparkWan2.1-I2V-14B-720P-0.97Sparsity.pth", **IMAGE)
    report = convert_checkpoint(whole, tmp_path / "out", base=base)
    assert report.recipe == "spark-97-4step"
    assert torch.equal(run(loaded(tmp_path / "out")), run(make_model(**IMAGE)))


def test_a_name_that_says_nothing_needs_the_sparsity(tmp_path):
    file = spoilt_spark(tmp_path, lambda state: None, "student.pth")
    with pytest.raises(ConfigError, match="sparsity: got None"):
        convert_checkpoint(file, tmp_path / "out")
    assert convert_checkpoint(file, tmp_path / "out", sparsity=0.95, steps=8).recipe == "spark-95-8step"
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        convert_checkpoint(file, tmp_path / "out", sparsity=0.95)
    with pytest.raises(ConfigError, match="below a folder that can be written to"):
        convert_checkpoint(file, file / "inside" / "out", sparsity=0.95)
    with pytest.raises(ConfigError, match="drop_gate: got True"):
        convert_checkpoint(file, tmp_path / "gateless", sparsity=0.95, drop_gate=True)


def test_a_failure_takes_the_folders_above_away_again(tmp_path):
    def fail_in(context, file):
        with context as folder:
            ((folder or tmp_path / "there" / "new") / file).write_text("half")
            raise OSError("disk full")

    (tmp_path / "there").mkdir()
    target = tmp_path / "there" / "new" / "deep" / "out"
    with pytest.raises(OSError, match="disk"):
        fail_in(whole_folder(target), "part")
    assert list((tmp_path / "there").iterdir()) == []
    with pytest.raises(OSError, match="disk"):
        fail_in(made_parents(target), "somebody-elses")
    assert [path.name for path in (tmp_path / "there" / "new").iterdir()] == ["somebody-elses"]
    with whole_folder(target) as folder:
        (folder / "part").write_text("whole")
    assert (target / "part").read_text() == "whole"


def test_turbodiffusion_block_scales(tmp_path):
    model = make_model()
    state = flattened(native(model.state_dict()))
    for name in [n for n in state if n.endswith("ffn.0.weight")]:  # 192 x 128: a ragged block
        weight = state.pop(name)
        scale = torch.stack([weight[:128].abs().max(), weight[128:].abs().max()])[:, None] / 127
        stem = name.removesuffix("weight")
        state[f"{stem}int8_weight"] = (weight / scale.repeat_interleave(128, 0)[:192]).round().to(torch.int8)
        state[f"{stem}scale"] = scale
    for i in range(LAYERS):
        state[f"blocks.{i}.self_attn.attn_op.local_attn.proj_l.weight"] = torch.randn(HEAD_DIM, HEAD_DIM)
        state[f"blocks.{i}.self_attn.attn_op.local_attn.proj_l.bias"] = torch.randn(HEAD_DIM)
    torch.save(state, tmp_path / "TurboWan2.1-T2V-1.3B-480P-quant.pth")
    report = convert_checkpoint(tmp_path / "TurboWan2.1-T2V-1.3B-480P-quant.pth", tmp_path / "out", dtype="float32")
    assert report.format == "turbodiffusion" and report.transformers["transformer"]["widened"] == LAYERS
    recipe = json.loads((tmp_path / "out" / "videospark_recipe.json").read_text())
    assert recipe["sampler"]["stochastic"] and recipe["attention"]["block_size_q"] == 128
    got, weight = loaded(tmp_path / "out"), model.blocks[0].ffn.net[0].proj.weight
    assert (got.blocks[0].ffn.net[0].proj.weight - weight).abs().max() <= weight.abs().max() / 127 / 2 * 1.001
    files = revert_checkpoint(tmp_path / "out", tmp_path / "back.safetensors")
    assert load_file(files[0])["patch_embedding.weight"].ndim == 2


@pytest.mark.parametrize("number", ["fp8", "int8", "comfy"])
def test_lightx2v_eight_bits(tmp_path, number):
    model = make_model()
    state = native(model.state_dict())
    limit, dtype = (127, torch.int8) if number == "int8" else (448, torch.float8_e4m3fn)
    for name in [n for n in state if n.startswith("blocks.") and n.endswith(".weight") and state[n].ndim == 2]:
        weight = state[name]
        scale = (weight.abs().amax() if number == "comfy" else weight.abs().amax(1, keepdim=True)) / limit
        state[name] = (weight / scale).round().to(dtype) if number == "int8" else (weight / scale).to(dtype)
        key = name.replace("weight", "scale_weight" if number == "comfy" else "weight_scale")
        state[key] = scale.reshape(()) if number == "comfy" else scale
    if number == "comfy":
        state["scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
        state["blocks.0.self_attn.q.scale_input"] = torch.ones(())
    source = tmp_path / "wan2.1_t2v_14b_scaled_lightx2v_4step.safetensors"
    config_beside(tmp_path)
    save_file(state, source)
    report = convert_checkpoint(source, tmp_path / "out")
    assert report.format == "lightx2v" and report.recipe == "lightx2v-4step"
    assert report.transformers["transformer"]["widened"] == 10 * LAYERS
    assert any("static scale" in note for note in report.notes) == (number == "comfy")
    original, got = run(model), run(loaded(tmp_path / "out").float())
    assert (got - original).norm() / original.norm() < 0.05
    spoilt = {name: tensor for name, tensor in state.items() if not name.endswith("q.weight_scale")}
    spoilt = {name: tensor for name, tensor in spoilt.items() if "self_attn.q.scale_weight" not in name}
    save_file(spoilt, source)
    with pytest.raises(ConfigError, match="in eight bits without a scale"):
        convert_checkpoint(source, tmp_path / "out2")


def test_fastvideo_gate_is_never_dropped_silently(tmp_path):
    model = make_model()
    state = model.state_dict() | {
        f"blocks.{i}.to_gate_compress.{leaf}": torch.zeros(128, 128)[: (None if leaf == "weight" else 1)].squeeze()
        for i in range(LAYERS)
        for leaf in ("weight", "bias")
    }
    folder = tmp_path / "FastWan2.1-T2V-1.3B" / "transformer"
    config_beside(folder)
    save_file({name: tensor.contiguous().clone() for name, tensor in state.items()}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="4 tensors of FastVideo's gate"):
        convert_checkpoint(folder.parent, tmp_path / "out")
    report = convert_checkpoint(folder.parent, tmp_path / "out", drop_gate=True)
    assert report.recipe == "fastvideo-3step" and any("gate are left out" in note for note in report.notes)
    assert torch.equal(run(loaded(tmp_path / "out")), run(model))


def test_the_running_average_is_taken():
    state = {f"{prefix}.{name}": 0 for prefix in ("net", "net_ema") for name in ("patch_embedding.weight", "x")}
    bare, notes = strip_prefixes(state)
    assert bare == {"patch_embedding.weight": "net_ema.patch_embedding.weight", "x": "net_ema.x"}
    assert "running average" in notes[0] and "2 tensors" in notes[0]
    assert strip_prefixes(["generator.model.x", "generator.model.y"])[0]["x"] == "generator.model.x"


def test_pickles_are_refused(tmp_path):
    (tmp_path / "bad.pth").write_bytes(b"\x80\x04not a checkpoint")
    with pytest.raises(ConfigError, match="zip form"):
        convert_checkpoint(tmp_path / "bad.pth", tmp_path / "out")
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError, match="no complete safetensors"):
        convert_checkpoint(tmp_path / "bad.safetensors", tmp_path / "out")
    with pytest.raises(ConfigError, match="no pickles"):
        revert_checkpoint(tmp_path, tmp_path / "back.pth")
