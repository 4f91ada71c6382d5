"""Training of sparse and few-step students: one loop, four methods, resumable runs."""

if not __name__.startswith("videospark."):
    raise ImportError("import this package as videospark.distill: a second copy under its bare name hides bugs")
