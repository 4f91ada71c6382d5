"""Nodes for ComfyUI: load a student, text or image to video, recipe.

ComfyUI finds them through one file, `ComfyUI/custom_nodes/videospark.py`, with one line:

    from videospark.app.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

This imports neither torch nor diffusers; they come with the first node that runs.
"""

from .nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]

if not __name__.startswith("videospark."):
    raise ImportError("import this package as videospark.app.comfyui: a second copy under another name hides bugs")
