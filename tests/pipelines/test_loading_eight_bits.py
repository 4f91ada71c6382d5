"""Loading for quantization: the device never sees the whole in 16 bits, and eight-bit files load as such."""

import pytest
import torch
from diffusers import DiffusionPipeline

from videospark.core.config import ConfigError
from videospark.pipelines import loading
from videospark.pipelines.acceleration import accelerate, current_report
from videospark.pipelines.generation import GenerationRequest, generate
from videospark.pipelines.loading import load, save
from videospark.quantization.config import QuantizationConfig
from videospark.quantization.convert import quantize_, state_of
from videospark.quantization.loading import QUANTIZED_FILE, save_quantized_transformer

from .conftest import DEFAULTS

REQUEST = GenerationRequest("a red circle", height=32, width=32, num_frames=5, seed=3)


def recipe(**quantization):
    return {"name": "small", "quantization": {"mode": "int8", "fused": True, **quantization}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, _shared_pipe):
    _shared_pipe.videospark_defaults = dict(DEFAULTS)
    return save(_shared_pipe, tmp_path_factory.mktemp("eight") / "model")


@pytest.fixture
def moves(monkeypatch):
    """What `DiffusionPipeline.to` was asked to move: whether the denoiser was in eight bits by then."""
    seen, to = [], DiffusionPipeline.to

    def watched(pipe, *arguments, **settings):
        seen.append(state_of(pipe.transformer) is not None)
        return to(pipe, *arguments, **settings)

    monkeypatch.setattr(DiffusionPipeline, "to", watched)
    return seen


def clip(pipe):
    pipe.set_progress_bar_config(disable=True)
    return generate(pipe, REQUEST).frames


def test_quantized_in_ram_before_anything_moves(folder, moves):
    pipe = load(folder, device="cpu", recipe=recipe())
    assert moves == [True]
    stock = load(folder, device="cpu", recipe="dense")
    assert moves[1:] == [False]
    accelerate_in_place(stock, recipe())
    assert (clip(stock) == clip(pipe)).all()


def accelerate_in_place(pipe, chosen):
    from videospark.pipelines.acceleration import restore

    restore(pipe)
    accelerate(pipe, chosen)


def test_dropped_originals_are_never_read_as_a_whole(folder, moves, monkeypatch):
    read, by_block = [], loading.load_quantized_transformer

    def watched(place, *arguments, **settings):
        read.append(place.name)
        return by_block(place, *arguments, **settings)

    monkeypatch.setattr(loading, "load_quantized_transformer", watched)
    pipe = load(folder, device="cpu", recipe=recipe(originals="drop"))
    assert read == ["transformer"] and moves == [True]
    wanted = load(folder, device="cpu", recipe=recipe())
    assert read == ["transformer"]
    assert (clip(pipe) == clip(wanted)).all()
    report = current_report(pipe).quantization["transformer"]
    assert report["bytes_originals"] == 0 and report["num_quantized"] == 60


def test_a_model_that_is_stored_in_eight_bits(folder, tmp_path):
    pipe = load(folder, device="cpu")
    wanted = load(folder, device="cpu", recipe=recipe())
    save(pipe, tmp_path / "model")
    quantize_(pipe.transformer, QuantizationConfig(mode="int8", fused=True, originals="drop"))
    save_quantized_transformer(pipe.transformer, tmp_path / "model" / "transformer")
    for file in (tmp_path / "model" / "transformer").glob("diffusion_pytorch_model*"):
        file.unlink()
    assert (tmp_path / "model" / "transformer" / QUANTIZED_FILE).is_file()
    assert (clip(load(tmp_path / "model", device="cpu", recipe=recipe())) == clip(wanted)).all()
    for other in (None, "dense"):
        with pytest.raises(ConfigError, match="stored in eight bits"):
            load(tmp_path / "model", device="cpu", recipe=other)
    with pytest.raises(ConfigError, match="mode"):
        load(tmp_path / "model", device="cpu", recipe=recipe(mode="fp8"))


def test_what_is_wrong_with_a_recipe_is_said_before_weights_are_read(folder, monkeypatch):
    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", lambda *_, **__: pytest.fail("read the weights"))
    with pytest.raises(ConfigError, match="no-such"):
        load(folder, device="cpu", recipe="no-such")


def test_bfloat16_weights_stay_the_same_under_either_way(folder):
    for originals in ("offload", "drop"):
        pipe = load(folder, device="cpu", dtype=torch.bfloat16, recipe=recipe(originals=originals, fused=False))
        if originals == "offload":
            wanted = {name: tensor.clone() for name, tensor in pipe.transformer.state_dict().items()}
        else:
            found = pipe.transformer.state_dict()
            assert found.keys() == wanted.keys()
            assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())
