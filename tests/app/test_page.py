"""The page: its words and checks alone, then the real server with a stand-in for the engine, through its API."""

from __future__ import annotations

import asyncio
import http.client
import json
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import imageio.v3 as imageio
import numpy as np
import pytest
from typer.testing import CliRunner

from videospark.app import page_view as view
from videospark.app.cli import app
from videospark.app.commands_serve import examples_for, read_logins
from videospark.app.page_files import OnlyClips
from videospark.app.service_data import ServiceLimits, Snapshot, Status
from videospark.pipelines.recipe import Recipe, preset
from videospark.pipelines.stages import resident_bytes

sys.path.insert(0, str(Path(__file__).parent))
from fakes import FakeEngine, hash_of

runner = CliRunner()
CLIP = "20260101-000000-0123456789abcdef"


# Words and checks


def test_ranges_hold_only_sizes_that_the_model_makes(model_folder):
    from videospark.app.engine import planned_pipeline
    from videospark.pipelines.sizes import check_size

    planned, _ = planned_pipeline(str(model_folder))
    defaults = planned.videospark_defaults
    ranges = view.size_ranges(planned, defaults, ServiceLimits())
    for name, allowed in ranges.items():
        assert allowed.first <= defaults[name] <= allowed.last
        for value in range(allowed.first, allowed.last + 1, allowed.step):
            check_size(planned, **{key: value if key == name else defaults[key] for key in ranges})
    assert (
        ranges["width"].nearest(10**6) == ranges["width"].last and ranges["width"].nearest(1) == ranges["width"].first
    )
    small = view.size_ranges(planned, defaults, ServiceLimits(max_pixels=1))
    assert small["height"].last == defaults["height"]  # the usual size stays: the limit refuses it in words


def test_a_moved_keep_ratio_makes_a_recipe_of_its_own():
    recipes, own = [preset("dense"), preset("sparse-50")], Recipe("dense")
    assert view.chosen_recipe(view.OWN_RECIPE, 0.3, recipes, own) is None  # it keeps all: nothing to move
    assert view.chosen_recipe("sparse-50", 0.5, recipes, own) == "sparse-50"
    moved = view.chosen_recipe("sparse-50", 0.7, recipes, own)
    assert moved.name == "sparse-50" and moved.attention.keep_ratio == 0.7
    assert view.is_guided(own) and not view.is_guided(preset("spark-4step"))


def test_html_in_prompts_and_errors_is_inert():
    bad = "<script>alert(1)</script>"
    failed = view.status_html(Snapshot("x", Status.failed, error=bad))
    sidecar = {
        "prompt": bad, "seed": 0, "request": {"num_inference_steps": 2, "guidance_scale": 1.0}, "report": None,
        "size": {"width": 8, "height": 8, "num_frames": 5}, "fps": 8, "notes": [bad], "unknown_words": [bad],
    }  # fmt: skip
    for text in (failed, view.report_html(sidecar)):
        assert "<script" not in text and "&lt;script&gt;" in text


def test_the_status_says_what_a_screen_reader_needs():
    text = view.status_html(Snapshot("x", Status.running, step=3, steps=4, seconds_left=2.4))
    assert "Step 3 of 4, about 2 s left" in text and 'aria-valuenow="75"' in text and 'role="progressbar"' in text
    assert "2 before" in view.status_html(Snapshot("x", Status.queued, position=2))


def test_stages_and_comparison_are_computed_from_the_measured_numbers():
    stages = {"seconds": {"text": 1.0, "denoise": 3.0}, "total_seconds": 4.0, "step_seconds": [1.0, 1.0],
              "peak_memory": {"denoise": {"cuda_peak_bytes": 2**31}}}  # fmt: skip
    assert view.stage_rows(stages) == [
        ["text", "1.00", "", "25%"], ["denoise", "3.00", "cuda 2.00 GiB", "75%"], ["total", "4.00", "", "100%"]
    ]  # fmt: skip
    table = view.stages_html(stages)
    assert 'style="width:75%"' in table and "cuda 2.00 GiB" in table and 'style="width:100%"' not in table
    slow = {"stages": {**stages, "step_seconds": [3.0, 5.0], "total_seconds": 12.0}}
    text = view.comparison_html({"stages": stages}, slow)
    assert "4.00 times as fast</b><span>2.00 s against 8.00 s" in text
    assert "3.00 times as fast</b><span>4.00 s against 12.00 s" in text
    unmeasured = {"stages": {**stages, "step_seconds": []}}
    assert "too short" in view.comparison_html(unmeasured, slow)


def test_a_recipe_says_what_it_costs_and_gives():
    defaults = {"num_inference_steps": 50, "guidance_scale": 4.0}
    dense = view.recipe_html(preset("dense"), defaults, None)
    assert "50 steps" in dense and "each step computed twice" in dense and "not measured here yet" in dense
    student = view.recipe_html(preset("spark-3step-int8"), defaults, None)
    assert "3 steps" in student and "no guidance" in student and "products in INT8" in student
    sidecar = {"size": {"width": 64, "height": 32, "num_frames": 5}, "stages": {"total_seconds": 1.25}}
    sparse = view.recipe_html(preset("sparse-50"), defaults, sidecar)
    assert "attends to 50% of the blocks" in sparse and "1.2 s for 64x32, 5 frames" in sparse
    inert = view.recipe_html(Recipe("x", description="<script>"), defaults, None)
    assert "<script" not in inert


def test_examples_are_captions_of_the_embedded_world():
    from videospark.tiny.components import build_tokenizer

    tokenizer = build_tokenizer()
    for text in examples_for(True):
        assert tokenizer.unk_token_id not in tokenizer(text).input_ids
    assert examples_for(False)


def test_only_clips_are_served(tmp_path):
    folder, cache, secret = tmp_path / "out", tmp_path / "cache", tmp_path / "secret.txt"
    for made in (folder, folder / ".work", cache):
        made.mkdir()
    secret.write_text("secret")
    (folder / f"{CLIP}.mp4").write_text("clip")
    (folder / "notes.txt").write_text("mine")
    (folder / ".work" / f"{CLIP}.mp4").write_text("half")
    (folder / f"{CLIP}.json").symlink_to(secret)
    (cache / "copy.png").write_text("copy")
    (cache / "link.png").symlink_to(secret)
    gate = OnlyClips(None, folder, [cache])

    def allows(path):
        answers = {gate.allows(f"/gradio_api/file{mark}{path}") for mark in "=/"}
        assert len(answers) == 1, path
        return answers.pop()

    assert allows(folder / f"{CLIP}.mp4") and allows(cache / "copy.png")
    assert gate.allows("/") and gate.allows("/gradio_api/queue/join")
    for path in (
        folder / "notes.txt", folder / ".work" / f"{CLIP}.mp4", folder / f"{CLIP}.json", cache / "link.png", secret,
        f"{folder}/../secret.txt", f"{folder}/%2e%2e/secret.txt", folder, "/etc/passwd", "http://127.0.0.1/", "",
        f"{folder}/{CLIP}.mp4\0", "file:///etc/passwd",
    ):  # fmt: skip
        assert not allows(path), path
    assert not gate.allows("/gradio_api/proxy=http://127.0.0.1/")


def test_the_gate_answers_403_and_passes_the_rest_on(tmp_path):
    passed, sent = [], []

    async def inner(scope, receive, send):
        passed.append(scope["path"])

    async def send(message):
        sent.append(message)

    gate = OnlyClips(inner, tmp_path, [])
    for path in ("/gradio_api/file=/etc/passwd", "/config"):
        asyncio.run(gate({"type": "http", "path": path}, None, send))
    asyncio.run(gate({"type": "lifespan"} | {"path": "x"}, None, send))
    assert passed == ["/config", "x"] and sent[0]["status"] == 403


def test_logins(tmp_path):
    file = tmp_path / "logins"
    file.write_text("# people\nann:pass:word\nbob:x\n")
    check = read_logins(file)
    assert check("ann", "pass:word") and check("bob", "x")
    assert not check("ann", "x") and not check("eve", "x") and not check("", "")
    for wrong in ("", "ann\n", "ann:\n", "ann:1\nann:2\n"):
        file.write_text(wrong)
        with pytest.raises(ValueError, match="login_file"):
            read_logins(file)


@pytest.mark.parametrize(
    ("options", "name"),
    [(["--host", "0.0.0.0"], "--login-file"), (["--port", "-1"], "port"), (["--max-queue", "0"], "max_queue"),
     (["--model", "no/such/model"], "model"), (["--login-file", "absent"], "absent")],
)  # fmt: skip
def test_wrong_options_end_before_serving(options, name, monkeypatch):
    from videospark.app import commands_serve

    monkeypatch.setattr(commands_serve, "Server", lambda *_, **__: pytest.fail("served"))
    result = runner.invoke(app, ["serve", *options])
    assert result.exit_code == 2 and name in result.stderr


# The real server


@pytest.fixture(scope="module")
def server(model_folder, tmp_path_factory):
    pytest.importorskip("gradio")
    from videospark.app.commands_serve import Server

    engine = FakeEngine(0.01)
    outputs = tmp_path_factory.mktemp("page") / "clips"
    made = Server(
        str(model_folder), ["cpu"], outputs, ServiceLimits(max_queue=100, preview_seconds=0),
        make_engine=lambda *_: engine,
    )  # fmt: skip
    address = made.start(max_upload_mb=0.5)
    yield SimpleNamespace(address=address.rstrip("/"), service=made.service, engine=engine, blocks=made.blocks)
    made.stop()


@pytest.fixture(scope="module")
def client(server):
    from gradio_client import Client

    return Client(server.address, verbose=False)


def get(url):
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_the_endpoints_have_names_and_types(client):
    info = client.view_api(return_format="dict")["named_endpoints"]
    assert set(info) == {"/generate", "/submit", "/status", "/cancel", "/history", "/recipes"}
    types = {p["parameter_name"]: json.dumps(p["type"]) for p in info["/generate"]["parameters"]}
    assert "string" in types["prompt"] and "integer" in types["seed"] and "number" in types["guidance"]


def test_a_clip_through_the_api(client):
    data = client.predict(prompt="a circle", seed=3, api_name="/generate")
    assert data["status"] == "done" and data["seed"] == 3 and data["size"]["num_frames"] == 5
    assert imageio.imread(data["video"]).shape == (5, 32, 32, 3)
    assert json.loads(Path(data["sidecar"]).read_text())["prompt"] == "a circle"
    assert client.predict(id=data["id"], api_name="/status")["status"] == "done"
    assert data["id"] in [clip["id"] for clip in client.predict(api_name="/history")]
    assert client.predict(api_name="/recipes")[0]["name"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": "a", "recipe": "x.json"}, "preset"),
        ({"prompt": "a", "seed": 1.5}, "seed"),
        ({"prompt": "a", "guidance": "high"}, "guidance"),
        ({"prompt": "a" * 5000}, "at most 4000"),
        ({"prompt": 7}, "prompt"),
    ],
)
def test_the_api_gets_the_same_checks(client, arguments, message):
    with pytest.raises(Exception, match=message):
        client.predict(**arguments, api_name="/generate")


def test_pictures_of_this_machine_are_not_read(tmp_path):
    from videospark.app.page_api import ServiceApi

    uploads = tmp_path / "uploads"
    uploads.mkdir()
    (tmp_path / "mine.png").write_text("x")
    (uploads / "sent.png").write_text("x")
    (uploads / "link.png").symlink_to(tmp_path / "mine.png")
    api = ServiceApi(None, lambda: uploads)
    assert api._picture(None) is None
    assert api._picture({"path": str(uploads / "sent.png")}) == str(uploads / "sent.png")
    for wrong in (str(tmp_path / "mine.png"), str(uploads / "link.png"), f"{uploads}/../mine.png", "absent", "", 5):
        with pytest.raises(ValueError, match="sent with the request"):
            api._picture({"path": wrong})
    for wrong in ("text", 5, {}, []):
        with pytest.raises(ValueError, match="sent with the request"):
            api._picture(wrong)


def test_failures_are_told_in_short(client):
    data = client.predict(prompt="needs memory", api_name="/generate")
    assert data["status"] == "failed" and data["error"].startswith("out of memory: ask for a smaller size")
    data = client.predict(prompt="must fail", api_name="/generate")
    assert "must not" not in data["error"] and data["id"] in data["error"]


def test_a_request_can_be_cancelled(client, server):
    server.engine.gate = threading.Semaphore(0)
    try:
        made = client.predict(prompt="to be stopped", api_name="/submit")
        assert client.predict(id=made["id"], api_name="/cancel") is True
        for _ in range(3):
            server.engine.gate.release()
        assert list(server.service.watch(made["id"], poll=30))[-1].status is Status.cancelled
    finally:
        server.engine.gate = None
    assert client.predict(id="../../x", api_name="/cancel") is False
    with pytest.raises(Exception, match="one of your requests"):
        client.predict(id="../../x", api_name="/status")


@pytest.mark.parametrize(
    ("clients", "each"), [(3, 2), pytest.param(8, 13, marks=pytest.mark.slow)], ids=["few", "load run"]
)
def test_clients_at_once_get_their_own(server, clients, each):
    from gradio_client import Client

    found, problems, resident = {}, [], []

    def work(number):
        try:
            own = Client(server.address, verbose=False)
            for index in range(each):
                prompt = f"client {number} clip {index}"
                found[prompt] = own.predict(prompt=prompt, seed=0, api_name="/generate")
                resident.append(resident_bytes())
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert not problems and len(found) == clients * each
    if each > 10:  # after the first third nothing is left that is made once; a clip of each request would show
        assert resident[-1] - resident[len(resident) // 3] < 64 * 2**20
    for prompt, data in found.items():
        assert data["status"] == "done" and data["prompt"] == prompt
        assert abs(int(np.mean(imageio.imread(data["video"]))) - hash_of(prompt)) < 12


def test_files_outside_of_the_folder_are_refused(server, tmp_path):
    folder = server.service.history.folder
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "20260101-000000-0123456789abcdef.png").symlink_to(tmp_path / "secret.txt")
    (folder / "private.txt").write_text("secret")
    for path in ("/etc/passwd", f"{folder}/../x", f"{folder}/private.txt", f"{folder}/{CLIP}.png",
                 str(tmp_path / "secret.txt"), "http://127.0.0.1:1/"):  # fmt: skip
        code, body = get(f"{server.address}/gradio_api/file={path}")
        assert code in (400, 403, 404) and b"secret" not in body, path
    clip = server.service.history.page(0, 1)[0]
    assert get(f"{server.address}/gradio_api/file={clip.video}")[0] == 200


def test_a_large_upload_is_refused(server):
    boundary = "x" * 20
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n'
    body = head.encode() + b"0" * 2**20 + f"\r\n--{boundary}--\r\n".encode()
    headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
    asked = urllib.request.Request(f"{server.address}/gradio_api/upload", body, headers)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(asked, timeout=30)
    assert caught.value.code == 413


def test_an_upload_of_200_megabytes_is_refused_and_not_kept(server):
    from gradio.utils import get_upload_folder

    host, port = server.address.removeprefix("http://").split(":")
    size, boundary = 200 * 2**20, "x" * 20
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="files"; filename="huge.png"\r\n\r\n'.encode()
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    connection.putrequest("POST", "/gradio_api/upload")
    connection.putheader("Content-Type", f"multipart/form-data; boundary={boundary}")
    connection.putheader("Content-Length", str(size))
    before = resident_bytes()
    try:
        connection.endheaders(head)
        for _ in range(size // 2**20 - 1):
            connection.send(b"0" * 2**20)
        connection.send(b"0" * (2**20 - len(head)))
        code = connection.getresponse().status
    except (BrokenPipeError, ConnectionResetError):
        code = 413  # hung up on in the middle
    finally:
        connection.close()
    assert code == 413
    assert resident_bytes() - before < 100 * 2**20
    assert not list(Path(get_upload_folder()).rglob("huge.png"))
    assert get(server.address)[0] == 200


def test_the_page_itself_is_there_and_listens_to_this_machine_alone(server):
    code, body = get(server.address)
    assert code == 200 and b"videospark" in body
    assert server.address.startswith("http://127.0.0.1")
    config = json.loads(get(f"{server.address}/config")[1])
    labels = {part["props"].get("label") for part in config["components"]}
    assert {"Prompt", "Recipe", "Width", "Height", "Frames", "Clip", "Job file"} <= labels
    assert not config.get("analytics_enabled")
