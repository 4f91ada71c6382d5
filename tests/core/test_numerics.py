"""Measures of error against numbers worked out by hand."""

import math

import pytest
import torch

from videospark.core.numerics import relative_error, sqnr_db, three_way


def test_relative_error_and_decibels_by_hand():
    reference = torch.tensor([3.0, 4.0])
    assert relative_error(torch.tensor([3.0, 4.5]), reference) == pytest.approx(0.1)
    assert sqnr_db(torch.tensor([3.0, 4.5]), reference) == pytest.approx(20.0)
    assert relative_error(reference, reference) == 0
    assert sqnr_db(reference, reference) == math.inf


def test_a_zero_reference_and_nan_are_not_hidden():
    zero = torch.zeros(2)
    assert relative_error(zero, zero) == 0
    assert relative_error(torch.ones(2), zero) == math.inf
    assert math.isnan(relative_error(torch.tensor([math.nan, 0.0]), torch.ones(2)))


def test_differing_shapes_are_refused_rather_than_broadcast():
    with pytest.raises(ValueError, match="shapes differ"):
        relative_error(torch.ones(1), torch.ones(3))


def test_three_way_allows_rounding_noise_and_refuses_more():
    torch.manual_seed(0)
    left, right = torch.randn(32, 32), torch.randn(32, 32)
    reference = left @ right
    plain = left.bfloat16() @ right.bfloat16()
    assert three_way(plain, plain, reference).ok
    worse = (reference + 3 * (plain.float() - reference)).bfloat16()
    outcome = three_way(worse, plain, reference)
    assert not outcome
    assert "allowed" in outcome.message
    assert three_way(worse, plain, reference, factor=4.0).ok


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_three_way_refuses_what_is_not_finite_wherever_it_is(bad):
    good, broken = torch.ones(4), torch.tensor([1.0, bad, 1.0, 1.0])
    assert not three_way(broken, good, good)
    assert not three_way(good, broken, good)
    assert not three_way(good, good, broken)
