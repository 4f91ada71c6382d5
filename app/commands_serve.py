"""`videospark serve`: the web page and its API on this machine."""

from __future__ import annotations

import functools
import hashlib
import hmac
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from .console import require_at_least
from .model_folder import display_name, locate_model

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_GENERAL_EXAMPLES = (
    "a raccoon plays an electric guitar on a small stage, warm light",
    "waves roll onto a black beach at dawn, seen from above",
)


def serve(
    model: str | None = typer.Option(None, "--model", help="Folder or hub id; default: the embedded tiny model."),
    teacher: str | None = typer.Option(
        None, "--teacher", help="Dense model that Compare shows beside a student; tiny-3step has tiny."
    ),
    device: list[str] = typer.Option([], "--device", help="cpu, cuda:0, ...; several times for several workers."),
    offload: str = typer.Option("none", "--offload", help="none, experts, model, group, or auto: what fits first."),
    outputs: Path = typer.Option(Path("outputs/page"), "--outputs", help="Folder of the clips: the only one served."),
    host: str = typer.Option("127.0.0.1", "--host", help="Address to listen at; others than loopback need a login."),
    port: int = typer.Option(7860, "--port", help="0 takes a free one."),
    login_file: Path | None = typer.Option(None, "--login-file", help="Lines of user:password; asks for a login."),
    allow_anonymous: bool = typer.Option(False, "--allow-anonymous", help="No login although others can reach it."),
    max_queue: int = typer.Option(32, "--max-queue", help="Requests that may wait."),
    max_upload_mb: int = typer.Option(20, "--max-upload-mb", help="Largest file that may be sent here."),
    max_pixels: int | None = typer.Option(None, "--max-pixels", help="Most height x width x frames of a clip."),
) -> None:
    """Serve the web page until interrupted. Needs `pip install videospark\\[app]`."""
    for name, value, least in (
        ("port", port, 0), ("max_queue", max_queue, 1), ("max_upload_mb", max_upload_mb, 1),
        ("max_pixels", max_pixels, 1),
    ):  # fmt: skip
        require_at_least(name, value, least)
    login = read_logins(login_file) if login_file is not None else None
    if host not in _LOOPBACK and login is None and not allow_anonymous:
        raise ValueError(
            f"host: got {host!r}, which other machines can reach; must come with --login-file, or --allow-anonymous"
        )
    if outputs.exists() and not outputs.is_dir():
        raise NotADirectoryError(f"outputs: got {str(outputs)!r}; must be a folder, and this is a file")
    if importlib.util.find_spec("gradio") is None:
        raise ImportError("gradio is not installed; the page needs it: pip install 'videospark[app]'")
    from ..tiny import EMBEDDED

    located = locate_model(model)
    if teacher is None and model in EMBEDDED and model != "tiny":
        teacher = "tiny"
    server = Server(
        located,
        device or [None],
        outputs,
        _limits(max_queue, max_pixels),
        embedded=model is None or model in EMBEDDED,
        offload=offload,
        teacher=None if teacher is None else locate_model(teacher),
    )
    address = server.start(host, port, login, max_upload_mb)
    typer.echo(f"{address}  (clips in {outputs}; Ctrl-C ends it)")
    try:
        server.wait()
    finally:
        server.stop()


def _limits(max_queue: int, max_pixels: int | None) -> Any:
    from .service_data import ServiceLimits

    given = {"max_queue": max_queue, "max_pixels": max_pixels}
    return ServiceLimits(**{name: value for name, value in given.items() if value is not None})


def read_logins(path: Path) -> Callable[[str, str], bool]:
    """A check of user and password against a file with lines of `user:password`; # begins a comment line.

    Raises:
        ValueError: a line of another form, a user twice, or none at all.
    """
    known: dict[str, bytes] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        user, colon, password = line.strip().partition(":")
        if not (user and colon and password) or user in known:
            raise ValueError(f"login_file: line {number} of {str(path)!r} must be user:password, each user once")
        known[user] = _digest(password)
    if not known:
        raise ValueError(f"login_file: got {str(path)!r}, which names no user; must hold lines of user:password")

    def check(user: str, password: str) -> bool:
        expected = known.get(user, b"")
        return hmac.compare_digest(_digest(password), expected)

    return check


def _digest(password: str) -> bytes:
    """Of one length for all passwords, so that comparing takes the same time for all."""
    return hashlib.sha256(password.encode()).digest()


class Server:
    """Service, page and web server together.

    Args:
        model: folder or hub id.
        devices: one worker for each; None is the best device.
        outputs: folder of the clips.
        limits: a `ServiceLimits`.
        embedded: whether it is an embedded model, whose examples are captions of its world.
        offload: where the parts of the model lie, see `pipelines.offload.place`.
        teacher: the dense model that a student is compared with, folder or hub id.
        make_engine: makes the engine for a model and a device; an `Engine` with that offloading by default.
    """

    def __init__(
        self,
        model: str,
        devices: list[Any],
        outputs: Path,
        limits: Any,
        *,
        embedded: bool = False,
        offload: str = "none",
        teacher: str | None = None,
        make_engine: Callable[[str, Any], Any] | None = None,
    ) -> None:
        from ..core.devices import pick_device
        from .engine import Engine, planned_pipeline
        from .page import Page
        from .service import GenerationService

        make_engine = make_engine or functools.partial(Engine, offload=offload, teacher=teacher)
        planned, own = planned_pipeline(model)
        engines = [make_engine(model, pick_device(name)) for name in devices]
        self.service = GenerationService(engines, outputs, limits, display_name(model))
        self.blocks = Page(self.service, planned, own, examples_for(embedded)).build()
        self._is_launched = False

    def start(
        self, host: str = "127.0.0.1", port: int = 0, login: Callable[[str, str], bool] | None = None,
        max_upload_mb: float = 20,
    ) -> str:  # fmt: skip
        """Begins to serve; the model is loaded meanwhile. Returns the address."""
        from gradio.utils import get_cache_folder, get_upload_folder
        from starlette.middleware import Middleware

        from .page_files import OnlyClips
        from .page_style import CSS, THEME

        folder = self.service.history.folder
        caches = [Path(get_upload_folder()), Path(get_cache_folder())]
        only_clips = Middleware(OnlyClips, folder=folder, caches=caches)
        self.service.start()
        self.blocks.queue(max_size=200, default_concurrency_limit=64)
        _, address, _ = self.blocks.launch(
            server_name=host, server_port=port or free_port(host), auth=login, share=False, quiet=True, theme=THEME,
            css=CSS, allowed_paths=[str(folder)], blocked_paths=[str(folder / ".work")], show_error=False,
            max_file_size=int(max_upload_mb * 2**20), max_threads=128, prevent_thread_lock=True, inbrowser=False,
            ssr_mode=False, run_history=False, mcp_server=False, pwa=False, footer_links=["api"],
            app_kwargs={"middleware": [only_clips]},
        )  # fmt: skip
        self._is_launched = True
        return address

    def wait(self) -> None:
        """Returns when the server ends, or on an interrupt."""
        self.blocks.block_thread()

    def stop(self) -> None:
        """Ends the server, then what runs and waits."""
        if self._is_launched:
            self.blocks.close(verbose=False)
            self._is_launched = False
        self.service.close()


def examples_for(embedded: bool) -> list[str]:
    """Prompts to click: for the embedded model captions of its own world, in which alone it was trained."""
    if not embedded:
        return list(_GENERAL_EXAMPLES)
    from ..tiny.dataset import caption, sample_scene

    texts = dict.fromkeys(caption(sample_scene(seed), seed).text for seed in range(8))
    return list(texts)[:4]


def free_port(host: str) -> int:
    """A port that nobody listens at now."""
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
