"""The user's folder for files that can be regenerated."""

import os
from pathlib import Path


def user_cache(name: str) -> Path:
    """Return tandem/`name` in $XDG_CACHE_HOME or ~/.cache; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem" / name
