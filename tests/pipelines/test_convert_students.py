"""Every kind of student in its publisher's naming: written here, converted, run beside the same weights put in by hand,
taken back to that naming, and converted again from there.
"""

import json

import pytest
import torch
from diffusers import WanPipeline
from safetensors.torch import load_file, save_file

from videospark.core.config import ConfigError
from videospark.pipelines.acceleration import accelerate, current_report
from videospark.pipelines.convert import convert_checkpoint, revert_checkpoint
from videospark.pipelines.convert.keys import strip_prefixes
from videospark.pipelines.convert.mapping import widen
from videospark.pipelines.convert.sources import find_sources
from videospark.pipelines.convert.students import Wishes, _keep_ratio
from videospark.pipelines.loading import load
from videospark.tiny.components import build_pipeline, build_scheduler

from .test_convert import (
    LAYERS,
    config_beside,
    few,
    flattened,
    loaded,
    make_model,
    native,
    rola,
    run,
    settled,
    student_transformer,
)

HEADS, DIM, BLOCKS = 3, 64, 6


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Diffusers folders of one model and of a pair, whose transformers are others than those of the students."""
    folder = tmp_path_factory.mktemp("bases")
    torch.manual_seed(0)
    pipe = build_pipeline()
    pipe.save_pretrained(folder / "one")
    parts = pipe.components | {"transformer_2": student_transformer(9), "scheduler": build_scheduler()}
    WanPipeline(**parts, boundary_ratio=0.5).save_pretrained(folder / "pair")
    return {1: folder / "one", 2: folder / "pair"}


def sample(pipe, steps):
    """`few`, with the fresh noise of the kinds that draw some from a seed, as `generate` does."""
    if hasattr(pipe.scheduler, "set_generator"):
        pipe.scheduler.set_generator(torch.Generator().manual_seed(1))
    return few(pipe, steps)


def sla(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"weight": (DIM, DIM), "bias": (DIM,)}
    return {
        f"blocks.{i}.self_attn.attn_op.local_attn.proj_l.{leaf}": torch.randn(shape, generator=generator) * 0.1
        for i in range(BLOCKS)
        for leaf, shape in shapes.items()
    }


def eight_bits(state, number, scale_word):
    """The products of the blocks in eight bits with a scale for each row, and the state that those numbers mean."""
    stored, meant = dict(state), dict(state)
    limit, dtype = (127, torch.int8) if number == "int8" else (448, torch.float8_e4m3fn)
    for name in [n for n in state if n.startswith("blocks.") and n.endswith(".weight") and state[n].ndim == 2]:
        scale = state[name].abs().amax(1, keepdim=True) / limit
        scaled = state[name] / scale
        stored[name] = scaled.round().to(dtype) if number == "int8" else scaled.to(dtype)
        stored[f"{name.removesuffix('weight')}{scale_word}"] = scale
        meant[name] = widen(stored[name], scale).bfloat16().float()
    return stored, meant


def write_spark(folder, models):
    names = {1: ["SparkWan2.1-T2V-14B-720P-0.97Sparsity.pth"],
             2: [f"SparkWan2.2-T2V-14B-480P-0.95Sparsity-{half}.pth" for half in ("High", "Low")]}  # fmt: skip
    branches = [rola(HEADS, BLOCKS, seed=seed) for seed in range(len(models))]
    for name, model, branch in zip(names[len(models)], models, branches, strict=True):
        torch.save({f"net.{k}": v for k, v in (flattened(native(model.state_dict())) | branch).items()}, folder / name)
    return folder / names[len(models)][0], branches


def write_turbo(folder, models):
    names = {
        1: ["TurboWan2.1-T2V-1.3B-480P.pth"],
        2: ["TurboWan2.2-A14B-high-720P.pth", "TurboWan2.2-A14B-low-720P.pth"],
    }
    branches = [sla(seed) for seed in range(len(models))]
    for name, model, branch in zip(names[len(models)], models, branches, strict=True):
        torch.save(flattened(native(model.state_dict())) | branch, folder / name)
    return folder / names[len(models)][0], branches


def write_lightx2v(number):
    def write(folder, models):
        pair = [f"wan2.2_t2v_A14b_{half}_noise_lightx2v_4step.safetensors" for half in ("high", "low")]
        kind = {1: ["wan2.1_t2v_14b_lightx2v_4step.safetensors"], 2: pair}
        for name, model in zip(kind[len(models)], models, strict=True):
            state = native(model.state_dict())
            if number is not None:
                state, meant = eight_bits(state, number, "weight_scale")
                put_native(model, meant)
            save_file({key: tensor.contiguous() for key, tensor in state.items()}, folder / name)
        return folder / kind[len(models)][0], None

    return write


def put_native(model, state):
    """What a file under Wan's names says, in the model itself."""
    from videospark.pipelines.convert.keys import tensor_to_diffusers

    named = {tensor_to_diffusers(name): tensor for name, tensor in state.items()}
    model.load_state_dict({name: tensor.reshape(model.state_dict()[name].shape) for name, tensor in named.items()})


def write_fastvideo(folder, models):
    (model,) = models
    place = folder / "FastWan2.1-T2V-1.3B-Diffusers"
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for i in range(BLOCKS):
        state[f"blocks.{i}.to_gate_compress.weight"] = torch.randn(HEADS * DIM, HEADS * DIM)
        state[f"blocks.{i}.to_gate_compress.bias"] = torch.randn(HEADS * DIM)
    config_beside(place / "transformer", HEADS)
    save_file(state, place / "transformer" / "diffusion_pytorch_model.safetensors")
    return place, None


KINDS = {
    "spark": (write_spark, 1, "spark-97-4step", 4, None),
    "spark pair": (write_spark, 2, "spark-95-4step", 4, 0.875),
    "turbodiffusion": (write_turbo, 1, "turbo-90-4step", 4, None),
    "turbodiffusion pair": (write_turbo, 2, "turbo-90-4step", 4, 0.9),
    "lightx2v": (write_lightx2v(None), 1, "lightx2v-4step", 4, None),
    "lightx2v pair in fp8": (write_lightx2v("fp8"), 2, "lightx2v-4step", 4, 0.875),
    "lightx2v in int8": (write_lightx2v("int8"), 1, "lightx2v-4step", 4, None),
    "fastvideo": (write_fastvideo, 1, "fastvideo-3step", 3, None),
}
PARTS = ("transformer", "transformer_2")


def by_hand(base, models, recipe, branches, boundary):
    """The base's pipeline with these very transformers, and the recipe with these very branches."""
    pipe = WanPipeline.from_pretrained(base)
    for part, model in zip(PARTS, models, strict=False):
        pipe.register_modules(**{part: model})
    if boundary is not None:
        pipe.register_to_config(boundary_ratio=boundary)
    state = None
    if branches is not None:
        from videospark.pipelines.convert.keys import tensor_to_diffusers

        state = {
            part: {tensor_to_diffusers(name): tensor for name, tensor in branch.items()}
            for part, branch in zip(PARTS, branches, strict=False)
        }
    accelerate(pipe, recipe, allow_untrained=True, branch_state=state)
    return pipe


@pytest.mark.parametrize("kind", KINDS)
def test_there_run_and_back(tmp_path, bases, kind):
    write, count, recipe, steps, boundary = KINDS[kind]
    models = [student_transformer(seed) for seed in range(1, count + 1)]
    source, branches = write(tmp_path, models)
    options = {"base": bases[count], "drop_gate": kind == "fastvideo"}
    report = convert_checkpoint(source, tmp_path / "student", **options)
    assert report.format == kind.partition(" ")[0] and report.recipe == recipe and report.complete
    assert list(report.transformers) == list(PARTS[:count])

    pipe = load(tmp_path / "student", device="cpu")
    assert pipe.config.boundary_ratio == boundary
    for part in PARTS[:count]:
        settled(getattr(pipe, part))
    got = sample(pipe, steps)
    hand = by_hand(bases[count], models, current_report(pipe).recipe, branches, boundary)
    assert torch.equal(got, sample(hand, steps))

    # Back to the publisher's names, from where it converts again without being told anything.
    files = revert_checkpoint(tmp_path / "student", tmp_path / "back.safetensors")
    assert len(files) == count
    again = tmp_path / "again"
    second = convert_checkpoint(files[0], again, base=bases[count])
    assert second.recipe == recipe and any("header" in note for note in second.notes)
    for name in ("videospark_recipe.json", "videospark_defaults.json"):
        assert json.loads((again / name).read_text()) == json.loads((tmp_path / "student" / name).read_text())
    for part in PARTS[:count]:
        for file in sorted((tmp_path / "student" / part).glob("*.safetensors")):
            first, other = load_file(file), load_file(again / part / file.name)
            assert first.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in first.items())


def test_the_header_is_no_longer_believed_where_the_user_says_otherwise(tmp_path):
    state = flattened(native(make_model().state_dict())) | rola(2, LAYERS)
    torch.save(state, tmp_path / "SparkWan2.1-T2V-1.3B-480P-0.90Sparsity.pth")
    convert_checkpoint(tmp_path / "SparkWan2.1-T2V-1.3B-480P-0.90Sparsity.pth", tmp_path / "student")
    (back,) = revert_checkpoint(tmp_path / "student", tmp_path / "x.safetensors")
    other = convert_checkpoint(back, tmp_path / "a", sparsity=0.95, steps=2)
    assert other.recipe == "spark-95-2step" and any("header of the file is not used" in note for note in other.notes)
    gather = convert_checkpoint(back, tmp_path / "b", backend="gather")
    assert json.loads((gather.folder / "videospark_recipe.json").read_text())["attention"]["backend"] == "gather"
    tensors = load_file(back)
    save_file(tensors, tmp_path / "broken.safetensors", metadata={"videospark_recipe": "{"})
    with pytest.raises(ConfigError, match=r"source\.videospark_recipe: got a header that is no JSON"):
        convert_checkpoint(tmp_path / "broken.safetensors", tmp_path / "c")


def test_the_image_student_and_back(tmp_path):
    settings = {"image_dim": 48, "added_kv_proj_dim": 128, "in_channels": 36}
    model, branch = make_model(**settings), rola(2, LAYERS)
    state = flattened(native(model.state_dict())) | branch
    torch.save(state, tmp_path / "SparkWan2.1-I2V-14B-720P-0.97Sparsity.pth")
    convert_checkpoint(tmp_path / "SparkWan2.1-I2V-14B-720P-0.97Sparsity.pth", tmp_path / "student")
    assert torch.equal(run(loaded(tmp_path / "student")), run(model))
    (back,) = revert_checkpoint(tmp_path / "student", tmp_path / "back.safetensors")
    found = load_file(back)
    assert found.keys() == state.keys() and all(torch.equal(found[name], tensor) for name, tensor in state.items())


SHAPES = {
    "2.2 T2V A14B": {},
    "2.2 I2V A14B, without an image branch": {"in_channels": 36},
    "2.2 TI2V 5B": {"in_channels": 48, "out_channels": 48},
}


@pytest.mark.parametrize("name", SHAPES)
def test_native_wan_2_2(tmp_path, name):
    """A pair as two folders with shards and an index each, as Wan 2.2 has it; the 5B model as one file."""
    experts = ["high_noise_model", "low_noise_model"] if "A14B" in name else ["."]
    models = [make_model(seed, **SHAPES[name]) for seed in range(len(experts))]
    for place, model in zip(experts, models, strict=True):
        folder = tmp_path / "wan" / place
        config_beside(folder)
        state = native(model.state_dict())
        parts = {
            "x-00001-of-00002.safetensors": sorted(state)[::2],
            "x-00002-of-00002.safetensors": sorted(state)[1::2],
        }
        for file, names in parts.items():
            save_file({key: state[key].contiguous() for key in names}, folder / file)
        index = {"weight_map": {key: file for file, names in parts.items() for key in names}}
        (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    report = convert_checkpoint(tmp_path / "wan", tmp_path / "out")
    assert list(report.transformers) == list(PARTS[: len(experts)]) and report.format == "wan"
    for part, model in zip(PARTS, models, strict=False):
        assert torch.equal(run(loaded(tmp_path / "out", part)), run(model))
    files = revert_checkpoint(tmp_path / "out", tmp_path / "back.safetensors")
    for file, model in zip(files, models, strict=True):
        back, state = load_file(file), native(model.state_dict())
        assert back.keys() == state.keys() and all(torch.equal(back[key], tensor) for key, tensor in state.items())
    if len(experts) == 2:
        for file in (tmp_path / "wan" / "low_noise_model").iterdir():
            file.unlink()
        (tmp_path / "wan" / "low_noise_model").rmdir()
        with pytest.raises(ConfigError, match="missing: low_noise_model"):
            convert_checkpoint(tmp_path / "wan", tmp_path / "half")


def test_two_models_in_one_file_are_no_guess():
    names = [f"{prefix}.{name}" for prefix in ("generator", "net") for name in ("patch_embedding.weight", "x")]
    with pytest.raises(ConfigError, match=r"source: got '2 tensors a second time \(net\.patch_embedding\.weight"):
        strip_prefixes(names)


def test_scales_of_rows_and_of_blocks_are_told_apart():
    """As many blocks as rows: by number alone they are the same."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 127, (256, 128 * 128), generator=generator).to(torch.int8)
    blocks = torch.rand(2, 128, generator=generator)
    wide = widen(weight, blocks)
    assert torch.equal(wide[0, :128], weight[0, :128].float() * blocks[0, 0])
    assert torch.equal(wide[255, -1:], weight[255, -1:].float() * blocks[1, 127])
    rows = torch.rand(256, 1, generator=generator)
    assert torch.equal(widen(weight, rows), weight.float() * rows)
    assert torch.equal(widen(weight, rows[:, 0]), weight.float() * rows)


def test_a_base_without_a_transformer_is_said(tmp_path, bases):
    """The other parts are enough of a base: its transformer is as large as what is converted."""
    import shutil

    shutil.copytree(bases[1], tmp_path / "base", ignore=shutil.ignore_patterns("transformer"))
    source, _ = write_spark(tmp_path, [student_transformer(1)])
    report = convert_checkpoint(source, tmp_path / "student", base=tmp_path / "base")
    assert report.complete and any("nothing was compared" in note for note in report.notes)
    assert few(load(tmp_path / "student", device="cpu"), 4).isfinite().all()


@pytest.mark.parametrize("mode", ["int8", "fp8"])
def test_stored_in_eight_bits(tmp_path, bases, mode):
    """The numbers that quantizing a 16-bit folder gives, in half the bytes; streamed, so that nothing is whole."""
    source, _ = write_spark(tmp_path, [student_transformer(1)])
    wide = convert_checkpoint(source, tmp_path / "wide", base=bases[1], dtype="bfloat16")
    narrow = convert_checkpoint(source, tmp_path / "narrow", base=bases[1], dtype="bfloat16", quantize=mode)
    sizes = [report.transformers["transformer"]["bytes"] for report in (wide, narrow)]
    assert sizes[1] < 0.75 * sizes[0] and narrow.recipe == wide.recipe
    recipe = json.loads((tmp_path / "narrow" / "videospark_recipe.json").read_text())
    pipe = load(tmp_path / "narrow", device="cpu", dtype=torch.bfloat16)
    again = load(tmp_path / "wide", device="cpu", dtype=torch.bfloat16, recipe=recipe)
    report = current_report(pipe).quantization["transformer"]
    assert report["config"]["mode"] == mode and report["num_quantized"] == 10 * BLOCKS
    found, wanted = pipe.transformer.state_dict(), again.transformer.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(tensor.float(), wanted[name].float()) for name, tensor in found.items())
    with pytest.raises(ConfigError, match="stored in eight bits are gone"):
        revert_checkpoint(tmp_path / "narrow", tmp_path / "back.safetensors")
    with pytest.raises(ConfigError, match="quantize: got 'fp4'"):
        convert_checkpoint(source, tmp_path / "x", quantize="fp4")


def test_a_plain_model_in_eight_bits_brings_a_recipe(tmp_path, bases):
    save_file(native(student_transformer(1).state_dict()), tmp_path / "wan.safetensors")
    report = convert_checkpoint(tmp_path / "wan.safetensors", tmp_path / "out", base=bases[1], quantize="int8")
    assert report.recipe == "int8" and not any("narrows" in note for note in report.notes)
    assert few(load(tmp_path / "out", device="cpu"), 2).isfinite().all()


def test_one_file_is_no_pair(tmp_path):
    file = tmp_path / "high.safetensors"
    file.write_bytes(b"x")
    with pytest.raises(ConfigError, match="low: .*another file than the high-noise expert"):
        find_sources(file, tmp_path / "." / "high.safetensors")


def test_a_sparsity_that_contradicts_the_name_is_refused():
    assert _keep_ratio("SparkWan-0.95Sparsity.pth", Wishes(sparsity=0.95)) == 0.05
    with pytest.raises(ConfigError, match="sparsity: got 0.9; must be 0.95"):
        _keep_ratio("SparkWan-0.95Sparsity.pth", Wishes(sparsity=0.9))
