"""Job files: many clips as JSONL, CSV or plain text, checked as a whole before anything is loaded.

A job has the keys of `KEYS`, named as the options of `videospark generate`. Only `prompt` is needed. In JSONL each line
is an object; in CSV the first line names the keys and an empty cell leaves one out; in TXT each line is a prompt, and
empty lines and those that begin with # are skipped.

Several seeds, as a list or as a text such as "1,2,5-8", make several clips of one prompt. A job without an `id` gets
one from its own content, so that inserting or sorting lines renames nothing.
"""

from __future__ import annotations

import csv
import dataclasses
import difflib
import hashlib
import io
import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.config import ConfigError
from ..pipelines.generation import GenerationRequest
from ..pipelines.video_io import read_image
from .console import parse_size

KEYS = (
    "id", "prompt", "negative_prompt", "image", "seed", "size", "height", "width", "frames", "steps", "guidance", "fps",
    "recipe",
)  # fmt: skip
SUFFIXES = (".jsonl", ".csv", ".txt")
MAX_SEEDS = 10_000
"""Most clips that one line can ask for: a mistyped range must not fill a disk."""

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_REQUEST_NAMES = {"frames": "num_frames", "steps": "num_inference_steps", "guidance": "guidance_scale"}
_INTEGERS = ("height", "width", "frames", "steps")
_NUMBERS = ("guidance", "fps")
_TEXTS = ("id", "prompt", "negative_prompt", "image", "size", "recipe")


class JobFileError(ConfigError):
    """A job file that cannot be run as it is.

    Attributes:
        problems: every problem found: the line (0 where it is the whole file) and what is wrong.
    """

    def __init__(self, name: str, problems: list[tuple[int, str]]) -> None:
        self.name, self.problems = name, sorted(problems)
        super().__init__("; ".join(self.lines()))

    def lines(self) -> list[str]:
        """One text per problem, with the file's name and the line."""
        return [f"{self.name}:{line}: {text}" if line else f"{self.name}: {text}" for line, text in self.problems]


@dataclass(frozen=True)
class Job:
    """One clip to make.

    Attributes:
        id: name of its files: letters, digits, ".", "_" and "-"; no two of a file are equal in any letter case.
        line: where it stands in the job file, counted from 1.
        request: what to make; after `check_jobs`, with every setting resolved.
        recipe: a preset's name or a recipe file; None is the model's own.
    """

    id: str
    line: int
    request: GenerationRequest
    recipe: str | None = None

    @property
    def shape(self) -> tuple[Any, ...]:
        """What decides how it runs: jobs of one shape share their compiled and allocated parts."""
        request = self.request
        guided = request.guidance_scale is not None and request.guidance_scale > 1
        size = (request.height, request.width, request.num_frames, request.num_inference_steps)
        return (self.recipe, request.image is not None, *size, guided)

    @property
    def cost(self) -> float:
        """Work relative to other resolved jobs: pixels times steps, twice with guidance. Attention grows faster."""
        request = self.request
        assert request.height and request.width and request.num_frames and request.num_inference_steps
        pixels = request.height * request.width * request.num_frames
        return float(pixels * request.num_inference_steps * (2 if self.shape[-1] else 1))


def read_jobs(
    path: str | Path,
    *,
    defaults: Mapping[str, Any] | None = None,
    num_seeds: int = 1,
    allow_images: bool = True,
    name: str | None = None,
) -> list[Job]:
    """The jobs of a file, in its order.

    Args:
        path: ending in .jsonl, .csv or .txt; UTF-8 with or without a byte order mark, any line ends.
        defaults: values, by the keys of a job, for the jobs that do not say them.
        num_seeds: clips of each job that names no seed, beginning at the default seed or 0.
        allow_images: False refuses the key `image`: for files of somebody who may not read this machine's files.
        name: of the file in messages; its path by default.

    Raises:
        JobFileError: with every problem of the file, by line.
        FileNotFoundError: no such file.
    """
    path = Path(path)
    shown = name or str(path)
    if path.suffix.lower() not in SUFFIXES:
        raise JobFileError(shown, [(0, f"got the suffix {path.suffix!r}; must be one of {', '.join(SUFFIXES)}")])
    if not path.is_file():
        raise FileNotFoundError(f"jobs: got {shown!r}; no such file")
    problems: list[tuple[int, str]] = []
    rows = _READERS[path.suffix.lower()](_text_of(path, shown), problems)
    jobs: list[Job] = []
    for line, row in rows:
        try:
            jobs += _jobs_of(row, line, dict(defaults or {}), num_seeds, path.parent, allow_images)
        except (ValueError, FileNotFoundError) as error:
            problems.append((line, str(error)))
    _refuse_equal_ids(jobs, problems)
    if not jobs and not problems:
        problems.append((0, "holds no job; must have at least one"))
    if problems:
        raise JobFileError(shown, problems)
    return jobs


def check_jobs(jobs: Iterable[Job], resolve: Callable[[Job], GenerationRequest], name: str = "jobs") -> list[Job]:
    """The jobs with resolved requests.

    Args:
        jobs: of one file.
        resolve: fills in one request; its ValueErrors become problems of the job's line.
        name: of the file in messages.

    Raises:
        JobFileError: with every problem, by line.
    """
    problems: dict[tuple[int, str], None] = {}
    checked = []
    for job in jobs:
        try:
            checked.append(dataclasses.replace(job, request=resolve(job)))
        except (ValueError, FileNotFoundError) as error:
            problems[(job.line, str(error))] = None  # one line's several seeds fail alike: said once
    if problems:
        raise JobFileError(name, list(problems))
    return checked


def grouped(jobs: Iterable[Job]) -> list[Job]:
    """The same jobs with those of one shape together; shapes in the order of their first job."""
    groups: dict[tuple[Any, ...], list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.shape, []).append(job)
    return [job for group in groups.values() for job in group]


def parse_seeds(value: Any) -> list[int] | None:
    """Seeds of a list or a text such as "1,2,5-8"; a single one of a whole number; None for None.

    Raises:
        ConfigError: anything else, a seed below 0, or one given twice.
    """
    rule = 'a whole number, 0 or more, a list of them, or a text such as "1,2,5-8"'
    if value is None:
        return None
    if isinstance(value, str):
        seeds = _seeds_of_text(value, rule)
    elif isinstance(value, list):
        seeds = value
    else:
        seeds = [value]
    good = bool(seeds) and all(isinstance(s, int) and not isinstance(s, bool) and 0 <= s < 2**63 for s in seeds)
    if not good or len(seeds) > MAX_SEEDS:
        raise ConfigError(f"seed: got {value!r}; must be {rule}, at most {MAX_SEEDS} of them")
    if len(set(seeds)) != len(seeds):
        raise ConfigError(f"seed: got {value!r}; must name each seed once")
    return list(seeds)


def _seeds_of_text(text: str, rule: str) -> list[int]:
    seeds: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,19})\s*(?:-\s*(\d{1,19})\s*)?", part)
        if not found:
            raise ConfigError(f"seed: got {text!r}; must be {rule}")
        first, last = int(found[1]), int(found[2] or found[1])
        if not 0 <= last - first < MAX_SEEDS:
            raise ConfigError(f"seed: got {text!r}; must be {rule}, at most {MAX_SEEDS} of them, ranges upwards")
        seeds += range(first, last + 1)
    return seeds


def _text_of(path: Path, shown: str) -> str:
    data = path.read_bytes()
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise JobFileError(shown, [(0, "is UTF-16; must be UTF-8")])
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise JobFileError(shown, [(line, f"is not UTF-8 at byte {error.start}; must be UTF-8")]) from None
    if "\0" in text:
        raise JobFileError(shown, [(text[: text.index("\0")].count("\n") + 1, "holds a NUL; must be text")])
    return text.replace("\r\n", "\n").replace("\r", "\n")


_Rows = list[tuple[int, dict[str, Any]]]
_Problems = list[tuple[int, str]]


def _read_txt(text: str, problems: _Problems) -> _Rows:
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1)]
    return [(number, {"prompt": line}) for number, line in lines if line and not line.startswith("#")]


def _read_jsonl(text: str, problems: _Problems) -> _Rows:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        row = dict(pairs)
        if len(row) != len(pairs):
            raise ValueError("a key stands twice")
        return row

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON number")

    rows: _Rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=once, parse_constant=refuse)
        except (ValueError, RecursionError) as error:
            problems.append((number, f"not a JSON object: {error}"))
            continue
        if isinstance(row, dict):
            rows.append((number, row))
        else:
            problems.append((number, f"got {_short(row)}; must be a JSON object"))
    return rows


def _read_csv(text: str, problems: _Problems) -> _Rows:
    reader = csv.reader(io.StringIO(text), strict=True)
    rows: _Rows = []
    header: list[str] | None = None
    line = 1
    try:
        for cells in reader:
            if header is None:
                header = [cell.strip() for cell in cells]
                repeated = sorted({key for key in header if header.count(key) > 1})
                if repeated or "prompt" not in header:
                    rule = f"repeats {', '.join(repeated)}" if repeated else "has no column 'prompt'"
                    problems.append((line, f"the first line {rule}; must name each key once, `prompt` among them"))
                    return []
                problems += [(line, wrong) for key in header if (wrong := _unknown_key(key))]
            elif any(cell.strip() for cell in cells):
                if len(cells) != len(header):
                    problems.append((line, f"got {len(cells)} cells; must be {len(header)}, as in the first line"))
                else:
                    found = {key: cell for key, cell in zip(header, cells, strict=True) if cell.strip()}
                    rows.append((line, {key: _number_of(key, cell.strip()) for key, cell in found.items()}))
            line = reader.line_num + 1
    except csv.Error as error:
        problems.append((line, f"not CSV: {error}"))
    if problems and header is not None and any(_unknown_key(key) for key in header):
        return []  # said once, and not again for every line
    return rows


def _number_of(key: str, cell: str) -> Any:
    """A cell as the number that its key asks for; left a text where it is none, for the check to refuse."""
    kind: Any = {**dict.fromkeys(_INTEGERS, int), **dict.fromkeys(_NUMBERS, float)}.get(key)
    try:
        return cell if kind is None else kind(cell)
    except ValueError:
        return cell


_READERS: dict[str, Callable[[str, _Problems], _Rows]] = {
    ".jsonl": _read_jsonl, ".csv": _read_csv, ".txt": _read_txt
}  # fmt: skip


def _unknown_key(key: str) -> str | None:
    if key in KEYS:
        return None
    others = {"num_frames": "frames", "num_inference_steps": "steps", "guidance_scale": "guidance", "seeds": "seed"}
    near = [others[key]] if key in others else difflib.get_close_matches(key, KEYS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{key}: unknown key; known are {', '.join(KEYS)}{hint}"


def _jobs_of(
    row: dict[str, Any], line: int, defaults: dict[str, Any], num_seeds: int, folder: Path, allow_images: bool
) -> list[Job]:
    """The jobs of one line: one for each of its seeds."""
    own = {key: value for key, value in row.items() if value is not None}
    for key, value in own.items():
        _check_value(key, value)
    if "prompt" not in own or not own["prompt"].strip():
        raise ConfigError(f"prompt: got {own.get('prompt')!r}; must say what the clip shows")
    if "size" in own and ("height" in own or "width" in own):
        raise ConfigError("size: got it together with height or width; must be one or the other")
    seeds = parse_seeds(own.get("seed"))
    several = isinstance(own.get("seed"), list) or (isinstance(own.get("seed"), str) and len(seeds or ()) > 1)
    if seeds is None:
        first = int(defaults.get("seed") or 0)
        seeds = list(range(first, first + num_seeds))
        several = num_seeds > 1
    fields = _request_fields(own, defaults, folder, allow_images)
    base = own.get("id") or _id_of({key: value for key, value in own.items() if key != "seed"}, own.get("seed"))
    if not _ID.fullmatch(base):
        rule = "1 to 100 letters, digits, '.', '_' or '-', a letter or digit first"
        raise ConfigError(f"id: got {base!r}; must be {rule}")
    recipe = own.get("recipe", defaults.get("recipe"))
    if recipe is not None and "recipe" in own and Path(recipe).suffix in (".json", ".toml"):
        if not allow_images:
            raise ConfigError(f"recipe: got {recipe!r}; must be a preset's name here")
        recipe = str(folder / recipe)
    jobs = []
    for seed in seeds:
        request = GenerationRequest(**fields, seed=seed)
        jobs.append(Job(f"{base}-seed{seed}" if several else base, line, request, recipe))
    return jobs


def _check_value(key: str, value: Any) -> None:
    if unknown := _unknown_key(key):
        raise ConfigError(unknown)
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if key in _TEXTS and not isinstance(value, str):
        raise ConfigError(f"{key}: got {value!r}; must be a text")
    if key in _INTEGERS and not (number and isinstance(value, int) and value > 0):
        raise ConfigError(f"{key}: got {value!r}; must be a whole number, at least 1")
    if key in _NUMBERS and not number:
        raise ConfigError(f"{key}: got {value!r}; must be a number")


def _request_fields(own: dict[str, Any], defaults: dict[str, Any], folder: Path, allow_images: bool) -> dict[str, Any]:
    """The request's settings but the seed: the job's own before the defaults."""
    if "size" in own or "height" in own or "width" in own:
        defaults = {key: value for key, value in defaults.items() if key not in ("size", "height", "width")}
    values = {**defaults, **own}
    if "size" in values:
        values["height"], values["width"] = parse_size(values["size"])
    if "image" in own:
        if not allow_images:
            raise ConfigError(f"image: got {own['image']!r}; must be left out of a job file that is uploaded")
        values["image"] = str((folder / own["image"]).resolve())
        read_image(values["image"])  # read again when it is used; here to complain early
    left_out = ("id", "seed", "size", "recipe")
    return {_REQUEST_NAMES.get(key, key): value for key, value in values.items() if key not in left_out}


def _id_of(settings: dict[str, Any], seed: Any) -> str:
    """A name made of the prompt's first words and a hash of all that the line says."""
    seeds = None if isinstance(seed, list) else parse_seeds(seed)
    if seeds is not None and len(seeds) == 1:
        settings["seed"] = seeds[0]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, ensure_ascii=True).encode()).hexdigest()[:10]
    plain = unicodedata.normalize("NFKD", settings["prompt"]).encode("ascii", "ignore").decode().lower()
    words = "-".join(re.findall(r"[a-z0-9]+", plain))[:40].strip("-")
    return f"{words}-{digest}" if words else digest


def _refuse_equal_ids(jobs: list[Job], problems: _Problems) -> None:
    seen: dict[str, Job] = {}
    for job in jobs:
        earlier = seen.setdefault(job.id.casefold(), job)
        if earlier is not job:
            problems.append(
                (job.line, f"id: got {job.id!r}, as in line {earlier.line}; must be another id, prompt or seed")
            )


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
