"""A conversion holds a tensor at a time, not the file; measured on a process of its own."""

import subprocess
import sys

import pytest
import torch

_CODE = """
import resource, sys
from videospark.pipelines.convert import convert_checkpoint
from videospark.pipelines.stages import resident_bytes
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
convert_checkpoint(sys.argv[1], sys.argv[2], dtype=sys.argv[3])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pth", "safetensors"])
def test_peak_is_far_below_the_file(tmp_path, kind):
    from diffusers import WanTransformer3DModel
    from safetensors.torch import save_file

    settings = {"num_attention_heads": 8, "ffn_dim": 4096, "num_layers": 13, "text_dim": 1024}
    model = WanTransformer3DModel(**settings)
    source = tmp_path / f"model.{kind}"
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save(state, source) if kind == "pth" else save_file(state, source)
    size = source.stat().st_size
    assert size > 800 * 2**20
    del model, state
    ran = subprocess.run(
        [sys.executable, "-c", _CODE, str(source), str(tmp_path / "out"), "bfloat16"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    grown = int(ran.stdout.split()[-1])
    assert grown < size / 3
