"""LoRAs in every convention, against weights that the test itself merges in float64."""

import json

import pytest
import torch
from diffusers import WanPipeline
from safetensors.torch import save_file

from videospark.core.config import ConfigError
from videospark.pipelines.acceleration import accelerate, restore
from videospark.pipelines.convert.keys import module_to_native
from videospark.pipelines.lora import load_lora, loaded_loras, parse_choice, set_lora_weight, unload_lora
from videospark.pipelines.lora_files import read_lora
from videospark.quantization.convert import quantize_
from videospark.tiny.components import LATENT_CHANNELS, build_scheduler, build_transformer

RANK = 4
LAYERS = ["attn1.to_q", "attn1.to_out.0", "attn2.to_k", "ffn.net.0.proj", "ffn.net.2"]
INT8 = {"name": "int8", "quantization": {"mode": "int8", "engine": "reference"}}


@pytest.fixture(autouse=True)
def _nothing_left(pipe):
    yield
    unload_lora(pipe)


def targets(transformer):
    return [f"blocks.{i}.{layer}" for i in range(len(transformer.blocks)) for layer in LAYERS]


def factors(transformer, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name in targets(transformer):
        out, into = transformer.get_submodule(name).weight.shape
        made[name] = (
            torch.randn(RANK, into, generator=generator) * 0.1,
            torch.randn(out, RANK, generator=generator) * 0.1,
        )
    return made


def merged(transformer, pairs, factor=1.0):
    other = build_transformer()
    other.load_state_dict(transformer.state_dict())  # a copy of the object would have its LoRAs
    for name, (down, up) in pairs.items():
        layer = other.get_submodule(name)
        layer.weight.data = (layer.weight.double() + factor * up.double() @ down.double()).float()
    return other


@torch.no_grad()
def run(transformer, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return transformer(
        torch.randn(1, LATENT_CHANNELS, 2, 8, 8, generator=generator), torch.tensor([400.0]),
        torch.randn(1, 16, 128, generator=generator), return_dict=False,
    )[0]  # fmt: skip


def make(seed=0):
    torch.manual_seed(seed)
    model = build_transformer()
    torch.nn.init.normal_(model.proj_out.weight, std=0.05)
    return model


def close(got, wanted):
    return torch.allclose(got, wanted, rtol=1e-3, atol=1e-5 + 1e-4 * wanted.abs().max().item())


def peft_names(name, down, up):
    return {f"transformer.{name}.lora_A.weight": down, f"transformer.{name}.lora_B.weight": up}


def peft_default(name, down, up):
    stem = f"base_model.model.{name}"
    return {f"{stem}.lora_A.default.weight": down, f"{stem}.lora_B.default.weight": up}


def native_ab(name, down, up):
    stem = f"diffusion_model.{module_to_native(name)}"
    return {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}


def native_alpha(name, down, up):
    stem = f"diffusion_model.{module_to_native(name)}"
    parts = {f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up}
    return parts | {f"{stem}.alpha": torch.tensor(2.0)}


def kohya(name, down, up):
    stem = f"lora_unet_{module_to_native(name).replace('.', '_')}"
    parts = {f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up}
    return parts | {f"{stem}.alpha": torch.tensor(2.0)}


def bare(name, down, up):
    return {f"{module_to_native(name)}.lora_down.weight": down, f"{module_to_native(name)}.lora_up.weight": up}


def old_diffusers(name, down, up):
    block, layer, leaf = name.partition(".attn")
    stem = f"transformer.{name}" if not layer else f"transformer.{block}.attn{leaf[0]}.processor.{leaf[2:]}"
    stem = stem.replace("to_out.0", "to_out")
    return {f"{stem}_lora.down.weight": down, f"{stem}_lora.up.weight": up}


def write(path, pairs, convention, extra=None, metadata=None):
    state = {key: value.clone() for name, (d, u) in pairs.items() for key, value in convention(name, d, u).items()}
    save_file(state | (extra or {}), path, metadata=metadata)
    return path


@pytest.mark.parametrize(
    ("convention", "factor"),
    [(peft_names, 1), (peft_default, 1), (native_ab, 1), (native_alpha, 2 / RANK), (kohya, 2 / RANK), (bare, 1),
     (old_diffusers, 1)],
)  # fmt: skip
def test_every_convention_equals_merging(pipe, tmp_path, convention, factor):
    transformer = pipe.transformer
    pairs = factors(transformer)
    before, weights = run(transformer), {n: p.clone() for n, p in transformer.named_parameters()}
    report = load_lora(pipe, write(tmp_path / "a.safetensors", pairs, convention), weight=0.5)
    assert report.modules == {"transformer": len(pairs)} and not report.unmatched
    got = run(transformer)
    assert close(got, run(merged(transformer, pairs, 0.5 * factor))) and not close(got, before)
    assert not any(layer._forward_hooks for layer in transformer.modules() if layer is not transformer)
    set_lora_weight(pipe, "a", -1.0)
    assert close(run(transformer), run(merged(transformer, pairs, -factor)))
    unload_lora(pipe)
    assert all(torch.equal(p, weights[n]) for n, p in transformer.named_parameters())
    assert torch.equal(run(transformer), before) and loaded_loras(pipe) == {}


def test_alpha_of_peft_settings(pipe, tmp_path):
    pairs = factors(pipe.transformer)
    metadata = {"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 8, "transformer.r": RANK})}
    load_lora(pipe, write(tmp_path / "a.safetensors", pairs, peft_names, metadata=metadata))
    assert close(run(pipe.transformer), run(merged(pipe.transformer, pairs, 2.0)))
    unload_lora(pipe)
    folder = tmp_path / "peft"
    folder.mkdir()
    write(folder / "adapter_model.safetensors", pairs, peft_default)
    settings = {"lora_alpha": 8, "use_rslora": True}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    load_lora(pipe, folder)
    assert close(run(pipe.transformer), run(merged(pipe.transformer, pairs, 4.0)))
    unload_lora(pipe)


def test_differences_of_norms_biases_modulation_and_patches(pipe, tmp_path):
    transformer = pipe.transformer
    generator = torch.Generator().manual_seed(1)

    def like(tensor):
        return torch.randn(tensor.shape, generator=generator) * 0.1

    block = transformer.blocks[1]
    deltas = {
        "diffusion_model.blocks.1.norm3.diff": (block.norm2, "weight"),
        "diffusion_model.blocks.1.norm3.diff_b": (block.norm2, "bias"),
        "diffusion_model.blocks.1.self_attn.norm_q.diff": (block.attn1.norm_q, "weight"),
        "diffusion_model.blocks.1.self_attn.v.diff": (block.attn1.to_v, "weight"),
        "diffusion_model.blocks.1.self_attn.v.diff_b": (block.attn1.to_v, "bias"),
        "diffusion_model.blocks.1.diff_m": (block, "scale_shift_table"),
        "diffusion_model.head.modulation.diff": (transformer, "scale_shift_table"),
        "diffusion_model.head.head.diff_b": (transformer.proj_out, "bias"),
        "diffusion_model.time_projection.1.diff_b": (transformer.condition_embedder.time_proj, "bias"),
        "diffusion_model.patch_embedding.diff": (transformer.patch_embedding, "weight"),
    }
    state = {key: like(getattr(owner, leaf)) for key, (owner, leaf) in deltas.items()}
    state["diffusion_model.blocks.0.norm3.diff"] = torch.zeros(192)
    save_file(state, tmp_path / "diffs.safetensors")
    before, identities = run(transformer), {n: id(p) for n, p in transformer.named_parameters()}
    report = load_lora(pipe, tmp_path / "diffs.safetensors", weight=2.0)
    assert report.modules["transformer"] == 8 and any("all zeros" in note for note in report.notes)
    got = run(transformer)
    assert {n: id(p) for n, p in transformer.named_parameters()} == identities
    unload_lora(pipe)
    assert torch.equal(run(transformer), before)
    for key, (owner, leaf) in deltas.items():
        getattr(owner, leaf).data += 2.0 * state[key]
    wanted = run(transformer)
    for key, (owner, leaf) in deltas.items():
        getattr(owner, leaf).data -= 2.0 * state[key]
    assert close(got, wanted) and not close(got, before)


def test_two_loras_add_up(pipe, tmp_path):
    first, second = factors(pipe.transformer, 1), factors(pipe.transformer, 2)
    load_lora(pipe, write(tmp_path / "a.safetensors", first, peft_names), weight=0.5)
    load_lora(pipe, write(tmp_path / "b.safetensors", second, kohya), weight=-2.0)
    wanted = merged(merged(pipe.transformer, first, 0.5), second, -2.0 * 2 / RANK)
    assert close(run(pipe.transformer), run(wanted))
    with pytest.raises(ConfigError, match="taken: a, b"):
        load_lora(pipe, tmp_path / "a.safetensors")
    unload_lora(pipe, "a")
    assert loaded_loras(pipe) == {"transformer": {"b": -2.0}}
    unload_lora(pipe)
    with pytest.raises(ConfigError, match="no LoRA is loaded"):
        unload_lora(pipe, "a")


def test_files_of_one_name_in_two_folders(pipe, tmp_path):
    for number, name in enumerate(("high_noise_model", "low_noise_model")):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "lora.safetensors", factors(pipe.transformer, number), peft_names)
        load_lora(pipe, tmp_path / name / "lora.safetensors")
        assert read_lora(tmp_path / name / "lora.safetensors").noise == name.split("_")[0]
    assert loaded_loras(pipe) == {"transformer": {"lora": 1.0, "low_noise_model/lora": 1.0}}
    with pytest.raises(ConfigError, match="taken: lora, low_noise_model/lora"):
        load_lora(pipe, tmp_path / "low_noise_model" / "lora.safetensors")
    unload_lora(pipe)


@pytest.mark.parametrize("fused", [False, True])
def test_quantized_before_or_after(pipe, tmp_path, fused):
    transformer = pipe.transformer
    path = write(tmp_path / "a.safetensors", factors(transformer), native_alpha)
    recipe = INT8 | {"quantization": INT8["quantization"] | {"fused": fused}}
    before = run(transformer)
    accelerate(pipe, recipe)
    plain = run(transformer)
    load_lora(pipe, path)
    after = run(transformer)
    restore(pipe)
    unquantized = run(transformer)
    accelerate(pipe, recipe)
    assert torch.equal(run(transformer), after)
    unload_lora(pipe)
    assert torch.equal(run(transformer), plain)
    restore(pipe)
    assert torch.equal(run(transformer), before)
    # Beside the quantized layers the LoRA itself is exact: what is off is what quantizing costs without it.
    error, cost = (after - unquantized).norm() / unquantized.norm(), (plain - before).norm() / before.norm()
    assert 0 < error < 2 * cost < 0.2
    assert (after - plain).norm() / plain.norm() > 3 * error


def test_sparse_attention_before_or_after(pipe, tmp_path):
    path = write(tmp_path / "a.safetensors", factors(pipe.transformer), peft_names)
    load_lora(pipe, path)
    accelerate(pipe, "tiny-sparse-50")
    first = run(pipe.transformer)
    restore(pipe)
    unload_lora(pipe)
    accelerate(pipe, "tiny-sparse-50")
    load_lora(pipe, path)
    assert torch.equal(run(pipe.transformer), first)
    unload_lora(pipe)


def test_dropped_originals_keep_their_lora(pipe, tmp_path):
    transformer = make(3)
    pairs = factors(transformer)
    holder = WanPipeline(**pipe.components | {"transformer": transformer, "scheduler": build_scheduler()})
    load_lora(holder, write(tmp_path / "a.safetensors", pairs, peft_names))
    from videospark.quantization.config import QuantizationConfig

    wanted = run(merged(transformer, pairs))
    quantize_(transformer, QuantizationConfig(mode="int8", engine="reference", originals="drop"))
    assert (run(transformer) - wanted).norm() / wanted.norm() < 0.1


def test_two_experts(pipe, tmp_path):
    second = make(1)
    both = WanPipeline(
        **pipe.components | {"transformer_2": second, "scheduler": build_scheduler()}, boundary_ratio=0.9
    )
    pairs = factors(both.transformer)
    before = [run(both.transformer), run(second)]
    high = write(tmp_path / "style_high_noise.safetensors", pairs, native_ab)
    report = load_lora(both, high)
    assert report.modules == {"transformer": 30} and "only transformer is changed" in report.notes[0]
    assert not torch.equal(run(both.transformer), before[0]) and torch.equal(run(second), before[1])
    load_lora(both, high, expert="both", name="again")
    assert not torch.equal(run(second), before[1])
    unload_lora(both)
    keyed = {
        key.replace("transformer.", "transformer_2."): v
        for n, p in pairs.items()
        for key, v in peft_names(n, *p).items()
    }
    save_file({key: value.clone() for key, value in keyed.items()}, tmp_path / "second.safetensors")
    assert load_lora(both, tmp_path / "second.safetensors").modules == {"transformer": 0, "transformer_2": 30}
    assert torch.equal(run(both.transformer), before[0]) and not torch.equal(run(second), before[1])
    unload_lora(both)
    plain = write(tmp_path / "style.safetensors", pairs, native_ab)
    assert load_lora(both, plain).modules == {"transformer": 30, "transformer_2": 30}
    unload_lora(both)
    assert torch.equal(run(second), before[1])


def test_what_does_not_fit_is_refused(pipe, tmp_path):
    before = run(pipe.transformer)
    save_file({"unet.down_blocks.0.to_q.lora_A.weight": torch.ones(2, 4), "unet.down_blocks.0.to_q.lora_B.weight":
               torch.ones(4, 2)}, tmp_path / "sd.safetensors")  # fmt: skip
    with pytest.raises(ConfigError, match=r"none of its 1 modules .*down_blocks"):
        load_lora(pipe, tmp_path / "sd.safetensors")
    wide = {name: (torch.ones(RANK, 5120), torch.ones(5120, RANK)) for name in targets(pipe.transformer)}
    with pytest.raises(ConfigError, match=r"another size than transformer; must fit: 30 differ"):
        load_lora(pipe, write(tmp_path / "wide.safetensors", wide, peft_names))
    save_file({"transformer.blocks.0.attn1.to_q.lora_A.weight": torch.ones(2, 192)}, tmp_path / "half.safetensors")
    with pytest.raises(ConfigError, match="half a pair"):
        load_lora(pipe, tmp_path / "half.safetensors")
    pairs = factors(pipe.transformer)
    dora = write(tmp_path / "dora.safetensors", pairs, peft_names, {"blocks.0.attn1.to_q.dora_scale": torch.ones(1)})
    with pytest.raises(ConfigError, match="DoRA"):
        load_lora(pipe, dora)
    extra = {"diffusion_model.blocks.0.cross_attn.k_img.lora_A.weight": torch.ones(RANK, 192),
             "diffusion_model.blocks.0.cross_attn.k_img.lora_B.weight": torch.ones(192, RANK)}  # fmt: skip
    report = load_lora(pipe, write(tmp_path / "more.safetensors", pairs, native_ab, extra))
    assert report.unmatched == ["diffusion_model.blocks.0.cross_attn.k_img"] and "1 modules" in report.notes[0]
    pipe.transformer.fuse_qkv_projections()
    with pytest.raises(ConfigError, match="unfuse_qkv_projections"):
        run(pipe.transformer)
    pipe.transformer.unfuse_qkv_projections()
    unload_lora(pipe)
    assert torch.equal(run(pipe.transformer), before)


def test_a_failing_pass_leaves_nothing_on(pipe, tmp_path):
    load_lora(pipe, write(tmp_path / "a.safetensors", factors(pipe.transformer), peft_names))
    with pytest.raises(RuntimeError):
        pipe.transformer(torch.ones(1, LATENT_CHANNELS, 2, 8, 8), torch.tensor([400.0]), torch.ones(1, 16, 7))
    assert not any(layer._forward_hooks for layer in pipe.transformer.modules() if layer is not pipe.transformer)
    unload_lora(pipe)


@pytest.mark.parametrize(
    ("text", "path", "weight", "expert"),
    [("a.safetensors", "a.safetensors", 1.0, "auto"), ("a.safetensors:0.5", "a.safetensors", 0.5, "auto"),
     ("x@y/a.safetensors:-1@low", "x@y/a.safetensors", -1.0, "low"), 
     ("C:/a.safetensors", "C:/a.safetensors", 1.0, "auto"), ("a.safetensors@both", "a.safetensors", 1.0, "both")],
)  # fmt: skip
def test_choices_on_the_command_line(text, path, weight, expert):
    choice = parse_choice(text)
    assert (str(choice.path), choice.weight, choice.expert) == (path, weight, expert)


def test_bad_choices():
    for text in (":0.5", "a:inf", "", "a.safetensors:inf"):
        with pytest.raises(ConfigError):
            parse_choice(text)
    for text in ("a.safetensors:half", "a.safetensors@hgh", "a.safetensors:0.5@", "a.safetensors@low:0.5"):
        with pytest.raises(ConfigError, match=r"FILE\[:WEIGHT\]\[@high"):
            parse_choice(text)
