"""Rarer namings of LoRAs, whole differences, both experts and image branches: stock, quantized, before and after."""

import json
from types import SimpleNamespace

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file

from videospark.core.config import ConfigError
from videospark.pipelines.convert.keys import module_to_native
from videospark.pipelines.lora import load_lora, unload_lora
from videospark.quantization.config import QuantizationConfig
from videospark.quantization.convert import quantize_, state_of

RANK = 2
LAYERS = ("attn1.to_q", "attn1.to_out.0", "attn2.to_v", "ffn.net.0.proj", "ffn.net.2")
IMAGE = {"image_dim": 48, "added_kv_proj_dim": 64, "in_channels": 20}


def make(seed=0, **changes):
    torch.manual_seed(seed)
    settings = {
        "num_attention_heads": 2, "attention_head_dim": 32, "in_channels": 4, "out_channels": 4, "text_dim": 16,
        "freq_dim": 32, "ffn_dim": 96, "num_layers": 2,
    }  # fmt: skip
    model = WanTransformer3DModel(**(settings | changes)).eval().requires_grad_(False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def pipe_of(*models):
    return SimpleNamespace(**dict(zip(("transformer", "transformer_2"), models, strict=False)))


@torch.no_grad()
def run(model, seed=5):
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    picture = None if config.image_dim is None else torch.randn(1, 257, config.image_dim, generator=generator)
    return model(
        torch.randn(1, config.in_channels, 2, 6, 4, generator=generator), torch.tensor([400.0]),
        torch.randn(1, 512, config.text_dim, generator=generator), picture, return_dict=False,
    )[0]  # fmt: skip


def close(got, wanted):
    return torch.allclose(got, wanted, rtol=1e-3, atol=1e-4 * wanted.abs().max().item())


def factors(model, names, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name in names:
        out, into = model.get_submodule(name).weight.shape
        made[name] = (
            torch.randn(RANK, into, generator=generator) * 0.2, torch.randn(out, RANK, generator=generator) * 0.2
        )  # fmt: skip
    return made


def merged(model, pairs, factor=1.0):
    other = make(**{key: getattr(model.config, key) for key in ("image_dim", "added_kv_proj_dim", "in_channels")})
    other.load_state_dict(model.state_dict())
    for name, (down, up) in pairs.items():
        layer = other.get_submodule(name)
        layer.weight.data = (layer.weight.double() + factor * up.double() @ down.double()).float()
    return other


def flat(name):
    return name.replace(".", "_")


CONVENTIONS = {
    # name -> stem, then the words for down and up, and an alpha where the convention has one.
    "diffusers, flattened": (lambda n: f"lora_transformer_{flat(n)}", "lora_down", "lora_up", 1.0),
    "lycoris": (lambda n: f"lycoris_{flat(module_to_native(n))}", "lora_down", "lora_up", 4.0),
    "musubi": (lambda n: f"lora_unet_{flat(module_to_native(n))}", "lora_down", "lora_up", 1.0),
    "DiffSynth": (lambda n: f"pipe.dit.{module_to_native(n)}", "lora_A.default", "lora_B.default", None),
    "DiffSynth, bare": (module_to_native, "lora_A.default", "lora_B.default", None),
    "ComfyUI": (lambda n: f"model.diffusion_model.{module_to_native(n)}", "lora_A", "lora_B", 1.0),
    "PEFT of native names": (lambda n: f"base_model.model.{module_to_native(n)}", "lora_A", "lora_B", None),
    "PEFT of a pipeline": (lambda n: f"base_model.model.transformer.{n}", "lora_A.custom", "lora_B.custom", None),
    "older diffusers": (lambda n: f"transformer.{n}", "lora_linear_layer.down", "lora_linear_layer.up", None),
    "oldest diffusers": (lambda n: f"transformer.{n}", "lora.down", "lora.up", None),
}


def write(path, pairs, convention, extra=None):
    stem, down_word, up_word, alpha = CONVENTIONS[convention]
    state = dict(extra or {})
    for name, (down, up) in pairs.items():
        state[f"{stem(name)}.{down_word}.weight"] = down.clone()
        state[f"{stem(name)}.{up_word}.weight"] = up.clone()
        if alpha is not None:
            state[f"{stem(name)}.alpha"] = torch.tensor(alpha, dtype=torch.bfloat16)
    save_file(state, path)
    return path


ORDERS = [(name, "stock") for name in CONVENTIONS] + [
    (name, order) for name in ("lycoris", "PEFT of a pipeline") for order in ("quantized before", "quantized after")
]


@pytest.mark.parametrize(("convention", "order"), ORDERS)
def test_every_naming_in_every_order(tmp_path, convention, order):
    model = make()
    pairs = factors(model, [f"blocks.{i}.{layer}" for i in range(2) for layer in LAYERS])
    path = write(tmp_path / "a.safetensors", pairs, convention)
    alpha = CONVENTIONS[convention][3]
    wanted = run(merged(model, pairs, 1.0 if alpha is None else alpha / RANK))
    config = QuantizationConfig(mode="int8", engine="reference")
    if order == "quantized before":
        quantize_(model, config)
    plain, weights = run(model), {key: value.clone() for key, value in model.state_dict().items()}
    report = load_lora(pipe_of(model), path)
    assert report.modules == {"transformer": len(pairs)} and not report.unmatched and not report.notes
    if order == "quantized after":
        quantize_(model, config)
    got = run(model)
    if order == "stock":
        assert close(got, wanted)
    else:
        assert (got - wanted).norm() / wanted.norm() < 0.1
    unload_lora(pipe_of(model))
    if order == "quantized after":
        state_of(model).remove()
    assert torch.equal(run(model), plain)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


def whole_differences(model, prefix="diffusion_model."):
    """Everything that Kijai's and LightX2V's extractions carry, and what it is the difference of."""
    block = model.blocks[1]
    places = {
        "blocks.1.self_attn.q.diff": (block.attn1.to_q, "weight"),
        "blocks.1.self_attn.q.diff_b": (block.attn1.to_q, "bias"),
        "blocks.1.ffn.2.diff_b": (block.ffn.net[2], "bias"),
        "blocks.1.self_attn.norm_k.diff": (block.attn1.norm_k, "weight"),
        "blocks.1.cross_attn.norm_q.diff": (block.attn2.norm_q, "weight"),
        "blocks.1.norm3.diff": (block.norm2, "weight"),
        "blocks.1.norm3.diff_b": (block.norm2, "bias"),
        "blocks.1.diff_m": (block, "scale_shift_table"),
        "head.modulation.diff": (model, "scale_shift_table"),
        "head.head.diff": (model.proj_out, "weight"),
        "patch_embedding.diff": (model.patch_embedding, "weight"),
        "time_embedding.0.diff_b": (model.condition_embedder.time_embedder.linear_1, "bias"),
    }
    generator = torch.Generator().manual_seed(3)
    state = {
        f"{prefix}{key}": torch.randn(getattr(owner, leaf).shape, generator=generator) * 0.05
        for key, (owner, leaf) in places.items()
    }
    return state, [(owner, leaf, f"{prefix}{key}") for key, (owner, leaf) in places.items()]


@pytest.mark.parametrize("fused", [False, True])
def test_whole_differences_on_quantized_layers(tmp_path, fused):
    """The layer in eight bits stays as it is; the difference comes to it in the precision of its input."""
    model = make()
    state, places = whole_differences(model)
    save_file(state, tmp_path / "a.safetensors")
    changed = make()
    _, others = whole_differences(changed)
    for owner, leaf, key in others:
        getattr(owner, leaf).data += state[key]
    config = QuantizationConfig(mode="int8", engine="reference", fused=fused)
    stock = run(model)
    quantize_(model, config)
    plain = run(model)
    report = load_lora(pipe_of(model), tmp_path / "a.safetensors")
    assert report.modules == {"transformer": 10} and not report.unmatched
    after = run(model)
    state_of(model).remove()
    assert close(run(model), run(changed))
    quantize_(model, config)
    assert torch.equal(run(model), after)
    cost, error = (plain - stock).norm() / stock.norm(), (after - run(changed)).norm() / run(changed).norm()
    assert 0 < error < 2 * cost < 0.2 and (after - plain).norm() / plain.norm() > 3 * error
    unload_lora(pipe_of(model))
    assert torch.equal(run(model), plain)
    state_of(model).remove()
    assert torch.equal(run(model), stock)
    assert all(getattr(owner, leaf) is not None for owner, leaf, _ in places)


@pytest.mark.parametrize("quantized", [False, True])
def test_one_file_for_both_experts(tmp_path, quantized):
    first, second = make(0), make(1)
    pairs = [factors(first, [f"blocks.0.{layer}" for layer in LAYERS], seed) for seed in (0, 1)]
    state = {}
    for part, pair in zip(("transformer", "transformer_2"), pairs, strict=True):
        for name, (down, up) in pair.items():
            state[f"{part}.{name}.lora_A.weight"], state[f"{part}.{name}.lora_B.weight"] = down.clone(), up.clone()
    save_file(state, tmp_path / "both.safetensors")
    wanted = [run(merged(model, pair)) for model, pair in zip((first, second), pairs, strict=True)]
    if quantized:
        for model in (first, second):
            quantize_(model, QuantizationConfig(mode="int8", engine="reference"))
    plain = [run(first), run(second)]
    pipe = pipe_of(first, second)
    assert load_lora(pipe, tmp_path / "both.safetensors").modules == {"transformer": 5, "transformer_2": 5}
    for model, target in zip((first, second), wanted, strict=True):
        assert close(run(model), target) != quantized
        assert (run(model) - target).norm() / target.norm() < 0.1
    with pytest.raises(ConfigError, match="name both experts"):
        load_lora(pipe, tmp_path / "both.safetensors", expert="low", name="again")
    unload_lora(pipe)
    assert torch.equal(run(first), plain[0]) and torch.equal(run(second), plain[1])


@pytest.mark.parametrize("convention", ["musubi", "ComfyUI", "diffusers, flattened"])
def test_the_image_branch(tmp_path, convention):
    model = make(**IMAGE)
    names = [f"blocks.1.attn2.{leaf}" for leaf in ("add_k_proj", "add_v_proj", "to_q")]
    names += ["condition_embedder.image_embedder.ff.net.0.proj", "condition_embedder.image_embedder.ff.net.2"]
    pairs = factors(model, names)
    path = write(tmp_path / "a.safetensors", pairs, convention)
    report = load_lora(pipe_of(model), path)
    assert report.modules == {"transformer": len(names)} and not report.unmatched
    assert close(run(model), run(merged(model, pairs, 1.0 / RANK)))
    # A text-to-video model has none of it: told, and what is left of the file is used.
    text = make()
    partly = load_lora(pipe_of(text), path)
    assert partly.modules == {"transformer": 1} and len(partly.unmatched) == 4 and "4 modules" in partly.notes[0]


def test_one_that_changes_nothing_is_no_success(tmp_path):
    model = make()
    pairs = {name: (down, torch.zeros_like(up)) for name, (down, up) in factors(model, ["blocks.0.ffn.net.2"]).items()}
    with pytest.raises(ConfigError, match="zero"):
        load_lora(pipe_of(model), write(tmp_path / "a.safetensors", pairs, "ComfyUI"))
    extra = write(tmp_path / "b.safetensors", pairs | factors(model, ["blocks.1.ffn.net.2"]), "ComfyUI")
    report = load_lora(pipe_of(model), extra)
    assert report.modules == {"transformer": 1} and any("zeros" in note for note in report.notes)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "no JSON"), ("[1]", "JSON object"), ('{"use_dora": true}', "DoRA")]
)
def test_settings_of_peft_that_are_wrong(tmp_path, text, message):
    pairs = factors(make(), ["blocks.0.ffn.net.2"])
    write(tmp_path / "adapter_model.safetensors", pairs, "PEFT of native names")
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_lora(pipe_of(make()), tmp_path)


def test_alpha_of_single_modules_in_peft(tmp_path):
    model = make()
    names = ["blocks.0.attn1.to_q", "blocks.1.attn1.to_q"]
    pairs = factors(model, names)
    write(tmp_path / "adapter_model.safetensors", pairs, "PEFT of a pipeline")
    settings = {"lora_alpha": 2 * RANK, "alpha_pattern": {"blocks.1.attn1.to_q": RANK}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    load_lora(pipe_of(model), tmp_path)
    wanted = merged(merged(model, {names[0]: pairs[names[0]]}, 2.0), {names[1]: pairs[names[1]]})
    assert close(run(model), run(wanted))
