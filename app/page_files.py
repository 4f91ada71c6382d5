"""Which files the page's server hands out: those of clips, and gradio's own copies of uploads; nothing behind links."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

_FILE_ROUTE = re.compile(r"/file[=/]")
"""Gradio serves files under both."""
_CLIP_FILE = re.compile(r"\d{8}-\d{6}-[0-9a-f]{16}\.(mp4|png|json|thumb\.jpg|input\.png)")
_Scope = dict[str, Any]


class OnlyClips:
    """An ASGI middleware before gradio's route `/file=`.

    Gradio compares paths as they are written, so a link inside of the served folder would lead out of it, and it would
    fetch `http` addresses for whoever asks. Here a path is resolved first, and has to be a clip's file or lie in one
    of gradio's own folders.

    Args:
        app: the next one.
        folder: of the clips.
        caches: gradio's folders for uploads and copies.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], folder: Path, caches: Sequence[Path]) -> None:
        self.app, self.folder = app, Path(folder).resolve()
        self.caches = [Path(cache).resolve() for cache in caches]

    async def __call__(self, scope: _Scope, receive: Any, send: Any) -> None:
        """Passes a request on, or answers 403."""
        if scope["type"] == "http" and not self.allows(scope["path"]):
            headers = [(b"content-type", b"text/plain")]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": b"not a file of this page"})
            return
        await self.app(scope, receive, send)

    def allows(self, path: str) -> bool:
        """Whether a request's path asks for no file, or for one that may be had."""
        match = _FILE_ROUTE.search(path)
        if match is None:
            return "/proxy=" not in path
        asked = path[match.end() :]
        try:
            plain = Path(unquote(asked))
            target = plain.resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            return False
        if target.parent == self.folder:
            return bool(_CLIP_FILE.fullmatch(target.name)) and not plain.is_symlink()
        return any(target.is_relative_to(cache) for cache in self.caches)
