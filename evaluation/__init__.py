"""Measures of quality and diversity on the tiny world."""

if not __name__.startswith("videospark."):
    raise ImportError("import this package as videospark.evaluation: a second copy under its bare name hides bugs")
