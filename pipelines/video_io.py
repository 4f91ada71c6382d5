"""Images in, videos out."""

from __future__ import annotations

import math
import os
import subprocess
import tempfile
import uuid
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from ..core.config import require

VIDEO_SUFFIX = ".mp4"


def read_image(path: str | Path) -> Image.Image:
    """The picture as RGB, upright: EXIF orientation applied, transparency over black, 16-bit grey scaled to 8.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: the file is not a readable picture.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"image: got {str(path)!r}; must be an existing picture file")
    try:
        with Image.open(path) as opened:
            image = ImageOps.exif_transpose(opened)
            image.load()
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        require(False, "image", str(path), f"a readable picture ({error})")
    return to_rgb(image)


def to_rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB of any PIL mode; transparent parts become black."""
    if image.mode.startswith("I"):
        pixels = np.asarray(image).astype(np.float64)
        return Image.fromarray(np.clip(pixels / 257, 0, 255).round().astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        layer = image.convert("RGBA")
        black = Image.new("RGBA", layer.size, (0, 0, 0, 255))
        return Image.alpha_composite(black, layer).convert("RGB")
    return image.convert("RGB")


def check_output(path: str | Path) -> Path:
    """Makes sure, before any work, that a video can be written here; makes missing parent folders.

    Raises:
        ConfigError: wrong suffix, a folder of that name, or a parent that cannot be made or written to.
    """
    path = Path(path)
    require(path.suffix.lower() == VIDEO_SUFFIX, "output", str(path), f"a file name ending in {VIDEO_SUFFIX}")
    require(not path.is_dir(), "output", str(path), "a file, but there is a folder of this name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        require(False, "output", str(path), f"in a folder that can be written to ({error.strerror or error})")
    return path


def frames_to_uint8(array: np.ndarray) -> np.ndarray:
    """[F, H, W, 3] floats in 0..1 to uint8, clipped; uint8 passes through.

    Raises:
        FloatingPointError: NaN or infinite values, which would otherwise become black frames.
    """
    array = np.asarray(array)
    if array.dtype == np.uint8:
        return array
    broken = int(array.size - np.isfinite(array).sum())
    if broken:
        raise FloatingPointError(f"frames: {broken} of {array.size} values are NaN or infinite; no video is written")
    return (np.clip(array.astype(np.float32), 0, 1) * 255).round().astype(np.uint8)


def write_atomically(path: Path, write: Callable[[Path], object]) -> Path:
    """Lets `write` fill a temporary file beside `path`, then renames; nothing is left where it fails."""
    partial = path.with_name(f".{uuid.uuid4().hex}.partial{path.suffix}")
    try:
        write(partial)
        if partial.stat().st_size == 0:
            raise OSError(f"output: nothing was written to {str(path)!r}")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def save_video(frames: np.ndarray, path: str | Path, fps: float) -> Path:
    """Writes H.264 (yuv420p) that browsers play.

    Args:
        frames: uint8 [F, H, W, 3]; height and width even.
        path: file ending in .mp4.
        fps: frames per second, more than 0.

    Raises:
        ConfigError: frames, rate or path that cannot be written.
        OSError: ffmpeg failed; with what it said.
    """
    path = check_output(path)
    frames = np.ascontiguousarray(frames)
    good = frames.dtype == np.uint8 and frames.ndim == 4 and frames.shape[0] > 0 and frames.shape[-1] == 3
    require(good, "frames", f"{frames.dtype} {frames.shape}", "uint8 of shape [F, H, W, 3]")
    height, width = frames.shape[1:3]
    require(height % 2 == 0 and width % 2 == 0, "frames", (height, width), "of even height and width for yuv420p")
    require(math.isfinite(fps) and fps > 0, "fps", fps, "more than 0")

    given = [
        "-f",
        "rawvideo",
        "-s",
        f"{width}x{height}",
        "-pix_fmt",
        "rgb24",
        "-r",
        str(Fraction(fps).limit_denominator()),
    ]
    wanted = ["-an", "-vcodec", "libx264", "-pix_fmt", "yuv420p", "-crf", "10", "-movflags", "+faststart"]

    def write(partial: Path) -> None:
        _run_ffmpeg(["-y", *given, "-i", "-", *wanted, f"file:{partial}"], frames.tobytes())

    return write_atomically(path, write)


def decoded_size(path: str | Path) -> tuple[int, int, int]:
    """Width, height and number of the frames of a video that can be decoded.

    Raises:
        OSError: ffmpeg cannot read it; with what it said.
    """
    stream = _run_ffmpeg(["-i", f"file:{path}", "-f", "yuv4mpegpipe", "-pix_fmt", "yuv420p", "-"])
    header, _, rest = stream.partition(b"\n")
    sizes = {field[:1]: int(field[1:]) for field in header.split() if field[:1] in (b"W", b"H") and field[1:].isdigit()}
    if len(sizes) != 2:
        raise OSError(f"{path}: no video")
    width, height = sizes[b"W"], sizes[b"H"]
    # A frame is a line "FRAME", then Y of every pixel and U and V of every four.
    return width, height, len(rest) // (6 + width * height + 2 * ((width + 1) // 2) * ((height + 1) // 2))


def _run_ffmpeg(arguments: list[str], data: bytes = b"") -> bytes:
    """What imageio's ffmpeg writes to its output.

    imageio-ffmpeg's own reader and writer run Python between fork and exec, which hangs now and then where the process
    has other threads, as a server has; `start_new_session` keeps interrupts from ffmpeg without that.
    """
    from imageio_ffmpeg import get_ffmpeg_exe

    command = [get_ffmpeg_exe(), "-v", "error", *arguments]
    done = subprocess.run(command, input=data, capture_output=True, start_new_session=True, check=False)
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise OSError(f"ffmpeg ended with {done.returncode}: {said[-1] if said else 'it said nothing'}")
    return done.stdout


def contact_sheet(frames: np.ndarray, path: str | Path, max_frames: int = 12, columns: int = 4) -> Path:
    """One PNG with evenly spaced frames, row by row, the first and the last among them."""
    count = min(len(frames), max_frames)
    chosen = np.linspace(0, len(frames) - 1, count).round().astype(int)
    height, width = frames.shape[1:3]
    columns = min(columns, count)
    sheet = Image.new("RGB", (columns * width, -(-count // columns) * height))
    for place, index in enumerate(chosen):
        sheet.paste(Image.fromarray(frames[index]), (place % columns * width, place // columns * height))
    return write_atomically(Path(path), lambda partial: sheet.save(partial))
