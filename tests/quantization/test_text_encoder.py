import pytest
import torch

from videospark.core.config import ConfigError
from videospark.core.numerics import relative_error
from videospark.quantization import quantize_text_encoder_
from videospark.quantization.convert import module_bytes
from videospark.tiny.components import build_text_encoder


@torch.no_grad()
def encode(encoder):
    tokens = torch.arange(24).reshape(2, 12)
    mask = torch.ones_like(tokens)
    mask[1, 7:] = 0
    return encoder(tokens, attention_mask=mask).last_hidden_state


def encoder(dtype=torch.float32):
    torch.manual_seed(0)
    return build_text_encoder().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_hardly_change_and_the_way_back_is_exact(dtype):
    model = encoder(dtype)
    before, size = encode(model), module_bytes(model)
    installed = quantize_text_encoder_(model)
    after = encode(model)
    assert after.dtype == dtype and 0 < relative_error(after, before) < 0.02
    report = installed.report()
    # Seven products in each of the two layers.
    assert report.num_quantized == 14 and report.bytes_after == module_bytes(model) < size
    installed.remove()
    assert torch.equal(encode(model), before)


def test_memory_of_dropped_layers_is_gone():
    model = encoder(torch.bfloat16)
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    outputs = sum(m.out_features for m in model.modules() if isinstance(m, torch.nn.Linear))
    size = module_bytes(model)
    installed = quantize_text_encoder_(model, originals="drop")
    assert module_bytes(model) == size - linear + 4 * outputs
    assert installed.report().bytes_originals == 0


def test_other_models_are_refused():
    with pytest.raises(ConfigError, match="text_encoder"):
        quantize_text_encoder_(torch.nn.Linear(4, 4))
    model = encoder()
    quantize_text_encoder_(model)
    with pytest.raises(ConfigError, match="remove"):
        quantize_text_encoder_(model)
