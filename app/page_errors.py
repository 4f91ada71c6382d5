"""Who asks, and what they are told where a handler of the page goes wrong."""

from __future__ import annotations

import html
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gradio as gr

from .page_api import public_error

_LOG = logging.getLogger("videospark.page")
QUIET = {"api_visibility": "private", "show_progress": "hidden"}
"""For the page's own handlers: no endpoints, and no spinner over what they update."""


def owner_of(http: gr.Request | None) -> str | None:
    """The user who logged in; None where there is no login, and everything is everybody's."""
    return getattr(http, "username", None)


def user_error(text: str) -> gr.Error:
    """What the page shows in a corner, escaped; raise it."""
    return gr.Error(html.escape(text, quote=False), print_exception=False)


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
        raise user_error(text) from None


def refuse_no_pictures(component: gr.Image) -> None:
    """Lets a component say that a file is no picture; by itself gradio shows the one word "Error"."""
    read = component.preprocess

    def checked(payload: Any) -> Any:
        try:
            return read(payload)
        except gr.Error:
            raise
        except Exception:
            _LOG.info("an uploaded picture cannot be read", exc_info=True)
            raise user_error(
                "image: got a file that cannot be read as a picture; must be a PNG, JPEG or WebP"
            ) from None

    component.preprocess = checked
