"""The tabs beside Generate: compare with the teacher, look inside, past clips, files of jobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from ..pipelines.generation import GenerationRequest
from ..pipelines.recipe import Recipe
from ..pipelines.sidecar import request_from_sidecar
from . import page_view as view
from .engine import TEACHER
from .history import Clip
from .jobs import read_jobs
from .page_errors import QUIET, owner_of, user_error, user_errors
from .page_style import empty_html
from .service import GenerationService
from .service_data import Status

CLIPS_PER_PAGE = 24
MAX_FILE_JOBS = 200
REFRESH_SECONDS = 1.0


class CompareTab:
    """The same prompt and seed through a recipe and through the dense model."""

    def __init__(self, service: GenerationService, recipes: Sequence[Recipe], own: Recipe) -> None:
        self.service, self.recipes, self.own = service, recipes, own

    def build(self) -> None:
        """Lays it out."""
        ids = gr.State([])
        other = "its dense teacher" if self.service.comparison == TEACHER else "the model as it is, its teacher"
        gr.Markdown(f"The same prompt and seed twice: by the recipe, and by {other}.")
        prompt = gr.Textbox(label="Prompt", lines=2, elem_id="compare-prompt", placeholder="What both clips show")
        with gr.Row():
            choices = view.recipe_choices(self.recipes, self.own)
            sparse = next((recipe.name for recipe in self.recipes if view.is_sparse(recipe)), view.OWN_RECIPE)
            first = view.OWN_RECIPE if view.differs_from_dense(self.own) else sparse
            recipe = gr.Dropdown(choices, value=first, label="Recipe", scale=3)
            seed = gr.Number(label="Seed", value=0, precision=0, minimum=0, scale=1, min_width=120)
        with gr.Row():
            run = gr.Button("Compare", variant="primary", elem_id="compare-button")
            stop = gr.Button("Stop")
        with gr.Row():
            columns = []
            for label in ("Recipe", "Teacher (dense)"):
                with gr.Column(min_width=280):
                    video = {"label": label, "autoplay": True, "loop": True, "interactive": False, "height": 380}
                    columns += [gr.HTML(view.status_html(None)), gr.Video(**video, elem_classes="vs-media")]
        verdict = gr.HTML("", elem_id="verdict")
        run.click(self._compare, [prompt, recipe, seed], [ids, *columns, verdict], **QUIET)
        stop.click(self._stop, [ids], None, **QUIET)

    def _compare(self, prompt: str, recipe: str, seed: float | None, http: gr.Request) -> Iterator[Any]:
        owner = owner_of(http)
        with user_errors():
            request = GenerationRequest(prompt or "", seed=int(seed or 0))
            names = (view.chosen_recipe(recipe, None, self.recipes, self.own), self.service.comparison)
            for name in names:
                self.service.check(request, name)  # both or neither
            ids = [self.service.submit(request, name, owner=owner, label="compare") for name in names]
        clips: list[Clip | None] = [None, None]
        waiting = view.status_html(None, "Waiting for the other.")
        yield (ids, waiting, None, waiting, None, "")
        for place, request_id in enumerate(ids):
            for snapshot in self.service.watch(request_id, owner):
                shown = [gr.skip()] * 4
                shown[2 * place] = view.status_html(snapshot)
                if snapshot.status is Status.done and (clip := self.service.clip(request_id, owner)):
                    clips[place], shown[2 * place + 1] = clip, str(clip.video)
                yield (gr.skip(), *shown, gr.skip())
        if clips[0] and clips[1]:
            yield (*[gr.skip()] * 5, view.comparison_html(clips[0].sidecar, clips[1].sidecar))

    def _stop(self, ids: list[str], http: gr.Request) -> None:
        for request_id in ids:
            self.service.cancel(request_id, owner_of(http))


class GalleryTab:
    """Past clips, read from the folder: a reload or a restart loses none."""

    def __init__(self, service: GenerationService, recipes: Sequence[Recipe]) -> None:
        self.service, self.recipes = service, recipes

    def build(self, tab: gr.Tab, tabs: gr.Tabs, form: dict[str, Any]) -> None:
        """Lays it out.

        Args:
            tab: this one; opening it reads the folder.
            tabs: all of them.
            form: where the settings of a clip go.
        """
        shown, selected, page = gr.State([]), gr.State(None), gr.State(1)
        empty = gr.HTML(empty_html("No clips yet. The ones you make appear here."), visible=False)
        gallery = gr.Gallery(
            label="Past clips, the newest first", columns=5, height="auto", allow_preview=False,
            object_fit="cover", elem_id="gallery",
        )  # fmt: skip
        with gr.Row(visible=False) as pages:
            newer = gr.Button("Newer", size="sm")
            older = gr.Button("Older", size="sm")
        with gr.Row(visible=False, elem_id="details") as details:
            with gr.Column(scale=2, min_width=280):
                video = gr.Video(label="Clip", interactive=False, loop=True, autoplay=True, elem_classes="vs-media")
                with gr.Row():
                    again = gr.Button("Use these settings", variant="primary", min_width=140)
                    delete = gr.Button("Delete this clip", variant="stop", min_width=140)
                sidecar = gr.DownloadButton("Download the sidecar", size="sm")
            with gr.Column(scale=3, min_width=280):
                report = gr.HTML("")
        listed = [page, gallery, shown, empty, pages]
        chosen = [selected, details, video, report, sidecar]
        tab.select(self._list, [page], listed, **QUIET)
        newer.click(lambda at: max(1, at - 1), [page], [page], **QUIET).then(self._list, [page], listed, **QUIET)
        older.click(lambda at: at + 1, [page], [page], **QUIET).then(self._list, [page], listed, **QUIET)
        gallery.select(self._select, [shown], chosen, **QUIET)
        names = ("prompt", "recipe", "seed", "width", "height", "num_frames", "negative_prompt")
        again.click(self._settings_again, [selected], [tabs, *(form[name] for name in names)], **QUIET)
        deleted = delete.click(self._delete, [selected], chosen, **QUIET)
        deleted.then(self._list, [page], listed, **QUIET)

    def _list(self, page: int, http: gr.Request) -> tuple[Any, ...]:
        owner = owner_of(http)
        clips = self.service.history.page((page - 1) * CLIPS_PER_PAGE, CLIPS_PER_PAGE, owner)
        if not clips and page > 1:
            page = 1
            clips = self.service.history.page(0, CLIPS_PER_PAGE, owner)
        items = [view.gallery_item(clip) for clip in clips]
        several = page > 1 or len(clips) == CLIPS_PER_PAGE
        return (
            page, gr.update(value=items, visible=bool(items)), [clip.id for clip in clips],
            gr.update(visible=not items), gr.update(visible=several),
        )  # fmt: skip

    def _select(self, shown: list[str], event: gr.SelectData, http: gr.Request) -> tuple[Any, ...]:
        place = event.index if isinstance(event.index, int) else -1
        clip = self.service.clip(shown[place], owner_of(http)) if 0 <= place < len(shown) else None
        if clip is None:
            return _NONE_CHOSEN()
        report = view.report_html(clip.sidecar) + view.stages_html(clip.sidecar["stages"])
        return clip.id, gr.update(visible=True), str(clip.video), report, str(clip.sidecar_path)

    def _settings_again(self, selected: str | None, http: gr.Request) -> tuple[Any, ...]:
        clip = self._chosen(selected, http)
        with user_errors():
            request = request_from_sidecar(clip.sidecar_path)
        recipe = clip.origin.get("recipe")
        known = recipe if recipe in {r.name for r in self.recipes} else view.OWN_RECIPE
        return (
            gr.Tabs(selected="generate"), request.prompt, known, request.seed, request.width, request.height,
            request.num_frames, request.negative_prompt,
        )  # fmt: skip

    def _delete(self, selected: str | None, http: gr.Request) -> tuple[Any, ...]:
        self.service.history.delete(self._chosen(selected, http).id)
        return _NONE_CHOSEN()

    def _chosen(self, selected: str | None, http: gr.Request) -> Clip:
        clip = self.service.clip(selected, owner_of(http)) if selected else None
        if clip is None:
            raise user_error("Choose a clip first.")
        return clip


def _NONE_CHOSEN() -> tuple[Any, ...]:
    return None, gr.update(visible=False), None, "", None


class BatchTab:
    """A file of jobs, run when nothing else waits."""

    def __init__(self, service: GenerationService) -> None:
        self.service = service

    def build(self) -> None:
        """Lays it out."""
        gr.Markdown(
            "A file of jobs: .jsonl, .csv or .txt, one clip a line. They run when nothing else waits, also with the "
            "page closed; the clips are in the gallery. Long batches belong to `videospark batch`, which resumes."
        )
        group = gr.BrowserState(None, storage_key="videospark-batch")
        file = gr.File(
            label="Job file", file_types=[".jsonl", ".csv", ".txt"], type="filepath", height=140, elem_id="job-file"
        )
        with gr.Row():
            run = gr.Button("Run the file", variant="primary")
            stop = gr.Button("Stop all")
        summary = gr.HTML(empty_html(view.job_summary([])), elem_id="batch-summary")
        table = gr.Dataframe(
            headers=list(view.JOB_COLUMNS), label="Jobs", interactive=False, wrap=True, visible=False
        )  # fmt: skip
        timer = gr.Timer(REFRESH_SECONDS)
        run.click(self._run_file, [file], [group], **QUIET)
        stop.click(self._stop_file, [group], None, **QUIET)
        timer.tick(self._watch_file, [group], [summary, table], **QUIET)

    def _run_file(self, file: str | None, http: gr.Request) -> str:
        with user_errors():
            if not file:
                raise user_error("Choose a job file first.")
            jobs = read_jobs(file, allow_images=False, name=Path(file).name)
            if len(jobs) > MAX_FILE_JOBS:
                raise user_error(f"{len(jobs)} jobs; at most {MAX_FILE_JOBS} here.")
            return self.service.submit_group(jobs, owner=owner_of(http))

    def _watch_file(self, group: str | None, http: gr.Request) -> tuple[Any, Any]:
        if not isinstance(group, str):
            return gr.skip(), gr.skip()
        snapshots = self.service.group(group, owner_of(http))
        if not snapshots:
            return empty_html(view.job_summary([])), gr.update(visible=False)
        settled = sum(one.status.settled for one in snapshots) / len(snapshots)
        line = view.progress_html(view.job_summary(snapshots), settled)
        return line, gr.update(value=view.job_rows(snapshots), visible=True)

    def _stop_file(self, group: str | None, http: gr.Request) -> None:
        for snapshot in self.service.group(group or "", owner_of(http)):
            self.service.cancel(snapshot.id, owner_of(http))
