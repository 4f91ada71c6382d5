"""Job files: three formats, every problem with its line, stable ids, seeds, shapes."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from videospark.app.jobs import Job, JobFileError, check_jobs, grouped, parse_seeds, read_jobs
from videospark.core.config import ConfigError
from videospark.pipelines.generation import GenerationRequest


def write(folder, name, text, encoding="utf-8"):
    path = folder / name
    path.write_bytes(text.encode(encoding))
    return path


def problems_of(path, **options):
    with pytest.raises(JobFileError) as caught:
        read_jobs(path, **options)
    return caught.value.problems


def test_the_three_formats_say_the_same(tmp_path):
    rows = [{"prompt": "a red, round circle"}, {"prompt": 'a "blue" square'}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    jsonl = read_jobs(write(tmp_path, "a.jsonl", lines))
    table = 'prompt,seed,size\n"a red, round circle",,\n"a ""blue"" square",,\n'
    csv = read_jobs(write(tmp_path, "a.csv", table))
    txt = read_jobs(write(tmp_path, "a.txt", '# two\n\n  a red, round circle  \na "blue" square'))
    assert [job.request for job in jsonl] == [job.request for job in csv] == [job.request for job in txt]
    assert [job.id for job in jsonl] == [job.id for job in csv] == [job.id for job in txt]
    assert [job.line for job in jsonl] == [1, 2] and [job.line for job in csv] == [2, 3]
    assert [job.line for job in txt] == [3, 4]
    assert all(job.request.seed == 0 for job in jsonl)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".txt"])
@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
def test_byte_order_marks_and_line_ends(tmp_path, suffix, ends):
    texts = {".jsonl": '{"prompt": "é"}\n\n{"prompt": "b"}\n', ".csv": "prompt\né\n\nb\n", ".txt": "é\n\nb\n"}
    path = write(tmp_path, f"a{suffix}", texts[suffix].replace("\n", ends), "utf-8-sig")
    assert [job.request.prompt for job in read_jobs(path)] == ["é", "b"]


def test_every_key_reaches_the_request(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "first.png")
    row = {"id": "x.1", "prompt": "p", "negative_prompt": "n", "image": "first.png", "seed": 7, "size": "96x64",
           "frames": 9, "steps": 3, "guidance": 2, "fps": 12, "recipe": "dense"}  # fmt: skip
    (job,) = read_jobs(write(tmp_path, "a.jsonl", json.dumps(row)))
    expected = GenerationRequest(
        "p", negative_prompt="n", image=str(tmp_path / "first.png"), height=64, width=96, num_frames=9, seed=7,
        num_inference_steps=3, guidance_scale=2, fps=12,
    )  # fmt: skip
    assert job == Job("x.1", 1, expected, "dense")
    header = ",".join(row)
    (from_csv,) = read_jobs(write(tmp_path, "a.csv", header + "\n" + ",".join(map(str, row.values()))))
    assert from_csv.request == expected and from_csv.id == "x.1"


def test_defaults_fill_what_a_job_leaves_open(tmp_path):
    path = write(tmp_path, "a.jsonl", '{"prompt": "a"}\n{"prompt": "b", "height": 32, "recipe": "dense", "seed": 9}')
    options = {"size": "96x64", "frames": 5, "recipe": "sparse-50", "seed": 3}
    first, second = read_jobs(path, defaults=options)
    assert (first.request.height, first.request.width, first.request.seed) == (64, 96, 3)
    assert first.recipe == "sparse-50" and second.recipe == "dense"
    # A height of its own is not mixed with the width of the default.
    assert (second.request.height, second.request.width, second.request.seed) == (32, None, 9)
    assert second.request.num_frames == 5


def test_several_seeds(tmp_path):
    path = write(tmp_path, "a.csv", 'id,prompt,seed\nx,a,"1,4-6"\ny,b,2\nz,c,\n')
    jobs = read_jobs(path, num_seeds=2)
    assert [job.id for job in jobs] == ["x-seed1", "x-seed4", "x-seed5", "x-seed6", "y", "z-seed0", "z-seed1"]
    assert [job.request.seed for job in jobs] == [1, 4, 5, 6, 2, 0, 1]
    (one, two) = read_jobs(write(tmp_path, "b.jsonl", '{"prompt": "a", "seed": [3, 1]}'))
    assert one.id.endswith("-seed3") and two.id.endswith("-seed1") and one.id[:-6] == two.id[:-6]
    assert parse_seeds(None) is None and parse_seeds("3") == [3]
    for wrong in ("", "1-", "5-3", "1,1", "-1", [1, 1], [], [1.0], True, 1.5, "0-999999999", -1):
        with pytest.raises(ConfigError, match="seed"):
            parse_seeds(wrong)


def test_names_depend_on_the_content_alone(tmp_path):
    first = read_jobs(write(tmp_path, "a.txt", "one\ntwo\n"))
    moved = read_jobs(write(tmp_path, "b.txt", "zero\ntwo\none\n"))
    assert {job.id for job in first} < {job.id for job in moved}
    # Only the ends differ, or only signs that no file name may hold: still different names.
    long = "word " * 400
    texts = [long + "a", long + "b", "日本", "中国", "../../etc", "..\\..\\etc", "🙂", "🙁", "con", "A/b", "a b"]
    jobs = read_jobs(write(tmp_path, "c.txt", "\n".join(texts)))
    assert len({job.id.casefold() for job in jobs}) == len(texts)
    assert all(len(job.id.encode()) < 100 and job.id.isascii() and "/" not in job.id for job in jobs)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "frmes": 5}', "frmes: unknown key.*did you mean 'frames'"),
        ('{"prompt": "a", "num_frames": 5}', "did you mean 'frames'"),
        ('{"seed": 1}', "prompt: got None"),
        ('{"prompt": "  "}', "prompt"),
        ('{"prompt": 5}', "prompt: got 5; must be a text"),
        ('{"prompt": "a"', "not a JSON object"),
        ('["prompt"]', "must be a JSON object"),
        ('{"prompt": "a", "prompt": "b"}', "a key stands twice"),
        ('{"prompt": "a", "guidance": NaN}', "NaN"),
        ('{"prompt": "a", "guidance": true}', "guidance: got True"),
        ('{"prompt": "a", "frames": 0}', "frames: got 0"),
        ('{"prompt": "a", "steps": 2.5}', "steps: got 2.5"),
        ('{"prompt": "a", "seed": -1}', "seed: got -1"),
        ('{"prompt": "a", "size": "big"}', "size: got 'big'"),
        ('{"prompt": "a", "size": "64x64", "width": 64}', "size"),
        ('{"prompt": "a", "image": "absent.png"}', "absent.png"),
        ('{"prompt": "a", "id": "../up"}', "id: got '../up'"),
        ('{"prompt": "a", "id": ""}', None),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, message):
    path = write(tmp_path, "a.jsonl", '{"prompt": "fine"}\n\n' + line + "\n")
    if message is None:
        assert len(read_jobs(path)) == 2  # an empty id is none
        return
    ((number, text),) = problems_of(path)
    assert number == 3
    import re

    assert re.search(message, text), text


def test_all_problems_are_told_at_once(tmp_path):
    text = "prompt,frames,seed\na,5,\nb,five,\n,5,\nc\nd,5,\nd,5,\n"
    found = problems_of(write(tmp_path, "a.csv", text))
    assert [line for line, _ in found] == [3, 4, 5, 7]
    assert "frames: got 'five'" in found[0][1] and "3, as in the first line" in found[2][1]
    assert "as in line 6" in found[3][1]


def test_a_row_over_several_lines_counts_from_its_first(tmp_path):
    found = problems_of(write(tmp_path, "a.csv", 'prompt,frames\n"two\nlines",5\n"more\nlines",x\n'))
    assert [line for line, _ in found] == [4]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.csv", b"text\na\n", "no column 'prompt'"),
        ("a.csv", b"prompt,prompt\na,b\n", "repeats prompt"),
        ("a.csv", b"prompt,frmes\na,5\nb,5\n", "frmes: unknown key"),
        ("a.csv", b'prompt\n"open\n', "not CSV"),
        ("a.jsonl", b"", "holds no job"),
        ("a.txt", b"# nothing\n\n", "holds no job"),
        ("a.txt", "prompt".encode("utf-16"), "UTF-16"),
        ("a.txt", b"fine\n\xff\xfe\xfd\n", "not UTF-8"),
        ("a.txt", b"fine\nnot \0 fine\n", "NUL"),
        ("a.xlsx", b"PK", "must be one of .jsonl, .csv, .txt"),
    ],
)
def test_wrong_files(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    ((line, text),) = problems_of(tmp_path / name)
    assert message in text
    assert line == {b"fine": 2}.get(data[:4], line)


def test_uploaded_files_read_nothing_of_this_machine(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "secret.png")
    path = write(tmp_path, "a.jsonl", '{"prompt": "a", "image": "secret.png"}\n{"prompt": "b", "recipe": "r.json"}')
    found = problems_of(path, allow_images=False, name="upload.jsonl")
    assert [line for line, _ in found] == [1, 2]
    assert "secret.png" in found[0][1] and "preset" in found[1][1]


def test_checking_names_the_line_once(tmp_path):
    jobs = read_jobs(write(tmp_path, "a.csv", 'prompt,seed,frames\na,"1-3",6\nb,1,5\n'))

    def resolve(job):
        if job.request.num_frames == 6:
            raise ConfigError("num_frames: got 6; must be 5")
        return job.request

    with pytest.raises(JobFileError, match=r"a\.csv:2: num_frames: got 6") as caught:
        check_jobs(jobs, resolve, "a.csv")
    assert len(caught.value.problems) == 1


def test_grouping_keeps_shapes_together_and_their_order():
    def job(name, frames, recipe=None):
        request = GenerationRequest("p", height=64, width=64, num_frames=frames, num_inference_steps=2)
        return Job(name, 1, request, recipe)

    jobs = [job("a", 5), job("b", 9), job("c", 5, "dense"), job("d", 5), job("e", 9)]
    assert [j.id for j in grouped(jobs)] == ["a", "d", "b", "e", "c"]
    assert jobs[1].cost == pytest.approx(jobs[0].cost * 9 / 5)
