"""The page in a headless Chromium, with the untrained tiny pipeline: what a person does, and screenshots to look at.

Needs playwright and a chromium; screenshots are kept in the folder that VIDEOSPARK_SCREENSHOTS names, if any.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from videospark.app.service_data import ServiceLimits

pytestmark = pytest.mark.slow
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def server(model_folder, tmp_path_factory):
    pytest.importorskip("gradio")
    from videospark.app.commands_serve import Server

    folder = os.environ.get("VIDEOSPARK_TEST_MODEL") or str(with_larger_clips(model_folder, tmp_path_factory))
    outputs = tmp_path_factory.mktemp("browser") / "clips"
    made = Server(folder, ["cpu"], outputs, ServiceLimits(preview_seconds=0), embedded=True)
    made.address = made.start()
    made.service.wait_until_ready(120)
    yield made
    made.stop()


def with_larger_clips(model_folder, tmp_path_factory):
    """The same model with clips of seven key blocks; of two, an untrained model keeps the same ones in every layer."""
    folder = shutil.copytree(model_folder, tmp_path_factory.mktemp("larger") / "model")
    file = folder / "videospark_defaults.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"height": 96, "width": 96, "num_frames": 9}))
    return folder


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no chromium")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser, server):
    context = browser.new_context(viewport={"width": 1280, "height": 1000})
    tab = context.new_page()
    tab.problems = []
    tab.on("pageerror", lambda error: tab.problems.append(str(error)))
    tab.goto(server.address)
    tab.get_by_label("Prompt").first.wait_for(timeout=60_000)
    yield tab
    assert tab.problems == []
    context.close()


def keep(tab, name):
    if folder := os.environ.get("VIDEOSPARK_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        tab.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)


def generate(tab, prompt):
    tab.get_by_label("Prompt").first.fill(prompt)
    tab.locator("#generate-button").click()


def wait_done(tab, text="Done."):
    tab.locator("#status").get_by_text(text).wait_for(timeout=120_000)


def test_generate_shows_clip_stages_and_report(page):
    keep(page, "start")
    generate(page, "a large red circle moving right on a plain white background")
    wait_done(page)
    video = page.locator("#clip video")
    video.wait_for(timeout=30_000)
    page.wait_for_function("document.querySelector('#clip video').readyState >= 2", timeout=30_000)
    page.locator("#stages").get_by_text("denoise").wait_for(timeout=30_000)
    page.locator("#report").get_by_text("none: the model as it is").wait_for(timeout=30_000)
    page.locator("#recipe-card").get_by_text("latest clip here").wait_for(timeout=30_000)
    keep(page, "generate")


def test_html_in_a_prompt_is_inert(page):
    page.evaluate("window.broken = false")
    generate(page, "<img src=x onerror='window.broken = true'> a circle")
    wait_done(page)
    page.get_by_role("tab", name="Gallery").click()
    page.wait_for_timeout(1500)
    assert page.evaluate("window.broken") is False


def test_a_reload_in_the_middle_finds_the_clip(page, server):
    generate(page, "a small blue square")
    page.locator("#status").get_by_text("Step").first.wait_for(timeout=60_000)
    page.reload()
    wait_done(page)
    page.locator("#clip video").wait_for(timeout=30_000)


def test_stop_ends_the_run(page, server):
    page.get_by_text("Advanced").click()
    page.get_by_label("Prompt").first.fill("a small blue square")
    import dataclasses

    engine = server.service.engines[0]
    run = engine.run

    def slow(request, recipe=None, **options):
        return run(dataclasses.replace(request, num_inference_steps=400), recipe, **options)

    engine.run = slow
    try:
        page.locator("#generate-button").click()
        page.locator("#status").get_by_text("Step").first.wait_for(timeout=60_000)
        page.locator("#stop-button").click()
        wait_done(page, "Stopped.")
    finally:
        engine.run = run


def test_compare_measures_both(page):
    page.get_by_role("tab", name="Compare").click()
    page.locator("#compare-prompt textarea").fill("a large red circle")
    page.locator("#compare-button").click()
    page.locator("#verdict").get_by_text("times as fast").first.wait_for(timeout=120_000)
    keep(page, "compare")


def test_look_inside_shows_the_map_and_a_reload_keeps_it(page):
    page.get_by_role("tab", name="Look inside").click()
    page.locator("#look-prompt textarea").fill("a large red circle")
    page.locator("#look-button").click()
    words = page.locator("#look-words")
    words.get_by_text("layer 0, mean of all heads").wait_for(timeout=120_000)
    picture = page.locator("#look-map img")
    picture.wait_for(timeout=30_000)
    first = picture.get_attribute("src")
    page.get_by_label("number input for Layer").fill("1")
    page.get_by_label("number input for Layer").press("Enter")
    words.get_by_text("layer 1").wait_for(timeout=30_000)
    page.wait_for_function("old => document.querySelector('#look-map img').src !== old", arg=first, timeout=30_000)
    keep(page, "look")
    page.reload()
    page.get_by_role("tab", name="Look inside").click()
    words.get_by_text("layer 0, mean of all heads").wait_for(timeout=60_000)


def test_two_users_at_once_each_get_their_own(browser, server):
    """One through the button of Generate, one through that of Compare: two handlers, one model."""
    contexts = [browser.new_context(viewport={"width": 1280, "height": 1000}) for _ in range(2)]
    first, second = (context.new_page() for context in contexts)
    for tab in (first, second):
        tab.goto(server.address)
        tab.get_by_label("Prompt").first.wait_for(timeout=60_000)
    second.get_by_role("tab", name="Compare").click()
    second.locator("#compare-prompt textarea").fill("a small blue square of the second")
    generate(first, "a large red circle of the first")
    second.locator("#compare-button").click()
    wait_done(first)
    first.locator("#report").get_by_text("of the first").wait_for(timeout=30_000)
    second.locator("#verdict").get_by_text("times as fast").first.wait_for(timeout=120_000)
    newest = [clip.sidecar["prompt"] for clip in server.service.history.page(0, 3)]
    assert sorted(newest) == ["a large red circle of the first"] + ["a small blue square of the second"] * 2
    for context in contexts:
        context.close()


def test_the_gallery_gives_settings_back(page):
    page.get_by_role("tab", name="Gallery").click()
    page.locator("#gallery .thumbnail-item").first.click(timeout=30_000)
    page.locator("#details").get_by_text("What ran").wait_for(timeout=30_000)
    keep(page, "gallery")
    page.get_by_role("button", name="Use these settings").click()
    page.locator("#generate-button").wait_for(state="visible", timeout=30_000)
    assert page.get_by_label("Prompt").first.input_value() != ""


def test_a_wrong_job_file_is_told_and_a_right_one_runs(page, tmp_path):
    page.get_by_role("tab", name="Batch").click()
    wrong, right = tmp_path / "wrong.csv", tmp_path / "right.csv"
    wrong.write_text("prompt,colour\na,b\n")
    right.write_text('id,prompt,seed\nmine,a red circle,"0,1"\n')
    chooser = page.locator("#job-file input[type=file]")
    chooser.set_input_files(str(wrong))
    page.get_by_text("wrong.csv").first.wait_for(timeout=30_000)
    page.get_by_role("button", name="Run the file").click()
    page.get_by_text("unknown key").first.wait_for(timeout=30_000)
    keep(page, "wrong_file")
    page.get_by_label("Clear").first.click()
    chooser.set_input_files(str(right))
    page.get_by_text("right.csv").first.wait_for(timeout=30_000)
    page.get_by_role("button", name="Run the file").click()
    page.get_by_text("2 of 2 settled: 2 done").wait_for(timeout=120_000)
    keep(page, "batch")


def test_a_picture_that_is_none_is_told(page, server, tmp_path):
    if not page.get_by_text("First frame (optional)").count():
        pytest.skip("this model takes no picture")
    wrong = tmp_path / "wrong.png"
    wrong.write_text("this is no picture")
    page.get_by_text("First frame (optional)").first.click()
    with page.expect_response(lambda answer: "/upload?" in answer.url, timeout=30_000):
        page.locator("input[type=file][accept*='image']").first.set_input_files(str(wrong))
    page.wait_for_timeout(1000)
    generate(page, "a large red circle")
    page.locator(".toast-body").get_by_text("cannot be read as a picture").first.wait_for(timeout=60_000)


def test_a_phone_shows_everything_without_scrolling_sideways(browser, server):
    context = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme="dark", is_mobile=True)
    tab = context.new_page()
    tab.goto(server.address + "?__theme=dark")
    tab.get_by_label("Prompt").first.wait_for(timeout=60_000)
    generate(tab, "a large red circle")
    wait_done(tab)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 391
    keep(tab, "phone_dark")
    context.close()
