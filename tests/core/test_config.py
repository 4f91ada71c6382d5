"""Configurations: what goes in comes out, and what is wrong is named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest

from videospark.core.config import ConfigError, from_dict, load_file, require, save_file, to_dict


@dataclass(frozen=True)
class Inner:
    order: Literal["raster", "tile"] = "tile"
    tile: tuple[int, int, int] = (4, 4, 4)


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner = Inner()
    ratio: float = 1.0
    count: int | None = None
    exact: bool = False
    sigmas: tuple[float, ...] | None = None

    def __post_init__(self):
        require(0 < self.ratio <= 1, "ratio", self.ratio, "in (0, 1]")


FULL = Outer('a "quoted"\nname ü', Inner("raster", (1, 2, 3)), 0.25, 7, True, (1.0, 0.5, 1e-5))


@pytest.mark.parametrize("suffix", ["toml", "json"])
@pytest.mark.parametrize("value", [FULL, Outer("plain")])
def test_files_give_back_the_same_object(tmp_path, suffix, value):
    path = tmp_path / f"settings.{suffix}"
    save_file(value, path)
    assert load_file(Outer, path) == value
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_plain_data_has_lists_and_no_none():
    assert to_dict(Outer("x")) == {
        "name": "x", "inner": {"order": "tile", "tile": [4, 4, 4]}, "ratio": 1.0, "exact": False,
    }  # fmt: skip


def test_a_whole_number_is_a_number_but_a_bool_is_not():
    ratio = from_dict(Outer, {"name": "x", "ratio": 1}).ratio
    assert isinstance(ratio, float)
    with pytest.raises(ConfigError, match=r"ratio: got True; must be a number"):
        from_dict(Outer, {"name": "x", "ratio": True})
    with pytest.raises(ConfigError, match=r"count: got False; must be a whole number"):
        from_dict(Outer, {"name": "x", "count": False})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"name": "x", "ratoi": 1}, r"top\.ratoi: unknown key; known are name, .*did you mean 'ratio'"),
        ({}, r"top\.name: missing"),
        ({"name": 3}, r"top\.name: got 3; must be a text"),
        ({"name": "x", "count": 1.5}, r"top\.count: got 1\.5; must be a whole number"),
        ({"name": "x", "ratio": 2}, r"top\.ratio: got 2\.0; must be in \(0, 1\]"),
        ({"name": "x", "inner": {"order": "zigzag"}}, r"top\.inner\.order: got 'zigzag'; must be one of"),
        ({"name": "x", "inner": {"tile": [1, 2]}}, r"top\.inner\.tile: got \[1, 2\]; must be a list of 3 values"),
        ({"name": "x", "sigmas": [1, "a"]}, r"top\.sigmas\[1\]: got 'a'; must be a number"),
        ({"name": "x", "inner": 4}, r"top\.inner: got 4; must be a table"),
    ],
)
def test_errors_name_field_value_and_rule(data, message):
    with pytest.raises(ConfigError, match=message):
        from_dict(Outer, data, where="top")


def test_other_suffixes_and_broken_files_are_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("name: x")
    (tmp_path / "a.toml").write_text("name = ")
    with pytest.raises(ConfigError, match=r"a \.toml or \.json file"):
        load_file(Outer, tmp_path / "a.yaml")
    with pytest.raises(ConfigError, match="cannot be read as TOML"):
        load_file(Outer, tmp_path / "a.toml")
