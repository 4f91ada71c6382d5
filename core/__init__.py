"""Configuration, devices and numerics: what every other package stands on."""

if not __name__.startswith("videospark."):
    raise ImportError("import this package as videospark.core: a second copy under its bare name hides bugs")
