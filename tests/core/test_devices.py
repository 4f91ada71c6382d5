"""Devices: an absent one is an error, never a silent fallback."""

import json

import pytest
import torch

from videospark.core.config import ConfigError
from videospark.core.devices import default_dtype, describe_device, pick_device


def test_the_default_is_a_device_that_works():
    assert torch.ones(2, device=pick_device(None)).sum().item() == 2
    assert pick_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["toaster", "meta", "cuda:999"])
def test_unusable_devices_are_refused(name):
    with pytest.raises(ConfigError, match=f"device: got '{name}'; must be"):
        pick_device(name)


def test_the_cpu_computes_in_float32_and_is_described():
    device = torch.device("cpu")
    assert default_dtype(device) is torch.float32
    facts = json.loads(json.dumps(describe_device(device)))
    assert facts["type"] == "cpu"
    assert facts["torch"] == torch.__version__


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_is_described():
    facts = describe_device(pick_device("cuda"))
    assert facts["memory_gib"] > 0
    assert facts["name"]
