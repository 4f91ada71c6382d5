"""The web page on the service, built with gradio: generate, compare, look inside, look back, run a job file; an API.

This file has the first tab and puts the others (`page_tabs`, `page_look`) beside it. What they show is made in
`page_view`, what the endpoints do in `page_api`, and everything that matters happens in `service`: a closed tab ends
nothing, and a reload finds its clip again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from ..pipelines.generation import GenerationRequest, default_settings
from ..pipelines.recipe import Recipe
from . import page_view as view
from .engine import usable_recipes
from .history import Clip
from .page_api import ServiceApi
from .page_endpoints import add_endpoints
from .page_errors import QUIET, owner_of, refuse_no_pictures, user_errors
from .page_look import LookTab
from .page_style import header_html
from .page_tabs import BatchTab, CompareTab, GalleryTab
from .service import GenerationService
from .service_data import Status

IDLE = "Ready. Say what the clip shows, or take an example."
LOADING = "Loading the model: the clip begins when it is there."
RECENT_CLIPS = 50
"""How far back the time of a recipe is looked for."""


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
        kind = getattr(planned, "pipeline_class", type(planned)).__name__
        both = bool(getattr(planned.config, "expand_timesteps", False))
        self.takes_pictures = both or kind == "WanImageToVideoPipeline"
        self.needs_picture = self.takes_pictures and not both

    def build(self) -> gr.Blocks:
        """The whole page."""
        with gr.Blocks(title="videospark", analytics_enabled=False) as blocks:
            gr.HTML(header_html(self.service.model_name))
            with gr.Tabs() as tabs:
                with gr.Tab("Generate", id="generate"):
                    form = self._generate_tab(blocks)
                with gr.Tab("Compare", id="compare"):
                    CompareTab(self.service, self.recipes, self.own).build()
                with gr.Tab("Look inside", id="look") as look_tab:
                    LookTab(self.service, self.recipes, self.own).build(look_tab)
                with gr.Tab("Gallery", id="gallery") as gallery_tab:
                    GalleryTab(self.service, self.recipes).build(gallery_tab, tabs, form)
                with gr.Tab("Batch", id="batch"):
                    BatchTab(self.service).build()
            add_endpoints(self.api, self.recipes, self.own)
        return blocks

    # Generate

    def _generate_tab(self, blocks: gr.Blocks) -> dict[str, Any]:
        current = gr.BrowserState(None, storage_key="videospark-current")
        with gr.Row():
            with gr.Column(scale=2, min_width=300):
                form, card = self._form()
                with gr.Row():
                    run = gr.Button("Generate", variant="primary", elem_id="generate-button", min_width=120)
                    stop = gr.Button("Stop", elem_id="stop-button", min_width=120)
                if self.examples:
                    gr.Examples([[text] for text in self.examples], [form["prompt"]], label="Examples")
            with gr.Column(scale=3, min_width=300):
                outputs = self._outputs()
        targets = [current, *outputs.values()]
        for begins in (run.click, form["prompt"].submit):
            made = begins(self._generate, [*form.values()], targets, **QUIET)
            made.then(self._card, [form["recipe"]], [card], **QUIET)  # it has been measured now
        stop.click(self._stop, [current], None, **QUIET)
        blocks.load(self._resume, [current], targets, **QUIET)
        blocks.load(self._card, [form["recipe"]], [card], **QUIET)
        return form

    def _form(self) -> tuple[dict[str, Any], Any]:
        ranges, defaults = self.ranges, self.defaults
        form: dict[str, Any] = {}
        form["prompt"] = gr.Textbox(
            label="Prompt", lines=3, max_length=self.service.limits.max_prompt_characters, elem_id="prompt",
            placeholder="What the clip shows",
        )  # fmt: skip
        label = "First frame" if self.needs_picture else "First frame (optional)"
        with gr.Accordion(label, open=self.needs_picture, visible=self.takes_pictures):
            form["image"] = gr.Image(
                label="First frame", show_label=False, type="filepath", sources=["upload", "clipboard"], height=180
            )
            refuse_no_pictures(form["image"])
        choices = view.recipe_choices(self.recipes, self.own)
        form["recipe"] = gr.Dropdown(choices, value=view.OWN_RECIPE, label="Recipe", elem_id="recipe")
        card = gr.HTML(view.recipe_html(self.own, self.defaults, None), elem_id="recipe-card")
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
                0.05,
                1.0,
                value=self.own.attention.keep_ratio,
                step=0.05,
                label="Kept share of the key blocks",
                visible=view.is_sparse(self.own),
            )
            form["guidance"] = gr.Number(
                label="Guidance (empty: of the recipe)", value=None, minimum=0, visible=view.is_guided(self.own)
            )
            form["negative_prompt"] = gr.Textbox(label="Not in the clip", visible=view.is_guided(self.own))
        form["recipe"].change(
            self._recipe_changed, [form["recipe"]],
            [card, form["keep_ratio"], form["guidance"], form["negative_prompt"]], **QUIET,
        )  # fmt: skip
        return form, card

    def _outputs(self) -> dict[str, Any]:
        return {
            "status": gr.HTML(view.status_html(None, IDLE), elem_id="status"),
            "preview": gr.Image(label="Preview", interactive=False, visible=False, height=260, format="jpeg"),
            "video": gr.Video(
                label="Clip", interactive=False, autoplay=True, loop=True, elem_id="clip", elem_classes="vs-media",
                height=400,
            ),
            "stages": gr.HTML("", elem_id="stages"),
            "report": gr.HTML("", elem_id="report"),
            "sidecar": gr.DownloadButton("Download the sidecar: it makes the clip again", visible=False, size="sm"),
        }  # fmt: skip

    def _recipe_changed(self, name: str, http: gr.Request) -> tuple[Any, ...]:
        recipe = self._recipe(name)
        guided = view.is_guided(recipe)
        ratio = recipe.attention.keep_ratio
        slider = gr.update(visible=view.is_sparse(recipe), value=ratio, minimum=min(ratio, 0.05))
        return self._card(name, http), slider, gr.update(visible=guided, value=None), gr.update(visible=guided)

    def _card(self, name: str, http: gr.Request) -> str:
        """What the recipe costs and gives; the time is that of the latest clip made with it here."""
        asked = None if name in (None, "", view.OWN_RECIPE) else name
        recent = self.service.history.page(0, RECENT_CLIPS, owner_of(http))
        latest = next((clip.sidecar for clip in recent if clip.origin.get("recipe") == asked), None)
        return view.recipe_html(self._recipe(name), self.defaults, latest)

    def _recipe(self, name: str | None) -> Recipe:
        return next((recipe for recipe in self.recipes if recipe.name == name), self.own)

    def _generate(
        self, prompt, image, recipe, seed, width, height, num_frames, keep_ratio, guidance, negative_prompt,
        http: gr.Request,
    ) -> Iterator[Any]:  # fmt: skip
        owner = owner_of(http)
        if not self.service.is_ready:
            yield (gr.skip(), view.status_html(None, LOADING), *[gr.skip()] * 5)
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
        return (
            done, gr.update(value=None, visible=False), str(clip.video), view.stages_html(clip.sidecar["stages"]),
            view.report_html(clip.sidecar), gr.update(value=str(clip.sidecar_path), visible=True),
        )  # fmt: skip

    def _stop(self, current: str | None, http: gr.Request) -> None:
        if isinstance(current, str):
            self.service.cancel(current, owner_of(http))
