"""The run's settings: strict keys, and combinations that make no sense are refused by name."""

import dataclasses

import pytest

from videospark.core.config import ConfigError, from_dict
from videospark.distill.config import DistillConfig

BASE = {"name": "x", "method": "crossdistill", "data": {"path": "d"}, "model": {"sigmas": [0.99, 0.9, 0.7]}}
WARM = {
    "name": "x",
    "method": "sparse_warmup",
    "data": {"path": "d"},
    "attention": {"backend": "gather", "keep_ratio": 0.1},
}


def build(base=BASE, **changes):
    return from_dict(DistillConfig, base | changes)


def test_good_settings_are_taken():
    config = build(crossdistill={"crossover": 3}, pcm={"solver_steps": 20})
    assert config.model.sigmas == (0.99, 0.9, 0.7) and config.pcm.solver_steps == 20
    assert build(WARM).folder == "outputs/distill/x"


@pytest.mark.parametrize(
    "base, changes, message",
    [
        (BASE, {"metod": "pcm"}, "metod: unknown key"),
        (BASE, {"training": {"lr": 1.0}}, "training.lr: unknown key"),
        (BASE, {"method": "gan"}, "method"),
        (BASE, {"crossdistill": {"crossover": 4}}, "crossdistill.crossover: got 4"),
        (BASE, {"crossdistill": {"crossover": -1}}, "crossdistill.crossover"),
        (BASE, {"crossdistill": {"mode": "staged"}}, "crossdistill.staged_steps"),
        (BASE, {"crossdistill": {"crossover": 0, "mode": "staged", "staged_steps": 5}}, "crossdistill.mode"),
        (BASE, {"crossdistill": {"order": "reversed", "coupling": "data"}}, "crossdistill.coupling"),
        (BASE, {"sparse_warmup": {"target": "flow"}}, "sparse_warmup"),
        (BASE, {"model": {"sigmas": [0.7, 0.9]}}, "model.sigmas"),
        (BASE, {"model": {}}, "model.sigmas: got None"),
        (BASE, {"pcm": {"target": "ema"}}, "pcm.target"),
        (BASE, {"dmd": {"stochastic": True}}, "dmd.stochastic"),
        (BASE, {"dmd": {"min_time": 0.99}}, "dmd.min_time"),
        (BASE, {"training": {"trainable": "branch"}}, "training.trainable"),
        (BASE, {"training": {"lora": {"rank": 4}}}, "training.lora"),
        (BASE, {"training": {"ema_decay": 1.0}}, "training.ema_decay"),
        (BASE, {"data": {"path": "d", "image_share": 2.0}}, "data.image_share"),
        (WARM, {"attention": {}}, "attention.backend"),
        (WARM, {"model": {"sigmas": [0.9]}}, "model.sigmas"),
        (WARM, {"sparse_warmup": {"start_keep_ratio": 0.05}}, "sparse_warmup.start_keep_ratio"),
        (WARM, {"pcm": {"solver_steps": 3}}, "pcm"),
        (
            WARM,
            {"sparse_warmup": {"alignment_weight": 1.0}, "training": {"gradient_checkpointing": True}},
            "sparse_warmup.alignment_weight",
        ),
        (WARM, {"attention": {"backend": "gather", "keep_ratio": 0.1, "dense_steps": [0]}}, "attention.dense_steps"),
    ],
)
def test_wrong_settings_are_named(base, changes, message):
    with pytest.raises(ConfigError, match=message):
        build(base, **changes)


def test_the_fingerprint_sees_what_decides_the_numbers_and_nothing_else():
    config = build()
    same = dataclasses.replace(config, name="y", output="elsewhere", description="!")
    longer = dataclasses.replace(same, training=dataclasses.replace(config.training, num_steps=7, log_every=3))
    assert config.fingerprint() == same.fingerprint() == longer.fingerprint()
    assert config.fingerprint() != dataclasses.replace(config, seed=1).fingerprint()
    assert config.fingerprint() != build(crossdistill={"crossover": 2}).fingerprint()
    # The ramp of the keep ratio counts on the length of the run.
    warm = build(WARM)
    other = dataclasses.replace(warm, training=dataclasses.replace(warm.training, num_steps=7))
    assert warm.fingerprint() != other.fingerprint()
