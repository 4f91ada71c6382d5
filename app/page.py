"""The web page on the service, built with gradio: generate, compare, look back, run a file of jobs; and an API.

This file lays out the page and connects it. What it shows is made in `page_view`, what its endpoints do in `page_api`,
and everything that matters happens in `service`: a closed tab ends nothing, and a reload finds its clip again.
"""

from __future__ import annotations

import html
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_type_hints

import gradio as gr

from ..pipelines.generation import GenerationRequest, default_settings
from ..pipelines.recipe import Recipe
from ..pipelines.sidecar import request_from_sidecar
from . import page_view as view
from .engine import usable_recipes
from .history import Clip
from .jobs import read_jobs
from .page_api import ServiceApi, public_error
from .service import GenerationService
from .service_data import Status

_LOG = logging.getLogger("videospark.page")
CLIPS_PER_PAGE = 24
MAX_FILE_JOBS = 200
REFRESH_SECONDS = 1.0
CSS = """
.vs-status {font-size: 1rem; min-height: 1.5rem}
.vs-bar {height: .6rem; border-radius: .3rem; background: var(--neutral-200); overflow: hidden}
.dark .vs-bar {background: var(--neutral-700)}
.vs-fill {height: 100%; background: var(--primary-500); transition: width .2s}
.vs-report {overflow-x: auto}
.vs-report td, .vs-report th {padding: .15rem .8rem .15rem 0; text-align: left; font-size: .9rem}
@media (max-width: 640px) {.gradio-container {padding: .4rem !important}}
"""
THEME = gr.themes.Soft(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])


class Page:
    """The page of one service.

    Args:
        service: runs the requests; may still be loading its model.
        planned: the pipeline or a stand-in for it, from which sizes and recipes are read.
        own: the recipe that the model is loaded with.
        examples: prompts to click.
    """

    def __init__(self, service: GenerationService, planned: Any, own: Recipe, examples: Sequence[str]) -> None:
        self.service, self.planned, self.own, self.examples = service, planned, own, list(examples)
        self.recipes = usable_recipes(planned)
        self.api = ServiceApi(service, lambda: Path(gr.utils.get_upload_folder()))
        self.defaults = default_settings(planned)
        self.ranges = view.size_ranges(planned, self.defaults, service.limits)
        self.takes_pictures = bool(getattr(planned.config, "expand_timesteps", False)) or (
            getattr(planned, "pipeline_class", type(planned)).__name__ == "WanImageToVideoPipeline"
        )

    def build(self) -> gr.Blocks:
        """The whole page."""
        with gr.Blocks(title="videospark", analytics_enabled=False) as blocks:
            gr.Markdown(f"# videospark\nFast video generation. Model: **{html.escape(self.service.model_name)}**")
            with gr.Tabs() as tabs:
                with gr.Tab("Generate", id="generate"):
                    form, run = self._generate_tab(blocks)
                with gr.Tab("Compare", id="compare"):
                    self._compare_tab()
                with gr.Tab("Gallery", id="gallery") as gallery_tab:
                    self._gallery_tab(gallery_tab, tabs, form)
                with gr.Tab("Batch", id="batch"):
                    self._batch_tab(blocks)
            self._endpoints()
        return blocks

    # Generate

    def _generate_tab(self, blocks: gr.Blocks) -> tuple[dict[str, Any], Any]:
        current = gr.BrowserState(None, storage_key="videospark-current")
        with gr.Row():
            with gr.Column(scale=2, min_width=300):
                form = self._form()
                with gr.Row():
                    run = gr.Button("Generate", variant="primary", elem_id="generate-button")
                    stop = gr.Button("Stop", variant="stop", elem_id="stop-button")
                if self.examples:
                    gr.Examples([[text] for text in self.examples], [form["prompt"]], label="Examples")
            with gr.Column(scale=3, min_width=300):
                outputs = self._outputs()
        targets = [current, *outputs.values()]
        run.click(self._generate, [*form.values()], targets, api_visibility="private", show_progress="hidden")
        form["prompt"].submit(
            self._generate, [*form.values()], targets, api_visibility="private", show_progress="hidden"
        )
        stop.click(self._stop, [current], None, api_visibility="private", show_progress="hidden")
        blocks.load(self._resume, [current], targets, api_visibility="private", show_progress="hidden")
        return form, run

    def _form(self) -> dict[str, Any]:
        ranges, defaults = self.ranges, self.defaults
        form: dict[str, Any] = {}
        form["prompt"] = gr.Textbox(
            label="Prompt", lines=3, max_length=self.service.limits.max_prompt_characters, elem_id="prompt",
            placeholder="What the clip shows",
        )  # fmt: skip
        form["image"] = gr.Image(
            label="First frame (optional)", type="filepath", sources=["upload", "clipboard"],
            visible=self.takes_pictures, height=180,
        )  # fmt: skip
        choices = view.recipe_choices(self.recipes, self.own)
        form["recipe"] = gr.Dropdown(choices, value=view.OWN_RECIPE, label="Recipe", elem_id="recipe")
        with gr.Accordion("Advanced", open=False):
            form["seed"] = gr.Number(label="Seed (-1: a new one each time)", value=-1, precision=0, minimum=-1)
            with gr.Row():
                for name, label in (("width", "Width"), ("height", "Height"), ("num_frames", "Frames")):
                    allowed = ranges[name]
                    form[name] = gr.Slider(
                        allowed.first, allowed.last, value=allowed.nearest(defaults[name]), step=allowed.step,
                        label=label, min_width=140,
                    )  # fmt: skip
            form["keep_ratio"] = gr.Slider(
                0.05, 1.0, value=1.0, step=0.05, label="Kept share of the key blocks", visible=view.is_sparse(self.own)
            )
            form["guidance"] = gr.Number(
                label="Guidance (empty: of the recipe)", value=None, minimum=0, visible=view.is_guided(self.own)
            )
            form["negative_prompt"] = gr.Textbox(label="Not in the clip", visible=view.is_guided(self.own))
        form["recipe"].change(
            self._recipe_changed, [form["recipe"]], [form["keep_ratio"], form["guidance"], form["negative_prompt"]],
            api_visibility="private", show_progress="hidden",
        )  # fmt: skip
        return form

    def _outputs(self) -> dict[str, Any]:
        return {
            "status": gr.HTML(view.status_html(None), elem_id="status"),
            "preview": gr.Image(label="Preview", interactive=False, visible=False, height=260, format="jpeg"),
            "video": gr.Video(label="Clip", interactive=False, autoplay=True, loop=True, elem_id="clip"),
            "stages": gr.Dataframe(headers=list(view.STAGE_COLUMNS), label="Stages", interactive=False, visible=False),
            "report": gr.HTML(""),
            "sidecar": gr.File(label="Sidecar: makes the clip again", interactive=False, visible=False),
        }

    def _recipe_changed(self, name: str) -> tuple[Any, Any, Any]:
        recipe = self._recipe(name)
        guided = view.is_guided(recipe)
        ratio = recipe.attention.keep_ratio
        slider = gr.update(visible=view.is_sparse(recipe), value=ratio, minimum=min(ratio, 0.05))
        return slider, gr.update(visible=guided, value=None), gr.update(visible=guided)

    def _recipe(self, name: str | None) -> Recipe:
        return next((recipe for recipe in self.recipes if recipe.name == name), self.own)

    def _generate(
        self, prompt, image, recipe, seed, width, height, num_frames, keep_ratio, guidance, negative_prompt,
        http: gr.Request,
    ) -> Iterator[Any]:  # fmt: skip
        owner = owner_of(http)
        with user_errors():
            chosen = view.chosen_recipe(recipe, keep_ratio, self.recipes, self.own)
            guided = view.is_guided(self._recipe(recipe))
            request = GenerationRequest(
                prompt or "", negative_prompt=(negative_prompt or "") if guided else "", image=image,
                seed=int(seed if seed is not None else -1), width=int(width), height=int(height),
                num_frames=int(num_frames), guidance_scale=guidance if guided else None,
            )  # fmt: skip
            request_id = self.service.submit(request, chosen, owner=owner)
        yield from self._follow(request_id, owner)

    def _resume(self, current: str | None, http: gr.Request) -> Iterator[Any]:
        """After a reload: the request that this browser asked for last, running or done."""
        if isinstance(current, str):
            yield from self._follow(current, owner_of(http))

    def _follow(self, request_id: str, owner: str | None) -> Iterator[Any]:
        shown = None
        for snapshot in self.service.watch(request_id, owner):
            if snapshot.status is Status.done:
                break
            preview = gr.skip()
            if snapshot.preview is not None and snapshot.preview is not shown:
                shown = snapshot.preview
                preview = gr.update(value=shown, visible=True)
            elif snapshot.status.settled:
                preview = gr.update(value=None, visible=False)
            hidden = (gr.skip(),) * 4
            yield (request_id, view.status_html(snapshot), preview, *hidden)
        clip = self.service.clip(request_id, owner)
        if clip is not None:
            yield (request_id, *self._finished(clip))

    def _finished(self, clip: Clip) -> tuple[Any, ...]:
        done = view.status_html(self.service.snapshot(clip.id))
        rows = view.stage_rows(clip.sidecar["stages"])
        return (
            done, gr.update(value=None, visible=False), str(clip.video), gr.update(value=rows, visible=True),
            view.report_html(clip.sidecar), gr.update(value=str(clip.sidecar_path), visible=True),
        )  # fmt: skip

    def _stop(self, current: str | None, http: gr.Request) -> None:
        if isinstance(current, str):
            self.service.cancel(current, owner_of(http))

    # Compare

    def _compare_tab(self) -> None:
        gr.Markdown("The same prompt and seed twice: by the recipe, and by the model as it is, its teacher.")
        prompt = gr.Textbox(label="Prompt", lines=2, elem_id="compare-prompt")
        with gr.Row():
            choices = view.recipe_choices(self.recipes, self.own)
            first = next((recipe.name for recipe in self.recipes if view.is_sparse(recipe)), view.OWN_RECIPE)
            recipe = gr.Dropdown(choices, value=first, label="Recipe")
            seed = gr.Number(label="Seed", value=0, precision=0, minimum=0)
        run = gr.Button("Compare", variant="primary", elem_id="compare-button")
        with gr.Row():
            columns = []
            for label in ("Recipe", "Teacher (dense)"):
                with gr.Column(min_width=280):
                    columns += [gr.HTML(view.status_html(None)), gr.Video(label=label, autoplay=True, loop=True)]
        verdict = gr.HTML("", elem_id="verdict")
        outputs = [*columns, verdict]
        run.click(self._compare, [prompt, recipe, seed], outputs, api_visibility="private", show_progress="hidden")

    def _compare(self, prompt, recipe, seed, http: gr.Request) -> Iterator[Any]:
        owner = owner_of(http)
        with user_errors():
            request = GenerationRequest(prompt or "", seed=int(seed or 0))
            names = (view.chosen_recipe(recipe, None, self.recipes, self.own), "dense")
            for name in names:
                self.service.check(request, name)  # both or neither
            ids = [self.service.submit(request, name, owner=owner, label="compare") for name in names]
        clips: list[Clip | None] = [None, None]
        skipped = [gr.skip()] * 4
        for place, request_id in enumerate(ids):
            for snapshot in self.service.watch(request_id, owner):
                shown = list(skipped)
                shown[2 * place] = view.status_html(snapshot)
                if snapshot.status is Status.done and (clip := self.service.clip(request_id, owner)):
                    clips[place], shown[2 * place + 1] = clip, str(clip.video)
                yield (*shown, gr.skip())
        if clips[0] and clips[1]:
            text = view.comparison_text(clips[0].sidecar, clips[1].sidecar)
            yield (*skipped, f"<p>{html.escape(text)}</p>")

    # Gallery

    def _gallery_tab(self, tab: gr.Tab, tabs: gr.Tabs, form: dict[str, Any]) -> None:
        shown = gr.State([])
        selected = gr.State(None)
        page = gr.Number(label="Page", value=1, minimum=1, precision=0)
        gallery = gr.Gallery(label="Past clips, the newest first", columns=4, height="auto", allow_preview=False)
        video = gr.Video(label="Clip", interactive=False, loop=True)
        report = gr.HTML("")
        sidecar = gr.File(label="Sidecar", interactive=False, visible=False)
        with gr.Row():
            again = gr.Button("Use these settings")
            delete = gr.Button("Delete this clip", variant="stop")
        listing: dict[str, Any] = {"fn": self._list, "inputs": [page], "outputs": [gallery, shown]}
        quiet: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
        tab.select(**listing, **quiet)
        page.change(**listing, **quiet)
        gallery.select(self._select, [shown], [selected, video, report, sidecar], **quiet)
        names = ("prompt", "recipe", "seed", "width", "height", "num_frames", "negative_prompt")
        again.click(self._settings_again, [selected], [tabs, *(form[name] for name in names)], **quiet)
        deleted = delete.click(self._delete, [selected], [selected, video, report, sidecar], **quiet)
        deleted.then(**listing, **quiet)

    def _list(self, page: float | None, http: gr.Request) -> tuple[Any, list[str]]:
        offset = (max(int(page or 1), 1) - 1) * CLIPS_PER_PAGE
        clips = self.service.history.page(offset, CLIPS_PER_PAGE, owner_of(http))
        return [view.gallery_item(clip) for clip in clips], [clip.id for clip in clips]

    def _select(self, shown: list[str], event: gr.SelectData, http: gr.Request) -> tuple[Any, ...]:
        place = event.index if isinstance(event.index, int) else -1
        clip = self.service.clip(shown[place], owner_of(http)) if 0 <= place < len(shown) else None
        if clip is None:
            return None, None, "", gr.update(visible=False)
        sidecar = gr.update(value=str(clip.sidecar_path), visible=True)
        return clip.id, str(clip.video), view.report_html(clip.sidecar), sidecar

    def _settings_again(self, selected: str | None, http: gr.Request) -> tuple[Any, ...]:
        clip = self.service.clip(selected, owner_of(http)) if selected else None
        if clip is None:
            raise gr.Error("Choose a clip first.", print_exception=False)
        with user_errors():
            request = request_from_sidecar(clip.sidecar_path)
        recipe = clip.origin.get("recipe")
        known = recipe if recipe in {r.name for r in self.recipes} else view.OWN_RECIPE
        return (
            gr.Tabs(selected="generate"), request.prompt, known, request.seed, request.width, request.height,
            request.num_frames, request.negative_prompt,
        )  # fmt: skip

    def _delete(self, selected: str | None, http: gr.Request) -> tuple[Any, ...]:
        clip = self.service.clip(selected, owner_of(http)) if selected else None
        if clip is None:
            raise gr.Error("Choose a clip first.", print_exception=False)
        self.service.history.delete(clip.id)
        return None, None, "", gr.update(visible=False)

    # Batch

    def _batch_tab(self, blocks: gr.Blocks) -> None:
        gr.Markdown(
            "A file of jobs: .jsonl, .csv or .txt, one clip a line. They run when nothing else waits, also with the "
            "page closed; the clips are in the gallery. Long batches belong to `videospark batch`, which resumes."
        )
        group = gr.BrowserState(None, storage_key="videospark-batch")
        file = gr.File(label="Job file", file_types=[".jsonl", ".csv", ".txt"], type="filepath")
        with gr.Row():
            run = gr.Button("Run the file", variant="primary")
            stop = gr.Button("Stop all", variant="stop")
        summary = gr.HTML("")
        table = gr.Dataframe(headers=list(view.JOB_COLUMNS), label="Jobs", interactive=False, wrap=True)
        timer = gr.Timer(REFRESH_SECONDS)
        quiet: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
        run.click(self._run_file, [file], [group], **quiet)
        stop.click(self._stop_file, [group], None, **quiet)
        timer.tick(self._watch_file, [group], [summary, table], **quiet)

    def _run_file(self, file: str | None, http: gr.Request) -> str:
        with user_errors():
            if not file:
                raise gr.Error("Choose a job file first.", print_exception=False)
            jobs = read_jobs(file, allow_images=False, name=Path(file).name)
            if len(jobs) > MAX_FILE_JOBS:
                raise gr.Error(f"{len(jobs)} jobs; at most {MAX_FILE_JOBS} here.", print_exception=False)
            return self.service.submit_group(jobs, owner=owner_of(http))

    def _watch_file(self, group: str | None, http: gr.Request) -> tuple[Any, Any]:
        if not isinstance(group, str):
            return gr.skip(), gr.skip()
        snapshots = self.service.group(group, owner_of(http))
        return html.escape(view.job_summary(snapshots)), view.job_rows(snapshots)

    def _stop_file(self, group: str | None, http: gr.Request) -> None:
        for snapshot in self.service.group(group or "", owner_of(http)):
            self.service.cancel(snapshot.id, owner_of(http))

    # Endpoints

    def _endpoints(self) -> None:
        api = self.api

        def generate(
            prompt: str, negative_prompt: str = "", image: dict | None = None, seed: int = -1, width: int | None = None,
            height: int | None = None, frames: int | None = None, steps: int | None = None,
            guidance: float | None = None, recipe: str | None = None, http: gr.Request = None,  # type: ignore[assignment]
        ) -> dict:  # fmt: skip
            """Makes a clip and returns when it is there; None leaves a setting to recipe and model."""
            owner = owner_of(http)
            with user_errors():
                made = api.submit(
                    owner, prompt=prompt, negative_prompt=negative_prompt, image=image, seed=seed, width=width,
                    height=height, frames=frames, steps=steps, guidance=guidance, recipe=recipe,
                )  # fmt: skip
                return api.wait(owner, made["id"])

        def submit(
            prompt: str, negative_prompt: str = "", image: dict | None = None, seed: int = -1, width: int | None = None,
            height: int | None = None, frames: int | None = None, steps: int | None = None,
            guidance: float | None = None, recipe: str | None = None, http: gr.Request = None,  # type: ignore[assignment]
        ) -> dict:  # fmt: skip
            """Queues a clip and returns its id at once; ask `status` for it."""
            with user_errors():
                return api.submit(
                    owner_of(http), prompt=prompt, negative_prompt=negative_prompt, image=image, seed=seed,
                    width=width, height=height, frames=frames, steps=steps, guidance=guidance, recipe=recipe,
                )  # fmt: skip

        def status(id: str, http: gr.Request = None) -> dict:  # type: ignore[assignment]
            """Where a request stands, and its files once it is done."""
            with user_errors():
                return api.status(owner_of(http), id)

        def cancel(id: str, http: gr.Request = None) -> bool:  # type: ignore[assignment]
            """Ends a request; False where there is nothing to end."""
            return self.service.cancel(id, owner_of(http))

        def history(offset: int = 0, count: int = 24, http: gr.Request = None) -> list:  # type: ignore[assignment]
            """Finished clips, the newest first."""
            with user_errors():
                return api.history(owner_of(http), offset, count)

        def recipes() -> list:
            """The recipes that this model can run, with all their settings."""
            return api.recipes(self.recipes, self.own)

        for function in (generate, submit, status, cancel, history, recipes):
            function.__annotations__ = get_type_hints(function)  # gradio reads types here, and not their names
            gr.api(function, api_name=function.__name__, concurrency_limit=None)


def owner_of(http: gr.Request | None) -> str | None:
    """The user who logged in; None where there is no login, and everything is everybody's."""
    return getattr(http, "username", None)


@contextmanager
def user_errors() -> Iterator[None]:
    """Turns errors that the user can mend into gradio's, escaped; others go to the log and are told as such."""
    try:
        yield
    except gr.Error:
        raise
    except Exception as error:
        text = public_error(error)
        if text is None:
            _LOG.exception("a handler of the page failed")
            text = "something broke; the log says what"
        raise gr.Error(html.escape(text, quote=False), print_exception=False) from None
