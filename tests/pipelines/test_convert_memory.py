"""A conversion holds a few tensors at a time, never the file; measured on processes of their own.

Memory is taken to be what the largest tensors of Wan 14B need, which are in the files here, and the same for files of
any length: twice as many blocks must not take more.
"""

import subprocess
import sys

import pytest
import torch

_CODE = """
import resource, sys
from videospark.pipelines.convert import convert_checkpoint
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
convert_checkpoint(sys.argv[1], sys.argv[2], dtype="bfloat16")
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(after - before, after)
"""
WIDTH, FFN = 5120, 13824
LIMIT = 4 * 2**30
SLACK = 192 * 2**20
"""Of the system's accounting, which counts pages of mapped files by chunks."""


def write_file(path, layers):
    """A file of Wan 14B's widths with so many blocks: zeros, which weigh as much as any other numbers."""
    from diffusers import WanTransformer3DModel
    from safetensors.torch import save_file

    with torch.device("meta"):
        model = WanTransformer3DModel(num_attention_heads=WIDTH // 128, ffn_dim=FFN, num_layers=layers)
    state = {name: torch.zeros(tensor.shape, dtype=torch.bfloat16) for name, tensor in model.state_dict().items()}
    if "fp8" in path.name:
        for name in [name for name in state if name.startswith("blocks.") and state[name].ndim == 2]:
            state[name] = state[name].to(torch.float8_e4m3fn)
            state[f"{name}_scale"] = torch.ones(len(state[name]), 1)
    torch.save(state, path) if path.suffix == ".pth" else save_file(state, path)
    return path.stat().st_size


def convert(source, target):
    ran = subprocess.run(
        [sys.executable, "-c", _CODE, str(source), str(target)], capture_output=True, text=True, check=True
    )
    return [int(text) for text in ran.stdout.split()[-2:]]


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".pth", ".safetensors", "-fp8.safetensors"])
def test_memory_does_not_grow_with_the_file(tmp_path, suffix):
    """Also of eight-bit weights, which are widened one by one in float32."""
    grown, sizes = {}, {}
    for layers in (1, 3):
        source = tmp_path / f"model{layers}{suffix}"
        sizes[layers] = write_file(source, layers)
        grown[layers], peak = convert(source, tmp_path / f"out{layers}")
        assert peak < LIMIT, f"{layers} blocks: {peak / 2**30:.2f} GiB at the peak"
        source.unlink()
    assert sizes[3] - sizes[1] > (0.65e9 if "fp8" in suffix else 1.3e9)
    assert grown[3] < grown[1] + SLACK, {layers: f"{size / 2**20:.0f} MiB" for layers, size in grown.items()}
    # Of the file as it is written, in 16 bits.
    assert grown[3] < sizes[3] * (2 if "fp8" in suffix else 1) / 3
