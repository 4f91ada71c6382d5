import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from videospark.core.config import ConfigError
from videospark.quantization import (
    QuantizationConfig,
    load_quantized_transformer,
    quantize_,
    save_quantized_transformer,
)
from videospark.quantization.convert import module_bytes, select_layers, state_of
from videospark.quantization.loading import QUANTIZED_FILE
from videospark.quantization.primitives import quantize_rows

from .conftest import build_wan, run_wan, wan_inputs

NATIVE = {
    "attn1.to_q": "self_attn.q", "attn1.to_k": "self_attn.k", "attn1.to_v": "self_attn.v",
    "attn1.to_out.0": "self_attn.o", "attn1.norm_q": "self_attn.norm_q", "attn1.norm_k": "self_attn.norm_k",
    "attn2.to_q": "cross_attn.q", "attn2.to_k": "cross_attn.k", "attn2.to_v": "cross_attn.v",
    "attn2.to_out.0": "cross_attn.o", "attn2.norm_q": "cross_attn.norm_q", "attn2.norm_k": "cross_attn.norm_k",
    "norm2": "norm3", "ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_proj": "time_projection.1", "proj_out": "head.head",
}  # fmt: skip


def native_name(name):
    """The name of a tensor in Wan's own files."""
    if name == "scale_shift_table":
        return "head.modulation"
    if name.endswith(".scale_shift_table"):
        return name.replace("scale_shift_table", "modulation")
    layer, _, leaf = name.rpartition(".")
    head, block = ".".join(layer.split(".")[:2]), ".".join(layer.split(".")[2:])
    if layer.startswith("blocks."):
        return f"{head}.{NATIVE[block]}.{leaf}"
    return f"{NATIVE.get(layer, layer)}.{leaf}"


def same_state(left, right):
    left, right = left.state_dict(), right.state_dict()
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert torch.equal(left[name].contiguous().view(torch.uint8), right[name].contiguous().view(torch.uint8)), name
    return True


def float_wan():
    """As diffusers loads it in bfloat16: some parts stay in float32."""
    wan = build_wan()
    keep = wan._keep_in_fp32_modules
    for name, parameter in wan.named_parameters():
        if not any(part in name.split(".") for part in keep):
            parameter.data = parameter.data.bfloat16()
    return wan


INPUTS = {"dtype": torch.bfloat16}
MODES = ["fp8", "int8", "fp8_weight_only", "int8_weight_only"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_save_and_load_are_bit_equal(tmp_path, mode, granularity):
    wan, config = float_wan(), QuantizationConfig(mode=mode, granularity=granularity)
    quantize_(wan, config)
    wanted = run_wan(wan, **wan_inputs(**INPUTS))
    path = save_quantized_transformer(wan, tmp_path)
    assert path == tmp_path / QUANTIZED_FILE and sorted(p.name for p in tmp_path.iterdir()) == [
        "config.json", QUANTIZED_FILE
    ]  # fmt: skip
    again, installed = load_quantized_transformer(tmp_path, config)
    assert same_state(again, wan) and state_of(again) is installed
    assert torch.equal(run_wan(again, **wan_inputs(**INPUTS)), wanted)
    assert installed.report().num_quantized == 20 and not installed.has_originals
    with pytest.raises(ConfigError, match="originals"):
        installed.remove()


CHILD = """
import sys, torch
from videospark.quantization import QuantizationConfig, load_quantized_transformer
from safetensors.torch import load_file, save_file
torch.set_num_threads(int(sys.argv[3]))
wan, _ = load_quantized_transformer(sys.argv[1], QuantizationConfig(mode="fp8", fused=True))
inputs = load_file(sys.argv[2])
with torch.no_grad():
    out = wan(**inputs, return_dict=False)[0]
save_file({"out": out.contiguous()}, sys.argv[2] + ".out")
"""


def test_another_process_gets_the_same_bits(tmp_path):
    wan, inputs = float_wan(), wan_inputs(**INPUTS)
    quantize_(wan, QuantizationConfig(mode="fp8", fused=True))
    save_quantized_transformer(wan, tmp_path)
    file = tmp_path / "inputs.bin"
    save_file(inputs, file)
    threads = str(torch.get_num_threads())
    done = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path), str(file), threads], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    assert torch.equal(load_file(f"{file}.out")["out"], run_wan(wan, **inputs))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sharded", [False, True])
def test_reading_block_by_block_equals_quantizing_the_whole(tmp_path, mode, sharded):
    wan, config = float_wan(), QuantizationConfig(mode=mode)
    wan.save_pretrained(tmp_path, max_shard_size="60KB" if sharded else "10GB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or not sharded
    before = module_bytes(wan)
    streamed, installed = load_quantized_transformer(tmp_path, config)
    quantize_(wan, config)
    assert same_state(streamed, wan)
    assert torch.equal(run_wan(streamed, **wan_inputs(**INPUTS)), run_wan(wan, **wan_inputs(**INPUTS)))
    report = installed.report()
    assert report.bytes_before == before and report.bytes_after == module_bytes(wan)
    if sharded:
        sorted(tmp_path.glob("*.safetensors"))[1].unlink()
        with pytest.raises(ConfigError, match="complete"):
            load_quantized_transformer(tmp_path, config)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_files_with_the_names_of_wan(tmp_path, prefix):
    wan, config = float_wan(), QuantizationConfig(mode="fp8")
    wan.save_config(tmp_path)
    names = [native_name(name) for name in wan.state_dict()]
    assert len(set(names)) == len(names) and "blocks.1.self_attn.o.weight" in names
    file = tmp_path / "native.safetensors"
    save_file({prefix + native_name(n): t.contiguous() for n, t in wan.state_dict().items()}, file)
    streamed, _ = load_quantized_transformer(tmp_path, config, weights=file)
    quantize_(wan, config)
    assert same_state(streamed, wan)


def prescaled(wan, tmp_path, scale_name, per_row, *, everything=False, dtype=torch.float8_e4m3fn, static=False):
    """A file as others make them: eight-bit weights with their scales beside them, under Wan's names."""
    number = "int8" if dtype == torch.int8 else "fp8"
    layers = select_layers(wan, QuantizationConfig(mode=number))
    if everything:
        layers["condition_embedder.time_proj"] = wan.condition_embedder.time_proj
    tensors = {"scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn)} if number == "fp8" else {}
    for name, tensor in wan.state_dict().items():
        layer = name.rpartition(".")[0]
        if not (name.endswith(".weight") and layer in layers):
            tensors[native_name(name)] = tensor.contiguous()
            continue
        rows = quantize_rows(tensor, number, "row" if per_row else "tensor")
        tensors[native_name(name)] = rows.values.to(dtype) if number == "fp8" else rows.values
        if scale_name is not None:
            place = native_name(f"{layer}.weight").removesuffix("weight")
            tensors[place + scale_name] = rows.scale if per_row else rows.scale.reshape(())
            if static:
                tensors[place + "scale_input"] = torch.ones(())
    wan.save_config(tmp_path)
    file = tmp_path / "prescaled.safetensors"
    save_file(tensors, file)
    return file


@pytest.mark.parametrize("scale_name", ["scale_weight", "weight_scale"])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("number", ["fp8", "int8"])
def test_foreign_scales_are_read(tmp_path, scale_name, per_row, number):
    wan = float_wan()
    dtype = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}[number]
    file = prescaled(wan, tmp_path, scale_name, per_row, static=True, dtype=dtype)
    granularity = "row" if per_row else "tensor"
    loaded, installed = load_quantized_transformer(
        tmp_path, QuantizationConfig(mode=number, granularity=granularity), weights=file
    )
    quantize_(wan, QuantizationConfig(mode=number, granularity=granularity))
    assert same_state(loaded, wan)
    assert any("20 static activation scales" in note for note in installed.report().notes)
    if not per_row:
        # One scale for all rows is also a scale for every row.
        again, _ = load_quantized_transformer(tmp_path, QuantizationConfig(mode=number), weights=file)
        assert again.blocks[0].attn1.to_q.weight_scale.shape == (64, 1)
        assert torch.equal(
            again.blocks[0].attn1.to_q.weight_scale, loaded.blocks[0].attn1.to_q.weight_scale.expand(64, 1)
        )


def test_layers_that_stay_are_widened_with_their_scale(tmp_path):
    wan = float_wan()
    wanted = wan.condition_embedder.time_proj.weight.clone()
    file = prescaled(wan, tmp_path, "scale_weight", False, everything=True)
    loaded, installed = load_quantized_transformer(tmp_path, QuantizationConfig(mode="fp8"), weights=file)
    actual = loaded.condition_embedder.time_proj.weight
    assert actual.dtype == wanted.dtype and torch.allclose(actual.float(), wanted.float(), rtol=0.1, atol=2e-3)
    assert any("widened" in note for note in installed.report().notes)


def test_eight_bits_without_scales_are_refused(tmp_path):
    file = prescaled(float_wan(), tmp_path, None, True)
    with pytest.raises(ConfigError, match=r"blocks\.0\.attn1\.to_\w\.weight.*scale_weight"):
        load_quantized_transformer(tmp_path, QuantizationConfig(mode="fp8"), weights=file)


@pytest.mark.parametrize("stored,mode", [("e5m2", "fp8"), ("e4m3", "int8")])
def test_other_eight_bit_numbers_are_refused(tmp_path, stored, mode):
    dtype = {"e5m2": torch.float8_e5m2, "e4m3": torch.float8_e4m3fn}[stored]
    file = prescaled(float_wan(), tmp_path, "weight_scale", True, dtype=dtype)
    with pytest.raises(ConfigError, match="not converted"):
        load_quantized_transformer(tmp_path, QuantizationConfig(mode=mode), weights=file)


def test_row_scales_do_not_fit_one_scale(tmp_path):
    file = prescaled(float_wan(), tmp_path, "weight_scale", True)
    with pytest.raises(ConfigError, match="granularity"):
        load_quantized_transformer(tmp_path, QuantizationConfig(mode="fp8", granularity="tensor"), weights=file)


@pytest.mark.parametrize(
    "change",
    [{"mode": "int8"}, {"granularity": "tensor"}, {"exclude": ("blocks.*.ffn.net.2",)}, {"hot_channels": 2}],
)
def test_settings_that_contradict_the_file_are_refused(tmp_path, change):
    wan = float_wan()
    quantize_(wan, QuantizationConfig(mode="fp8"))
    save_quantized_transformer(wan, tmp_path)
    settings = {"mode": "fp8"} | change
    with pytest.raises(ConfigError, match=f"^{next(iter(change))}: got.*made with"):
        load_quantized_transformer(tmp_path, QuantizationConfig(**settings))
    load_quantized_transformer(tmp_path, QuantizationConfig(mode="fp8", engine="reference", fused=True))


def test_hot_channels_are_saved_too(tmp_path):
    wan, config = float_wan(), QuantizationConfig(mode="int8", hot_channels=3)
    quantize_(wan, config, hot_channels={"blocks.0.ffn.net.2": [5, 70], "blocks.1.attn1.to_q": [1]})
    save_quantized_transformer(wan, tmp_path)
    again, _ = load_quantized_transformer(tmp_path, config)
    assert same_state(again, wan)
    assert again.blocks[0].ffn.net[2].hot_index.tolist() == [5, 70]
    streamed_from = tmp_path / "plain"
    float_wan().save_pretrained(streamed_from)
    hot = {"blocks.0.ffn.net.2": [5, 70], "blocks.1.attn1.to_q": [1]}
    streamed, _ = load_quantized_transformer(streamed_from, config, hot_channels=hot)
    assert same_state(streamed, wan)


@pytest.mark.parametrize("defect", ["missing", "unknown", "shape"])
def test_files_that_do_not_fit_are_refused(tmp_path, defect):
    wan = float_wan()
    wan.save_config(tmp_path)
    tensors = {name: tensor.contiguous() for name, tensor in wan.state_dict().items()}
    name = "blocks.1.attn2.to_k.weight"
    if defect == "missing":
        del tensors[name]
    elif defect == "unknown":
        tensors["blocks.9.attn2.to_k.weight"] = tensors[name].clone()
    else:
        tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, tmp_path / "diffusion_pytorch_model.safetensors")
    match = {"missing": "missing", "unknown": r"blocks\.9\.attn2", "shape": r"blocks\.1\.attn2\.to_k\.weight"}[defect]
    with pytest.raises(ConfigError, match=match):
        load_quantized_transformer(tmp_path, QuantizationConfig(mode="int8"))


def test_what_cannot_be_loaded_or_saved_says_so(tmp_path):
    wan = float_wan()
    with pytest.raises(ConfigError, match="not quantized"):
        save_quantized_transformer(wan, tmp_path)
    wan.save_config(tmp_path)
    with pytest.raises(FileNotFoundError, match="diffusion_pytorch_model"):
        load_quantized_transformer(tmp_path, QuantizationConfig(mode="int8"))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_quantized_transformer(tmp_path, QuantizationConfig(mode="int8"), weights=tmp_path / "nowhere.safetensors")
    with pytest.raises(ConfigError, match="safetensors"):
        load_quantized_transformer(tmp_path, QuantizationConfig(mode="int8"), weights=tmp_path / "model.ckpt")
    with pytest.raises(ConfigError, match="mode"):
        load_quantized_transformer(tmp_path, QuantizationConfig())
    steps = QuantizationConfig(mode="int8", high_precision_steps=(0,), originals="keep")
    with pytest.raises(ConfigError, match="high_precision_steps"):
        load_quantized_transformer(tmp_path, steps)
    with pytest.raises(ConfigError, match="engine"):
        load_quantized_transformer(tmp_path, QuantizationConfig(mode="int8", engine="torchao"))
    quantize_(wan, steps)
    with pytest.raises(ConfigError, match="high_precision_steps"):
        save_quantized_transformer(wan, tmp_path)


def test_an_interrupted_save_leaves_nothing_behind(tmp_path, monkeypatch):
    wan = float_wan()
    quantize_(wan, QuantizationConfig(mode="int8"))
    save_quantized_transformer(wan, tmp_path)
    before = (tmp_path / QUANTIZED_FILE).read_bytes()

    def stops(*_):
        raise OSError("disk full")

    monkeypatch.setattr("videospark.quantization.loading.os.replace", stops)
    with pytest.raises(OSError, match="disk full"):
        save_quantized_transformer(wan, tmp_path)
    assert (tmp_path / QUANTIZED_FILE).read_bytes() == before
    assert not list(tmp_path.glob(".*"))


def test_the_file_says_how_it_was_made(tmp_path):
    wan = float_wan()
    quantize_(wan, QuantizationConfig(mode="int8", engine="int_mm", fused=True))
    with safe_open(save_quantized_transformer(wan, tmp_path), framework="pt") as handle:
        made = json.loads(handle.metadata()["videospark_quantization"])
    assert made["mode"] == "int8" and "engine" not in made and "fused" not in made
    # diffusers must not take eight-bit numbers for weights.
    with pytest.raises(OSError):  # noqa: PT011 - the message is not ours
        type(wan).from_pretrained(tmp_path)


PEAK = """
import sys, torch, videospark.quantization.loading, diffusers, accelerate
from diffusers import WanTransformer3DModel
from videospark.quantization import QuantizationConfig, load_quantized_transformer
from videospark.quantization.convert import module_bytes

def kib(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

load_quantized_transformer(sys.argv[2], QuantizationConfig(mode="fp8"))  # what the first call imports is no model
open("/proc/self/clear_refs", "w").write("5")
before = kib("VmRSS")
wan, _ = load_quantized_transformer(sys.argv[1], QuantizationConfig(mode="fp8"))
print((kib("VmHWM") - before) * 1024, module_bytes(wan), module_bytes(wan.blocks[0]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux")
def test_loading_holds_at_most_two_blocks_beside_the_small_model(tmp_path):
    torch.set_default_dtype(torch.bfloat16)
    try:
        wan = build_wan(num_attention_heads=12, attention_head_dim=128, ffn_dim=8960, num_layers=6, text_dim=4096)
    finally:
        torch.set_default_dtype(torch.float32)
    wan.save_pretrained(tmp_path)
    build_wan().save_pretrained(tmp_path / "small")
    block = module_bytes(wan.blocks[0])
    folders = [str(tmp_path), str(tmp_path / "small")]
    done = subprocess.run([sys.executable, "-c", PEAK, *folders], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    peak, model, _ = (int(number) for number in done.stdout.split())
    assert model < 0.6 * module_bytes(wan)
    assert peak <= model + 2 * block, (peak / 2**20, model / 2**20, block / 2**20)
