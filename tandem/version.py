"""The name and version of the installed distribution; `tandem` on PyPI is another project."""

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "tandem-serving"


def installed_version() -> str:
    """Return the version of the installed distribution; "0+source" if it is not installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "0+source"


def install_command(extra: str) -> str:
    """Return the command that installs the optional dependencies of this name, for messages."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
