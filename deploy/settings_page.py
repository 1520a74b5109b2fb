"""Writes docs/settings.md, the table of all settings, from the settings tree: `python -m deploy.settings_page`."""

from itertools import groupby
from pathlib import Path

from tandem.settings.cluster import ClusterSettings
from tandem.settings.options import Option, options_of

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"
_HEAD = """# Settings

All options of `tandem up` and `tandem serve`, by topic. Each may also be a line of a YAML file (`--config FILE`; \
`--http-port` is `http-port: 8080`) or an environment variable (`TANDEM_HTTP_PORT`, unless the table names another). \
The command line comes before the environment, the environment before the file. This page is made of the fields in \
`tandem/settings/` by `python -m deploy.settings_page`."""


def page() -> str:
    """Return the page as Markdown."""
    parts = [_HEAD]
    for topic, options in groupby(options_of(ClusterSettings), key=lambda option: option.topic):
        parts += [f"\n## {topic}\n", "| option | default | |", "|---|---|---|", *map(_row, options)]
    return "\n".join(parts) + "\n"


def _row(option: Option) -> str:
    help_text = option.help.replace("|", "\\|")
    if option.setting.aliases:
        help_text += f" vLLM's name: {', '.join(f'`{alias}`' for alias in option.setting.aliases)}."
    if option.setting.variable:
        help_text += f" Variable: `{option.variable}`."
    default = "" if option.default in {None, ""} else f"`{option.default}`"
    flag = f"{option.flag} {option.setting.metavar or ''}".strip().replace("|", "\\|")
    return f"| `{flag}` | {default} | {help_text} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
