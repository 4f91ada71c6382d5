"""Every registered backend passes the suite, and the suite finds each fault that it is there to find."""

import importlib.util
import itertools

import pytest
import torch

from videospark.attention import backends as backends_module
from videospark.attention import register_backend
from videospark.attention.backends import BackendConstraints
from videospark.attention.block_sparse import native
from videospark.attention.block_sparse.choice import choose_blocks
from videospark.attention.block_sparse.reference import reference_attention
from videospark.attention.testing import ConformanceError, check_backend
from videospark.core.config import ConfigError

FEW = {"lengths": (5, 70), "dtypes": ("float32",), "head_dims": (32,), "block_sizes": ((16, 16), (32, 16))}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def needs_triton():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("the package triton is not installed")


@pytest.mark.parametrize("name", ["dense", "reference", "gather"])
def test_backend_conforms(name):
    report = check_backend(name, device=DEVICE)
    assert len(report.findings) > 50 and not report.skipped


def test_native_conforms():
    if native.unavailable():
        pytest.skip(native.unavailable()[0])
    report = check_backend("native", dtypes=("bfloat16",))
    assert len(report.findings) > 20 and not report.skipped


# The interpreter takes its time: without a GPU the short list is the everyday one.
SOME = {"lengths": (5, 65), "head_dims": (32, 64), "block_sizes": ((32, 16), (16, 48), (64, 64))}


@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")
@pytest.mark.parametrize("sizes", [SOME, pytest.param({}, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("name", ["triton", "triton_int8"])
def test_triton_conforms(name, sizes):
    needs_triton()
    # Rounding queries and keys to eight bits costs about a hundredth.
    limit = 0.02 if name == "triton_int8" else None
    report = check_backend(name, device=DEVICE, max_relative_error=limit, **sizes)
    assert len(report.findings) >= 20 and not report.skipped


@pytest.fixture
def backend(monkeypatch):
    """Registers a backend made of a function; it is forgotten after the test."""
    for name in backends_module.available_backends():
        backends_module.get_backend(name)  # a module that is first imported below would be forgotten with the copy
    monkeypatch.setattr(backends_module, "_REGISTERED", dict(backends_module._REGISTERED))

    def register(function, **constraints):
        class Backend:
            def __init__(self):
                self.constraints = BackendConstraints(**constraints)

            def __call__(self, query, key, value, *, context, config):
                return function(query, key, value, context, config)

        register_backend("under test")(Backend)
        return "under test"

    return register


def right(query, key, value, context, config):
    return reference_attention(query, key, value, choose_blocks(query, key, context, config))


def scaled(query, key, value, context, config):
    return right(query, key, value, context, config) * 1.001


def no_gradient_of_keys(query, key, value, context, config):
    return right(query, key.detach(), value, context, config) + 0 * key


def unrecorded(query, key, value, context, config):
    from videospark.attention.context import ForwardContext

    return right(query, key, value, ForwardContext(grid=context.grid), config)


def other_blocks(query, key, value, context, config):
    return right(query.flip(1), key, value, context, config).flip(1)


def reads_behind(query, key, value, context, config):
    longer = value.as_strided((1,), (1,), value.storage_offset() + value.numel() // value.shape[0])
    behind = longer if value.shape[0] * value.stride(0) > value.numel() else torch.zeros(1)
    return right(query, key, value, context, config) + behind


def mixes_heads(query, key, value, context, config):
    return right(query, key, value, context, config) + 1e-3 * value.mean(dim=2, keepdim=True).detach()


def forgets(query, key, value, context, config, calls=itertools.count()):  # noqa: B008
    return right(query, key, value, context, config) * (1 + 0.05 * (next(calls) % 2))


def hides_nan(query, key, value, context, config):
    return torch.nan_to_num(right(query, key, value, context, config))


def wrong_dtype(query, key, value, context, config):
    return right(query, key, value, context, config).double()


def test_a_right_backend_of_a_third_party_passes(backend):
    assert str(check_backend(backend(right), **FEW)).startswith("backend 'under test'")


@pytest.mark.parametrize(
    ("function", "check"),
    [
        (scaled, "FAILED output"),
        (no_gradient_of_keys, "FAILED gradient of key"),
        (unrecorded, "FAILED blocks: records none"),
        (other_blocks, "FAILED blocks"),
        (reads_behind, "FAILED memory around the tokens"),
        (mixes_heads, "FAILED batches and heads"),
        (forgets, "FAILED repetition"),
        (hides_nan, "FAILED NaN in a query"),
        (wrong_dtype, "FAILED shape"),
    ],
)
def test_faults_are_found(backend, function, check):
    with pytest.raises(ConformanceError, match=check):
        check_backend(backend(function), **FEW)


def test_a_backend_without_backward_must_say_no(backend):
    with pytest.raises(ConformanceError, match="FAILED refusal of gradients"):
        check_backend(backend(right, gradient_devices=()), **FEW)


def test_own_routing_is_held_against_the_recorded_blocks(backend):
    def first_blocks(query, key, value, context, config):
        from dataclasses import replace

        from videospark.attention.routing import block_map

        chosen = block_map(query, key, keep_ratio=0.5, block_size_q=16, block_size_k=16)
        kept = torch.arange(chosen.indices.shape[-1]).expand_as(chosen.indices)
        chosen = replace(chosen, indices=kept.contiguous())
        context.record(chosen)
        return reference_attention(query, key, value, chosen)

    name = backend(first_blocks)
    check_backend(name, own_routing=True, **FEW)
    with pytest.raises(ConformanceError, match="not the blocks of the router"):
        check_backend(name, **FEW)


def test_nothing_checked_is_an_error_and_what_is_left_out_is_reported(backend, monkeypatch):
    with pytest.raises(ConfigError, match="it needs 96"):
        check_backend(backend(right, head_dims=(96,)), **FEW)
    monkeypatch.setattr(backends_module, "_REGISTERED", {})
    report = check_backend(backend(right, block_sizes_q=(16,)), **FEW)
    assert [reason for _, reason in report.skipped] == ["block_size_q is 32, it needs 16"]
