import copy
import warnings

import pytest
import torch

from videospark.tiny.components import build_pipeline, build_scheduler

DEFAULTS = {
    "height": 64, "width": 64, "num_frames": 5, "fps": 8, "num_inference_steps": 2, "guidance_scale": 2.0,
    "max_sequence_length": 32,
}  # fmt: skip


@pytest.fixture(scope="session")
def _shared_pipe():
    torch.manual_seed(0)
    pipe = build_pipeline()
    torch.nn.init.normal_(pipe.transformer.proj_out.weight, std=0.05)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def pipe(_shared_pipe):
    """A random tiny pipeline; whatever a test does to it is undone."""
    from videospark.pipelines.acceleration import restore

    _shared_pipe.scheduler = build_scheduler()
    _shared_pipe.videospark_defaults = dict(DEFAULTS)
    weight = copy.deepcopy(_shared_pipe.transformer.proj_out.weight.data)
    yield _shared_pipe
    restore(_shared_pipe)
    _shared_pipe.transformer.proj_out.weight.data.copy_(weight)


@pytest.fixture(autouse=True)
def _unknown_training_is_no_news():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*needs weights trained.*")
        yield
