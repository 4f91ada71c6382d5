"""`python -m videospark` is the `videospark` command."""

from .app.cli import main

if __name__ == "__main__":
    main()
