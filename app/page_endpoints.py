"""The page's endpoints for programs, declared to gradio: names, types, one line of help each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_type_hints

import gradio as gr

from ..pipelines.recipe import Recipe
from .page_api import ServiceApi
from .page_errors import owner_of, user_errors


def add_endpoints(api: ServiceApi, recipes_of_page: Sequence[Recipe], own: Recipe) -> None:
    """Adds them to the page that is being built.

    Args:
        api: what they do.
        recipes_of_page: the presets that the model can run.
        own: the recipe that it is loaded with.
    """

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
        return api.service.cancel(id, owner_of(http))

    def history(offset: int = 0, count: int = 24, http: gr.Request = None) -> list:  # type: ignore[assignment]
        """Finished clips, the newest first."""
        with user_errors():
            return api.history(owner_of(http), offset, count)

    def recipes() -> list:
        """The recipes that this model can run, with all their settings."""
        return api.recipes(recipes_of_page, own)

    for function in (generate, submit, status, cancel, history, recipes):
        function.__annotations__ = get_type_hints(function)  # gradio reads types here, and not their names
        gr.api(function, api_name=function.__name__, concurrency_limit=None)
