"""The chat templates of a model folder by name (most folders have only `default`), and those shipped with Tandem."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.protocol.errors import InvalidArgument
from tandem.tokenizers.model_folder import read_json

DEFAULT = "default"
"""The name of the template for conversations without tools."""
FOR_TOOLS = "tool_use"
"""The name of the template for conversations with tools, if a folder has one."""
_SHIPPED = Path(__file__).parent / "chat_templates"
"""The folder of shipped templates with tools (NAME.jinja), for models whose own templates have no tools."""


def template_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the sources of all templates of a folder by name; `config` is its tokenizer_config.json.

    As in transformers, chat_template.jinja and additional_chat_templates/NAME.jinja take precedence over
    `chat_template` in tokenizer_config.json, which is a string or a list of named templates. Multimodal models may have
    their templates in chat_template.json.
    """
    sources = _named(read_json(folder, "chat_template.json").get("chat_template"))
    sources |= _named(config.get("chat_template"))
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[file.stem] = file.read_text(encoding="utf-8")
    if (folder / "chat_template.jinja").is_file():
        sources[DEFAULT] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return sources


def read_template(choice: str, folder: Path) -> str:
    """Return the source of the chat template that an operator has configured.

    `choice` is a file, the name of one of the folder's templates, or the name of a shipped template. Raises
    InvalidArgument if it is not one of these or the file cannot be read.
    """
    path = Path(choice)
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidArgument("--chat-template", f"{choice} cannot be read ({error}); give a Jinja file") from error
    shipped = {file.stem: file for file in _SHIPPED.glob("*.jinja")}
    sources = template_sources(folder, read_json(folder, "tokenizer_config.json"))
    if choice in sources:
        return sources[choice]
    if choice in shipped:
        return shipped[choice].read_text(encoding="utf-8")
    names, others = ", ".join(sorted(sources)) or "none", ", ".join(sorted(shipped))
    raise InvalidArgument(
        "--chat-template",
        f"{choice} is no file; the names of the model's templates are: {names}; those that Tandem ships: {others}",
    )


def _named(value: Any) -> dict[str, str]:
    """Return the templates in a JSON value by name; the value is a string, an object, or a list of named templates."""
    if isinstance(value, str):
        return {DEFAULT: value}
    if isinstance(value, Mapping):
        return {name: source for name, source in value.items() if isinstance(source, str)}
    listed = [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, list) else []
    return {str(entry.get("name")): entry["template"] for entry in listed if isinstance(entry.get("template"), str)}
