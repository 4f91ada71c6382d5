"""The training methods, one file each."""

if not __name__.startswith("videospark."):
    raise ImportError("import this package as videospark.distill.methods: a second copy under its bare name hides bugs")
