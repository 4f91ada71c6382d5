"""Checkpoints of Wan and of its published students, from and to folders of the diffusers layout.

`convert_checkpoint` reads a file or folder and writes a folder, `revert_checkpoint` goes the other way. Both stream: a
file is never in memory as a whole, and nothing is left behind where something is wrong.
"""

from __future__ import annotations

from .forward import ConversionReport, convert_checkpoint
from .reverse import revert_checkpoint
from .students import FORMATS

__all__ = ["FORMATS", "ConversionReport", "convert_checkpoint", "revert_checkpoint"]
