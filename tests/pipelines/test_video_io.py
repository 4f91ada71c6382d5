"""Videos go through ffmpeg whole, and no Python runs between fork and exec."""

import contextlib
import subprocess

import imageio.v3 as imageio
import numpy as np
import pytest

from videospark.pipelines.video_io import decoded_size, save_video


def clip(frames=5, height=30, width=46):
    picture = np.linspace(0, 255, height * width * 3).reshape(1, height, width, 3)
    return np.repeat(picture, frames, axis=0).astype(np.uint8)


@pytest.mark.parametrize("fps", [8, 23.976, 0.5])
def test_what_is_written_is_read_again(tmp_path, fps):
    frames = clip()
    path = save_video(frames, tmp_path / "http:a.mp4", fps)  # a name, no protocol
    assert decoded_size(path) == (46, 30, 5)
    path = path.rename(tmp_path / "a.mp4")
    read = np.stack(list(imageio.imiter(path)))
    assert read.shape == frames.shape and np.abs(read.astype(int) - frames).mean() < 4
    facts = imageio.immeta(path)
    assert facts["fps"] == pytest.approx(fps, rel=0.01) and facts["codec"] == "h264"
    assert facts["pix_fmt"].startswith("yuv420p")
    assert [p.name for p in tmp_path.iterdir()] == ["a.mp4"]


def test_what_is_cut_off_or_no_video_does_not_count(tmp_path):
    path = save_video(clip(17), tmp_path / "a.mp4", 8)
    (tmp_path / "half.mp4").write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with contextlib.suppress(OSError):  # it fails or gives less: that depends on where it was cut
        assert decoded_size(tmp_path / "half.mp4")[2] < 17
    (tmp_path / "text.mp4").write_text("no video")
    for name in ("text.mp4", "nowhere.mp4"):
        with pytest.raises(OSError, match="ffmpeg ended with"):
            decoded_size(tmp_path / name)


def test_a_failing_ffmpeg_says_why_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("imageio_ffmpeg.get_ffmpeg_exe", lambda: "/bin/false")
    with pytest.raises(OSError, match="ffmpeg ended with 1: it said nothing"):
        save_video(clip(), tmp_path / "a.mp4", 8)
    assert not list(tmp_path.iterdir())


def test_no_python_runs_in_the_child(tmp_path, monkeypatch):
    """A server has threads whose locks the child of a fork would never get."""
    asked, popen = [], subprocess.Popen

    def watched(*arguments, **options):
        asked.append(options.get("preexec_fn"))
        return popen(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", watched)
    decoded_size(save_video(clip(), tmp_path / "a.mp4", 8))
    assert asked == [None, None]
