"""The user's cache folder, for files that can be created again."""

import os
from pathlib import Path


def user_cache(name: str) -> Path:
    """Return the folder tandem/`name` in $XDG_CACHE_HOME or ~/.cache; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem" / name
