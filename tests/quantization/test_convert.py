import copy
import weakref

import pytest
import torch
from torch import nn

from videospark.core.config import ConfigError
from videospark.quantization import QuantizationConfig, quantize_
from videospark.quantization.convert import module_bytes, select_layers, state_of
from videospark.quantization.fused import available_path
from videospark.quantization.linear import QuantizedLinear

from .conftest import build_wan, run_wan, wan_inputs

MODES = ["fp8", "int8", "fp8_weight_only", "int8_weight_only"]


def cosine(actual, wanted):
    return float(nn.functional.cosine_similarity(actual.double().flatten(), wanted.double().flatten(), dim=0))


def block_outputs(transformer, **inputs):
    """Output of each block, fed with what the block before it gave."""
    seen = []
    handles = [block.register_forward_hook(lambda m, a, out: seen.append(out)) for block in transformer.blocks]
    run_wan(transformer, **inputs)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("per_token", [False, True])
def test_blocks_keep_their_direction(mode, dtype, per_token):
    transformer = build_wan().to(dtype)
    inputs = wan_inputs(dtype=dtype, per_token=per_token)
    before = block_outputs(transformer, **inputs)
    quantize_(transformer, QuantizationConfig(mode=mode))
    after = block_outputs(transformer, **inputs)
    assert all(cosine(a, b) >= 0.999 for a, b in zip(after, before, strict=True))
    assert not torch.equal(after[0], before[0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("originals", ["keep", "offload"])
@pytest.mark.parametrize("fused", [False, True])
def test_remove_brings_the_very_same_layers_back(wan, mode, originals, fused):
    before, modules = run_wan(wan), dict(wan.named_modules())
    state = {name: tensor.clone() for name, tensor in wan.state_dict().items()}
    installed = quantize_(wan, QuantizationConfig(mode=mode, originals=originals, fused=fused))
    assert not torch.equal(run_wan(wan), before)
    assert state_of(wan) is installed
    installed.remove()
    installed.remove()
    assert state_of(wan) is None
    now = dict(wan.named_modules())
    assert now.keys() == modules.keys() and all(now[name] is module for name, module in modules.items())
    assert all(torch.equal(tensor, state[name]) for name, tensor in wan.state_dict().items())
    assert torch.equal(run_wan(wan), before)
    assert all("forward" not in block.__dict__ for block in wan.blocks)


def test_a_model_cast_meanwhile_gets_its_layers_back_in_the_new_type(wan):
    installed = quantize_(wan, QuantizationConfig(mode="int8"))
    wan.to(torch.bfloat16)
    assert wan.blocks[0].attn1.to_q.weight.dtype == torch.int8
    run_wan(wan, **wan_inputs(dtype=torch.bfloat16))
    installed.remove()
    assert wan.blocks[0].attn1.to_q.weight.dtype == torch.bfloat16
    assert torch.isfinite(run_wan(wan, **wan_inputs(dtype=torch.bfloat16))).all()


def test_the_ten_products_of_every_block_and_no_other(wan):
    installed = quantize_(wan, QuantizationConfig(mode="fp8"))
    changed = {name for name, module in wan.named_modules() if isinstance(module, QuantizedLinear)}
    assert len(changed) == 20 and changed == set(installed.replaced)
    assert all(name.startswith("blocks.") for name in changed)
    assert isinstance(wan.condition_embedder.time_proj, nn.Linear)


@pytest.mark.parametrize("originals,waiting", [("keep", True), ("offload", True), ("drop", False)])
def test_the_report_counts_bytes(wan, originals, waiting):
    before = module_bytes(wan)
    layers = select_layers(wan, QuantizationConfig(mode="int8"))
    weights = sum(layer.weight.numel() for layer in layers.values())
    outputs = sum(layer.out_features for layer in layers.values())
    originals_bytes = sum(module_bytes(layer) for layer in layers.values())
    installed = quantize_(wan, QuantizationConfig(mode="int8", originals=originals))
    report = installed.report()
    assert report.bytes_before == before
    # Float32 weights become one byte each, with four bytes of scale per output.
    assert report.bytes_after == before - 3 * weights + 4 * outputs
    assert report.bytes_originals == (originals_bytes if waiting else 0)
    assert report.num_quantized == 20 and "int_mm" in report.engine
    data = report.to_dict()
    assert data["config"]["mode"] == "int8" and len(data["layers"]) == 20
    row = next(row for row in data["layers"] if row["layer"] == "blocks.1.ffn.net.2")
    assert (row["inputs"], row["outputs"], row["status"]) == (160, 64, "quantized")
    assert "int8: 20 of 20" in str(report) and "MiB" in str(report)


def test_dropped_originals_cannot_come_back(wan):
    installed = quantize_(wan, QuantizationConfig(mode="int8", originals="drop"))
    assert not installed.has_originals and any("cannot be undone" in note for note in installed.report().notes)
    with pytest.raises(ConfigError, match="originals"):
        installed.remove()
    with pytest.raises(ConfigError, match="dropped"), installed.suspended():
        pass
    run_wan(wan)


def test_fp8_storage_is_at_most_55_percent_of_bfloat16():
    # Shapes only: on the meta device no memory is touched.
    from accelerate import init_empty_weights
    from diffusers import WanTransformer3DModel

    with init_empty_weights():
        wan = WanTransformer3DModel(num_attention_heads=12, attention_head_dim=128, ffn_dim=8960, num_layers=30)
    wan.to(torch.bfloat16)
    before = module_bytes(wan)
    config = QuantizationConfig(mode="fp8")
    for name, linear in select_layers(wan, config).items():
        parent, _, leaf = name.rpartition(".")
        made = QuantizedLinear(
            linear.in_features, linear.out_features, config, bias=True, dtype=torch.bfloat16, device="meta"
        )
        wan.get_submodule(parent)._modules[leaf] = made
    assert module_bytes(wan) <= 0.55 * before


def test_sizes_that_16_does_not_divide_are_kept_and_said():
    wan = build_wan(num_attention_heads=2, attention_head_dim=36, ffn_dim=96)
    before = run_wan(wan)
    with pytest.raises(ConfigError, match=r"include.*72 inputs, which is no multiple of 16"):
        quantize_(wan, QuantizationConfig(mode="fp8"))
    assert torch.equal(run_wan(wan), before) and state_of(wan) is None
    installed = quantize_(wan, QuantizationConfig(mode="fp8", engine="reference"))
    assert installed.report().num_quantized == 20 and cosine(run_wan(wan), before) > 0.99


def test_mixed_sizes_quantize_what_can_be():
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(30, 32)})
    installed = quantize_(model, QuantizationConfig(mode="int8", include=("a", "b"), exclude=()))
    rows = {row["layer"]: row["status"] for row in installed.report().layers}
    assert rows == {"a": "quantized", "b": "kept"}
    assert "kept b: 30 inputs" in str(installed.report())


@pytest.mark.parametrize("fused", [False, True])
def test_steps_in_high_precision_are_bit_identical(wan, fused):
    before = run_wan(wan)
    config = QuantizationConfig(mode="int8", high_precision_steps=(0, 3), originals="keep", fused=fused)
    installed = quantize_(wan, config)
    with pytest.raises(RuntimeError, match="set_step"):
        run_wan(wan)
    outputs = []
    for step in range(4):
        installed.set_step(step)
        outputs.append(run_wan(wan))
    exact = (lambda out: torch.allclose(out, before, atol=1e-5)) if fused else (lambda out: torch.equal(out, before))
    assert [exact(out) for out in outputs] == [True, False, False, True]
    with pytest.raises(ConfigError, match="step"):
        installed.set_step(-1)


def test_originals_are_in_place_while_suspended(wan):
    wanted = {name: tensor.clone() for name, tensor in wan.state_dict().items()}
    installed = quantize_(wan, QuantizationConfig(mode="int8"))
    quantized = run_wan(wan)
    with installed.suspended():
        saved = wan.state_dict()
        assert saved.keys() == wanted.keys() and all(torch.equal(saved[name], wanted[name]) for name in wanted)
    assert torch.equal(run_wan(wan), quantized)


def test_queries_keys_and_values_share_one_quantization(wan, monkeypatch):
    installed = quantize_(wan, QuantizationConfig(mode="int8"))
    calls = []
    original = QuantizedLinear.quantize_input
    monkeypatch.setattr(
        QuantizedLinear, "quantize_input", lambda self, *a: (calls.append(self.layer_name), original(self, *a))[1]
    )
    run_wan(wan)
    # Per block: q, k, v together; two outputs, the cross queries, two of the feed-forward; the text once for all.
    assert len(calls) == 2 * 6 + 1
    assert installed.replaced["blocks.0.attn2.to_k"].shared is installed.replaced["blocks.1.attn2.to_v"].shared


def test_quantizing_again_is_refused(wan):
    quantize_(wan, QuantizationConfig(mode="int8"))
    with pytest.raises(ConfigError, match="remove"):
        quantize_(wan, QuantizationConfig(mode="fp8"))


@pytest.mark.parametrize(
    "change,match",
    [
        ({"include": ("blocks.*.attn9.to_q",)}, "attn9"),
        ({"exclude": ("blocks.*.nothing",)}, "nothing"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error(wan, change, match):
    with pytest.raises(ConfigError, match=match):
        quantize_(wan, QuantizationConfig(mode="int8", **change))
    assert state_of(wan) is None


def test_layers_that_cannot_be_quantized_are_refused_before_anything_changes(wan):
    before, modules = copy.deepcopy(wan.state_dict()), dict(wan.named_modules())
    wan.blocks[1].ffn.net[2].weight[0, 0] = float("nan")
    with pytest.raises(ConfigError, match=r"blocks\.1\.ffn\.net\.2\.weight.*finite"):
        quantize_(wan, QuantizationConfig(mode="int8"))
    wan.blocks[1].ffn.net[2].weight.copy_(before["blocks.1.ffn.net.2.weight"])
    handle = wan.blocks[1].attn2.to_q.register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match=r"blocks\.1\.attn2\.to_q.*wraps"):
        quantize_(wan, QuantizationConfig(mode="int8"))
    handle.remove()
    wan.fuse_qkv_projections()
    with pytest.raises(ConfigError, match="unfuse_qkv_projections"):
        quantize_(wan, QuantizationConfig(mode="int8"))
    wan.unfuse_qkv_projections()
    now = dict(wan.named_modules())
    assert all(now[name] is module for name, module in modules.items())


def test_a_failure_half_way_leaves_the_model_as_it_was(wan, monkeypatch):
    before, modules = run_wan(wan), dict(wan.named_modules())
    original = QuantizedLinear.from_linear.__func__

    def fails(cls, linear, config, **settings):
        if settings["name"] == "blocks.1.ffn.net.2":
            raise RuntimeError("out of memory")
        return original(cls, linear, config, **settings)

    monkeypatch.setattr(QuantizedLinear, "from_linear", classmethod(fails))
    for originals in ("offload", "keep"):
        with pytest.raises(RuntimeError, match="^out of memory"):
            quantize_(wan, QuantizationConfig(mode="int8", originals=originals, fused=True))
        now = dict(wan.named_modules())
        assert all(now[name] is module for name, module in modules.items()) and state_of(wan) is None
        assert torch.equal(run_wan(wan), before)
    with pytest.raises(RuntimeError, match=r"half-way \(out of memory\).*loaded again"):
        quantize_(wan, QuantizationConfig(mode="int8", originals="drop"))


def test_dropped_layers_are_freed_one_by_one(wan, monkeypatch):
    layers = select_layers(wan, QuantizationConfig(mode="int8"))
    references = [weakref.ref(layer) for layer in layers.values()]
    del layers
    alive = []
    original = QuantizedLinear.from_linear.__func__

    def counts(cls, *args, **settings):
        alive.append(sum(reference() is not None for reference in references))
        return original(cls, *args, **settings)

    monkeypatch.setattr(QuantizedLinear, "from_linear", classmethod(counts))
    quantize_(wan, QuantizationConfig(mode="int8", originals="drop"))
    assert alive == list(range(20, 0, -1))


def test_weights_without_data_are_refused():
    model = nn.Sequential(nn.Linear(32, 32, device="meta"))
    with pytest.raises(ConfigError, match="without data"):
        quantize_(model, QuantizationConfig(mode="int8", include=("0",), exclude=()))


def test_mode_none_only_fuses(wan):
    before = run_wan(wan)
    installed = quantize_(wan, QuantizationConfig(fused=True))
    assert installed.report().engine == "none" and installed.report().fused.startswith(available_path("cpu", 64)[0])
    assert torch.allclose(run_wan(wan), before, atol=1e-5) and not installed.replaced
    installed.remove()
    assert torch.equal(run_wan(wan), before)


def test_a_lora_is_named():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.base_layer = nn.Linear(16, 16)

    model = nn.ModuleDict({"to_q": Wrapped()})
    with pytest.raises(ConfigError, match="fuse_lora"):
        quantize_(model, QuantizationConfig(mode="int8", include=("to_q",), exclude=()))
