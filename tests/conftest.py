"""Shared by all tests: few threads, and one untrained pipeline whose denoiser does something."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Read when Triton is imported, which diffusers does, and the folders' own conftest files import that: from there
    # on kernels run on the CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config):
    """Two threads unless VIDEOSPARK_TEST_THREADS says otherwise: tiny tensors get slower with more."""
    torch.set_num_threads(int(os.environ.get("VIDEOSPARK_TEST_THREADS", "2")))


@pytest.fixture
def tiny_pipeline():
    """A seeded random-weight tiny Wan pipeline; its output layer is re-initialised, since zeros would hide all."""
    from videospark.tiny.components import build_pipeline

    torch.manual_seed(0)
    pipe = build_pipeline()
    torch.nn.init.normal_(pipe.transformer.proj_out.weight, std=0.05)
    pipe.set_progress_bar_config(disable=True)
    return pipe
