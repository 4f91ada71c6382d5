"""The tab *Look inside*: which blocks of keys a sparse clip attended to, by layer, head and step."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from ..pipelines.generation import GenerationRequest
from ..pipelines.recipe import Recipe
from . import page_view as view
from .block_maps import BlockMaps
from .page_errors import QUIET, owner_of, user_errors
from .page_style import empty_html
from .service import GenerationService
from .service_data import Status

_LEGEND = (
    '<div class="vs-legend"><span>left out</span><span class="vs-ramp" role="img" '
    'aria-label="dark is left out, bright is kept"></span><span>kept</span></div>'
    '<p class="vs-note">Queries go down, keys go right, both in the order in which attention takes them. '
    "Recording waits for every layer, so the times of this clip are no measure of speed.</p>"
)


class LookTab:
    """Makes a clip with a sparse recipe, records its block maps, and shows them."""

    def __init__(self, service: GenerationService, recipes: Sequence[Recipe], own: Recipe) -> None:
        self.service, self.own = service, own
        self.sparse = [recipe for recipe in recipes if view.is_sparse(recipe)]
        self.load = functools.lru_cache(maxsize=8)(BlockMaps.load)  # of moved sliders; files never change

    def build(self, tab: gr.Tab) -> None:
        """Lays it out; a page without a sparse recipe says so.

        Args:
            tab: this one; opening it finds the clip that this browser looked at last.
        """
        choices = view.recipe_choices(self.sparse, self.own)[0 if view.is_sparse(self.own) else 1 :]
        if not choices:
            gr.HTML(empty_html("This model has no recipe that leaves blocks out."))
            return
        current = gr.BrowserState(None, storage_key="videospark-look")
        gr.Markdown("Makes a clip and keeps which blocks its sparse attention looked at.")
        with gr.Row():
            prompt = gr.Textbox(label="Prompt", elem_id="look-prompt", scale=3, placeholder="What the clip shows")
            recipe = gr.Dropdown(choices, value=choices[0][1], label="Recipe", scale=2)
            seed = gr.Number(label="Seed", value=0, precision=0, minimum=0, scale=1, min_width=100)
        run = gr.Button("Make it and look", variant="primary", elem_id="look-button")
        status = gr.HTML(view.status_html(None), elem_id="look-status")
        with gr.Row():
            with gr.Column(scale=2, min_width=260):
                video = gr.Video(label="Clip", interactive=False, loop=True, autoplay=True, elem_classes="vs-media")
                step = gr.Slider(0, 1, step=1, value=0, label="Recorded step")
                layer = gr.Slider(0, 1, step=1, value=0, label="Layer")
                head = gr.Slider(-1, 1, step=1, value=-1, label="Head (-1: mean of all)")
            with gr.Column(scale=3, min_width=260):
                words = gr.HTML("", elem_id="look-words")
                picture = gr.Image(
                    label="Kept blocks", interactive=False, format="png", elem_classes="vs-map", elem_id="look-map"
                )
                gr.HTML(_LEGEND)
        targets = [current, status, video, step, layer, head, words, picture]
        run.click(self._run, [prompt, recipe, seed], targets, **QUIET)
        tab.select(self._resume, [current], targets, **QUIET)
        for slider in (step, layer, head):
            slider.change(self._draw, [current, step, layer, head], [words, picture], **QUIET)

    def _run(self, prompt: str, recipe: str, seed: float | None, http: gr.Request) -> Iterator[Any]:
        owner = owner_of(http)
        with user_errors():
            request = GenerationRequest(prompt or "", seed=int(seed or 0))
            chosen = view.chosen_recipe(recipe, None, self.sparse, self.own)
            request_id = self.service.submit(request, chosen, owner=owner, label="look inside", record_maps=True)
        yield from self._follow(request_id, owner)

    def _resume(self, current: str | None, http: gr.Request) -> Iterator[Any]:
        if isinstance(current, str):
            yield from self._follow(current, owner_of(http))

    def _follow(self, request_id: str, owner: str | None) -> Iterator[Any]:
        for snapshot in self.service.watch(request_id, owner):
            if snapshot.status is not Status.done:
                yield (request_id, view.status_html(snapshot), *[gr.skip()] * 6)
        clip = self.service.clip(request_id, owner)
        if clip is None:
            return
        if not clip.maps_path.is_file():
            text = "Every layer was dense: the clip is too short for this recipe, or the recipe keeps everything."
            yield (request_id, view.status_html(None, text), str(clip.video), *[gr.skip()] * 3, "", None)
            return
        maps = self.load(clip.maps_path)
        steps, layers, heads = maps.shares.shape[:3]
        yield (
            request_id, view.status_html(None, "Done."), str(clip.video),
            gr.update(maximum=max(steps - 1, 1), value=0), gr.update(maximum=max(layers - 1, 1), value=0),
            gr.update(maximum=max(heads - 1, 0), value=-1), *_drawn(maps, 0, 0, -1),
        )  # fmt: skip

    def _draw(self, current: str | None, step: float, layer: float, head: float, http: gr.Request) -> tuple[Any, Any]:
        clip = self.service.clip(current, owner_of(http)) if isinstance(current, str) else None
        if clip is None or not Path(clip.maps_path).is_file():
            return gr.skip(), gr.skip()
        with user_errors():
            return _drawn(self.load(clip.maps_path), int(step), int(layer), int(head))


def _drawn(maps: BlockMaps, step: int, layer: int, head: int) -> tuple[str, Any]:
    steps, layers, heads = maps.shares.shape[:3]  # a slider has two ends even where there is one layer
    step, layer, one = min(step, steps - 1), min(layer, layers - 1), None if head < 0 else min(head, heads - 1)
    share = float(maps.share(step, layer, one).mean())
    return view.look_html(maps, step, layer, one, share), maps.picture(step, layer, one)
