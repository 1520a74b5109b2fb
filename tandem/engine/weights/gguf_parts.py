"""The files of a GGUF model: one, or several parts, which llama.cpp names NAME-00001-of-00003.gguf and so on."""

import re
from pathlib import Path

from tandem.protocol.errors import ModelError

_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def part_names(file: str) -> list[str]:
    """Return the names of all files of the model to which `file`, a name or path, belongs; the first part first."""
    match = _part(file)
    if match is None:
        return [file]
    name, count = match["name"], int(match["count"])
    return [f"{name}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def model_name(file: Path) -> str:
    """Return the name of a GGUF model: its file's without the extension and without the number of the part."""
    match = _part(file.name)
    return file.stem if match is None else match["name"]


def require_first_part(file: str) -> None:
    """Raise ModelError if `file` is the name or path of a part of a model, but not of the first one."""
    first = part_names(file)[0]
    if file != first:
        raise ModelError(f"{file} is not the first part of its model; name that instead, {first}.")


def gguf_files(path: Path) -> list[Path]:
    """Return the files of a GGUF model, given as its file, its first part, or a folder that holds no other model.

    The list is empty if `path` is a folder with safetensors or without a GGUF file. A path that does not exist is
    returned. Raises ModelError if a part is missing, if `path` is not the first one, or for a folder with two models.
    """
    if path.is_dir():
        inside = sorted(file.name for file in path.glob("*.gguf"))
        if not inside or any(path.glob("*.safetensors")):
            return []
        models = sorted({part_names(name)[0] for name in inside})
        if len(models) > 1:
            raise ModelError(f"{path} has several GGUF models; name the file of one of them: {', '.join(models)}.")
        path = path / models[0]
    require_first_part(str(path))
    files = [path.parent / name for name in part_names(path.name)]
    missing = [file.name for file in files if not file.is_file()]
    if len(files) > 1 and missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(
            f"{path.parent} lacks {missing[0]}{more} of the {len(files)} parts of the model; put all into this folder."
        )
    return files


def _part(file: str) -> re.Match[str] | None:
    match = _PART.fullmatch(file)
    return match if match is not None and 1 <= int(match["number"]) <= int(match["count"]) else None
