"""What people touch: the command line and the web page. Nothing heavy is imported until a command runs."""

if not __name__.startswith("videospark."):
    raise ImportError("import this package as videospark.app: a second copy under its bare name hides bugs")
