"""The memory section and the compile switch of a recipe, on the tiny pipeline loaded from files."""

import copy
from dataclasses import replace

import pytest
import torch
from diffusers import WanPipeline
from PIL import Image

from videospark.core.config import ConfigError
from videospark.core.numerics import relative_error
from videospark.pipelines.acceleration import accelerate, current_report, restore
from videospark.pipelines.generation import GenerationRequest, generate
from videospark.pipelines.loading import as_image_to_video, load, save
from videospark.pipelines.memory import MemoryConfig
from videospark.pipelines.prompt_cache import PromptCache, fingerprint, prompt_key
from videospark.quantization.convert import module_bytes
from videospark.quantization.convert import state_of as quantization_of
from videospark.tiny.components import LATENT_CHANNELS

REQUEST = GenerationRequest("a red circle", height=32, width=32, num_frames=5, seed=3)


def recipe(**memory):
    return {"name": "small", "memory": memory}


def quiet(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory, _shared_pipe):
    from videospark.pipelines.loading import save as save_pipe

    target = tmp_path_factory.mktemp("memory") / "model"
    _shared_pipe.videospark_defaults = {
        "height": 64, "width": 64, "num_frames": 5, "fps": 8, "num_inference_steps": 2, "guidance_scale": 2.0,
        "max_sequence_length": 32,
    }  # fmt: skip
    return save_pipe(_shared_pipe, target)


@pytest.fixture
def stored(folder):
    return quiet(load(folder, device="cpu", dtype=torch.float32))


def weights(pipe):
    return {name: tensor.clone() for name, tensor in pipe.text_encoder.state_dict().items()}


def test_a_free_text_encoder_comes_back_for_the_next_prompt_and_for_restore(stored):
    wanted, encoder, before = generate(stored, REQUEST).frames, stored.text_encoder, weights(stored)
    parameters = dict(encoder.named_parameters())
    size = module_bytes(encoder)
    report = accelerate(stored, recipe(text_encoder="free_after_encoding"))
    assert report.memory["text_encoder"]["bytes_after"] is None and module_bytes(encoder) == size
    result = generate(stored, REQUEST)
    assert (result.frames == wanted).all()
    row = result.report["memory"]["text_encoder"]
    assert row["bytes_before"] == size > 0 and row["bytes_after"] == module_bytes(encoder) < size / 100
    # Another prompt, and the stock call, which knows nothing of all this.
    assert (generate(stored, REQUEST).frames == wanted).all() and module_bytes(encoder) < size / 100
    stored(prompt="a red circle", height=32, width=32, num_frames=5, num_inference_steps=1, output_type="latent")
    assert module_bytes(encoder) < size / 100
    restore(stored)
    assert stored.text_encoder is encoder and not encoder._forward_pre_hooks and not encoder._state_dict_pre_hooks
    assert all(parameter is parameters[name] for name, parameter in encoder.named_parameters())
    after = weights(stored)
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


def test_a_free_text_encoder_is_whole_for_siblings_saving_and_inference_mode(stored, tmp_path):
    before = weights(stored)
    accelerate(stored, recipe(text_encoder="free_after_encoding"))
    with torch.inference_mode():
        generate(stored, REQUEST)
        generate(as_image_to_video(stored), REQUEST)
    assert module_bytes(stored.text_encoder) < 1000
    save(stored, tmp_path / "ours")
    WanPipeline.save_pretrained(stored, tmp_path / "stock")
    for name in ("ours", "stock"):
        again = type(stored.text_encoder).from_pretrained(tmp_path / name / "text_encoder").state_dict()
        assert all(torch.equal(again[key], tensor) for key, tensor in before.items())


def test_freeing_is_refused_without_the_same_weights_in_files(pipe, stored, folder):
    with pytest.raises(ConfigError, match="memory.text_encoder.*load"):
        accelerate(pipe, recipe(text_encoder="free_after_encoding"))
    assert current_report(pipe) is None
    with torch.no_grad():
        next(stored.text_encoder.parameters()).add_(1.0)
    with pytest.raises(ConfigError, match="changed since it was loaded"):
        accelerate(stored, recipe(text_encoder="free_after_encoding"))
    assert current_report(stored) is None and module_bytes(stored.text_encoder) > 1000


def test_lost_files_are_named_and_found_again(stored, folder, tmp_path):
    from shutil import copytree, move

    copytree(folder, tmp_path / "model")
    pipe = quiet(load(tmp_path / "model", device="cpu", dtype=torch.float32))
    wanted = generate(pipe, REQUEST).frames
    accelerate(pipe, recipe(text_encoder="free_after_encoding"))
    generate(pipe, REQUEST)
    file = tmp_path / "model" / "text_encoder" / "model.safetensors"
    move(file, tmp_path / "aside")
    with pytest.raises(ConfigError, match="text_encoder.weights.*put it back"):
        generate(pipe, REQUEST)
    with pytest.raises(ConfigError, match="put it back"):
        restore(pipe)
    move(tmp_path / "aside", file)
    restore(pipe)
    assert (generate(pipe, REQUEST).frames == wanted).all() and current_report(pipe) is None


@pytest.mark.parametrize("from_files", [True, False])
@torch.no_grad()
def test_int8_text_encoder_saves_bytes_and_restore_is_bit_identical(pipe, stored, from_files):
    chosen = stored if from_files else pipe
    before, encoder = weights(chosen), chosen.text_encoder
    modules, size = dict(encoder.named_modules()), module_bytes(encoder)
    exact = chosen.encode_prompt("a red circle", do_classifier_free_guidance=False, max_sequence_length=32)[0]
    accelerate(chosen, recipe(text_encoder="int8"))
    rounded = chosen.encode_prompt("a red circle", do_classifier_free_guidance=False, max_sequence_length=32)[0]
    assert 0 < relative_error(rounded, exact) < 0.05
    row = current_report(chosen).memory["text_encoder"]
    assert row["bytes_before"] == size and row["bytes_after"] == module_bytes(encoder) < 0.5 * size
    assert (row["bytes_waiting"] == 0) == from_files == (row["weights_from"] is not None)
    assert bool(current_report(chosen).memory["notes"]) != from_files
    restore(chosen)
    assert all(module is modules[name] for name, module in encoder.named_modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(chosen).items())
    assert quantization_of(encoder) is None


def test_an_int8_pipeline_is_saved_as_it_was_loaded(stored, tmp_path):
    before, denoiser = weights(stored), copy.deepcopy(stored.transformer.state_dict())
    accelerate(stored, {"name": "all", "memory": {"text_encoder": "int8"}, "quantization": {"mode": "int8"}})
    quantized = stored.text_encoder.state_dict()
    save(stored, tmp_path / "again")
    assert stored.text_encoder.state_dict().keys() == quantized.keys()
    again = load(tmp_path / "again", device="cpu", dtype=torch.float32, recipe="dense")
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(again).items())
    assert all(torch.equal(tensor, denoiser[name]) for name, tensor in again.transformer.state_dict().items())


def test_cached_prompts_need_no_text_encoder(stored, tmp_path, monkeypatch):
    wanted = generate(stored, REQUEST).frames
    memory = {"prompt_cache": str(tmp_path / "cache"), "text_encoder": "free_after_encoding"}
    accelerate(stored, recipe(**memory))
    assert (generate(stored, REQUEST).frames == wanted).all()
    first = current_report(stored).memory["prompt_cache"]
    assert (first["hits"], first["misses"], first["remade"], first["entries"]) == (0, 2, 0, 2)
    monkeypatch.setattr(type(stored.text_encoder), "forward", lambda *_, **__: 1 / 0)
    result = generate(stored, REQUEST)
    assert (result.frames == wanted).all() and result.report["memory"]["prompt_cache"]["hits"] == 2
    with pytest.raises(ZeroDivisionError):
        generate(stored, GenerationRequest("a blue square", height=32, width=32, num_frames=5, seed=3))


def test_a_cache_is_used_by_the_next_pipeline_and_not_by_another_model(stored, folder, tmp_path):
    accelerate(stored, recipe(prompt_cache=str(tmp_path)))
    generate(stored, REQUEST)
    restore(stored)
    again = quiet(load(folder, device="cpu", dtype=torch.float32, recipe=recipe(prompt_cache=str(tmp_path))))
    generate(again, REQUEST)
    assert current_report(again).memory["prompt_cache"]["hits"] == 2
    with torch.no_grad():
        next(again.text_encoder.parameters()).add_(1.0)
    generate(again, REQUEST)
    assert current_report(again).memory["prompt_cache"]["misses"] == 2
    restore(again)
    accelerate(again, recipe(prompt_cache=str(tmp_path), text_encoder="int8"))
    generate(again, REQUEST)
    assert current_report(again).memory["prompt_cache"]["hits"] == 0


@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign", "empty"])
def test_broken_entries_warn_and_are_made_again(stored, tmp_path, damage):
    accelerate(stored, recipe(prompt_cache=str(tmp_path)))
    wanted = generate(stored, REQUEST).frames
    entries = sorted(tmp_path.glob("*.safetensors"))
    for path, other in zip(entries, reversed(entries), strict=True):
        data = other.read_bytes() if damage == "foreign" else path.read_bytes()
        changed = {
            "cut": data[: len(data) // 2], "flipped": data[:-1] + bytes([data[-1] ^ 1]), "foreign": data, "empty": b"",
        }[damage]  # fmt: skip
        path.with_suffix(".new").write_bytes(changed)
    for path in entries:
        path.with_suffix(".new").replace(path)
    with pytest.warns(UserWarning, match="is broken and made again"):
        assert (generate(stored, REQUEST).frames == wanted).all()
    assert current_report(stored).memory["prompt_cache"]["remade"] == 2
    assert (generate(stored, REQUEST).frames == wanted).all()
    assert current_report(stored).memory["prompt_cache"]["hits"] == 2
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors"}


def test_keys_tell_everything_apart(pipe):
    identity = fingerprint(pipe.text_encoder)
    variants = [
        (identity, "a red circle", 32, torch.float32),
        ("other", "a red circle", 32, torch.float32),
        (identity, "a red  circle", 32, torch.float32),
        (identity, "a red circle", 16, torch.float32),
        (identity, "a red circle", 32, torch.bfloat16),
    ]
    keys = {prompt_key(name, pipe.tokenizer, text, length, dtype) for name, text, length, dtype in variants}
    assert len(keys) == len(variants)


@pytest.mark.parametrize("rows", [0, 1, 7, 8])
def test_the_cache_keeps_embeddings_bit_for_bit(tmp_path, rows):
    embeds = torch.randn(1, 8, 5).to(torch.bfloat16)
    embeds[:, rows:] = 0
    cache = PromptCache(tmp_path / "new" / "folder")
    cache.put("key", embeds)
    assert torch.equal(cache.get("key", 8, torch.bfloat16), embeds)
    with pytest.warns(UserWarning, match="broken"):
        assert cache.get("key", 8, torch.float32) is None


def test_wrong_settings_name_their_field(pipe, tmp_path):
    for settings, field in (({"text_encoder": "fp8"}, "text_encoder"), ({"prompt_cache": " "}, "prompt_cache")):
        with pytest.raises(ConfigError, match=f"^{field}: got"):
            MemoryConfig(**settings)
        with pytest.raises(ConfigError, match=f"recipe.memory.{field}"):
            accelerate(pipe, recipe(**settings))
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(ConfigError, match="prompt_cache: got"):
            accelerate(pipe, recipe(prompt_cache=str(folder)))
    assert current_report(pipe) is None


def test_vae_switches_are_set_reported_and_put_back(pipe):
    wanted = generate(pipe, REQUEST).frames
    report = accelerate(pipe, recipe(vae_slicing=True, vae_tiling=True))
    assert pipe.vae.use_slicing and pipe.vae.use_tiling and "slicing and tiling" in str(report)
    result = generate(pipe, REQUEST)
    # A video smaller than a tile is decoded as before.
    assert (result.frames == wanted).all()
    vae = result.report["memory"]["vae"]
    assert vae["slicing"] and vae["tiling"] and vae["decode"]["rss_before_bytes"] > 0
    assert vae["decode"]["rss_sampled_peak_bytes"] > 0
    restore(pipe)
    assert not pipe.vae.use_slicing and not pipe.vae.use_tiling
    assert "memory" in accelerate(pipe, "dense").to_dict() and current_report(pipe).memory is None


def test_a_vae_in_bfloat16_comes_back_bit_for_bit(pipe, tmp_path):
    wanted, vae = generate(pipe, REQUEST).frames, pipe.vae
    parameters = dict(vae.named_parameters())
    before = {name: tensor.clone() for name, tensor in vae.state_dict().items()}
    report = accelerate(pipe, recipe(vae_dtype="bfloat16"))
    assert vae.dtype == torch.bfloat16 and "VAE: whole in bfloat16" in str(report)
    assert report.memory["vae"]["dtype"] == "bfloat16"
    assert report.memory["vae"]["bytes_waiting"] == sum(p.numel() * 4 for p in parameters.values())
    assert all(parameter is parameters[name] for name, parameter in vae.named_parameters())
    narrow = generate(pipe, REQUEST).frames
    apart = abs(narrow.astype(float) - wanted.astype(float))
    assert apart.max() > 0 and apart.mean() < 4
    image = Image.new("RGB", (32, 32), "red")
    assert generate(as_image_to_video(pipe), replace(REQUEST, image=image)).frames.shape == wanted.shape
    save(pipe, tmp_path / "saved")
    assert vae.dtype == torch.bfloat16
    stored = type(vae).from_pretrained(tmp_path / "saved" / "vae").state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in stored.items())
    restore(pipe)
    assert all(torch.equal(tensor, before[name]) for name, tensor in vae.state_dict().items())
    assert all(parameter is parameters[name] for name, parameter in vae.named_parameters())
    assert (generate(pipe, REQUEST).frames == wanted).all()
    with pytest.raises(ConfigError, match="vae_dtype: got 'float16'"):
        MemoryConfig(vae_dtype="float16")


def test_tiles_give_nearly_the_same_pixels(pipe):
    torch.manual_seed(0)
    latents = torch.randn(1, LATENT_CHANNELS, 1, 72, 64)
    with torch.no_grad():
        whole = pipe.vae.decode(latents).sample
        accelerate(pipe, recipe(vae_tiling=True))
        tiled = pipe.vae.decode(latents).sample
    assert tiled.shape == whole.shape and 0 < relative_error(tiled, whole) < 0.2


COMPILED = {"backend": "gather", "keep_ratio": 0.5, "block_size_q": 16, "block_size_k": 16}


@pytest.mark.parametrize("changes", [{"compile": "fast"}, {"compile": "default", "quantization": {"fused": True}}])
def test_wrong_compilation_is_refused(pipe, changes):
    with pytest.raises(ConfigError, match="compile: got"):
        accelerate(pipe, {"name": "compiled"} | changes)


def test_compilation_is_undone_where_something_fails(pipe):
    pipe.transformer.blocks[-1].compile()
    with pytest.raises(ConfigError, match="blocks.5.*compiled"):
        accelerate(pipe, {"name": "compiled", "compile": "default"})
    assert all(block._compiled_call_impl is None for block in pipe.transformer.blocks[:-1])
    assert all("forward" not in module.__dict__ for module in pipe.transformer.modules())
    pipe.transformer.blocks[-1]._compiled_call_impl = None


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"attention": COMPILED | {"branch": "rola"}, "quantization": {"mode": "int8"}},
    ],
    ids=["dense", "sparse-rola-int8"],
)
def test_compiled_blocks_give_the_same_and_leave_no_trace(pipe, extra):
    def run():
        return pipe(
            prompt="a red circle", height=64, width=64, num_frames=5, num_inference_steps=3, guidance_scale=2.0,
            output_type="latent", max_sequence_length=16, generator=torch.Generator().manual_seed(0),
        ).frames  # fmt: skip

    torch.compiler.reset()
    stock = run()
    accelerate(pipe, {"name": "eager"} | extra)
    wanted = run()
    restore(pipe)
    accelerate(pipe, {"name": "compiled", "compile": "default"} | extra)
    row = current_report(pipe).compilation["transformer"]
    assert row["first_clip_extra_seconds"] is None and row["blocks"] == 6 and row["graphs"] == 0
    found = run()
    # int8 rounds what differs by float32 rounding to another step now and then.
    assert relative_error(found, wanted) < (1e-5 if not extra else 0.02)
    row = current_report(pipe).compilation["transformer"]
    # All six blocks share the graphs of one.
    assert 0 < row["graphs"] < 18 and row["first_clip_extra_seconds"] > 0
    assert row["first_forward_seconds"] > row["forward_seconds"] and "blocks compiled" in str(current_report(pipe))
    restore(pipe)
    assert all(block._compiled_call_impl is None for block in pipe.transformer.blocks)
    assert all("forward" not in module.__dict__ for module in pipe.transformer.modules())
    assert torch.equal(run(), stock)


@pytest.mark.slow
def test_loras_come_and_go_under_compiled_blocks(pipe, tmp_path):
    """Compiled code is made anew where hooks come or go: nothing of a LoRA stays in it."""
    from videospark.pipelines.lora import load_lora, set_lora_weight, unload_lora

    from .test_lora import factors, native_alpha, run, write

    torch.compiler.reset()
    path = write(tmp_path / "a.safetensors", factors(pipe.transformer), native_alpha)
    load_lora(pipe, path)
    wanted = run(pipe.transformer)
    unload_lora(pipe)
    stock = run(pipe.transformer)
    accelerate(pipe, {"name": "compiled", "compile": "default"})
    assert relative_error(run(pipe.transformer), stock) < 1e-5
    load_lora(pipe, path)
    assert relative_error(run(pipe.transformer), wanted) < 1e-4 < relative_error(wanted, stock)
    set_lora_weight(pipe, "a", 0.0)
    assert relative_error(run(pipe.transformer), stock) < 1e-5
    unload_lora(pipe)
    assert relative_error(run(pipe.transformer), stock) < 1e-5
    restore(pipe)
    assert torch.equal(run(pipe.transformer), stock)
