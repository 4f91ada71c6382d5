"""Recipes, acceleration of stock Wan pipelines, and generation with everything needed to repeat it."""

if not __name__.startswith("videospark."):
    raise ImportError("import this package as videospark.pipelines: a second copy under its bare name hides bugs")
