"""An untrained tiny pipeline on disk: small enough that a clip takes a second."""

from __future__ import annotations

import json

import pytest

DEFAULTS = {
    "height": 64,
    "width": 64,
    "num_frames": 5,
    "fps": 8,
    "num_inference_steps": 2,
    "guidance_scale": 3.0,
    "max_sequence_length": 32,
}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A saved random pipeline whose denoiser does something (its output layer is not zero)."""
    import torch

    from videospark.tiny.components import build_pipeline

    torch.manual_seed(0)
    pipe = build_pipeline()
    torch.nn.init.normal_(pipe.transformer.proj_out.weight, std=0.05)
    folder = tmp_path_factory.mktemp("model")
    pipe.save_pretrained(folder)
    (folder / "videospark_defaults.json").write_text(json.dumps(DEFAULTS))
    return folder
