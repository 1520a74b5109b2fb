"""Reads adapter folders in a separate process with a time limit.

A regular expression in an adapter's config may take exponential time, and parsing holds the GIL: neither may stop the
engine of a serving worker. The process gets the folder as its argument and prints one JSON object, with the `updates`
or an `error`.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.engine.adapters.folder import CONFIG, WEIGHTS, AdapterFolder, LowRank, read_updates
from tandem.engine.weights.safetensors_file import TensorEntry
from tandem.protocol.errors import ModelError

_CPU_S = 5
"""Maximum CPU time for reading a folder, in seconds; unlike wall-clock time, it does not grow with the host's load.

The largest headers take less than one second.
"""
_WAIT_S = 120.0
"""Wall-clock seconds after which the process is killed, for example if the file system does not answer."""
_READ_BYTES = 1 << 20


def read_adapter(path: Path) -> AdapterFolder:
    """Read the config and the tensor header of an adapter folder, and hash both files.

    It blocks, so call it in a thread. Raises ModelError as `read_updates` does, and if reading takes too long.
    """
    updates = _read_apart(path)
    return AdapterFolder(path, _hash(path), updates)


def check_unchanged(folder: AdapterFolder) -> None:
    """Raise ModelError if the adapter's files have changed since `read_adapter` hashed them.

    If the files changed while the tensors were read, the tensors may come from different versions of the adapter.
    """
    if _hash(folder.path) != folder.identity:
        raise ModelError(f"{folder.path} changed while it was read; load it once it is written.")


def _read_apart(path: Path) -> Mapping[str, LowRank]:
    reply = json.loads(_output_of_process(path))
    if "error" in reply:
        raise ModelError(reply["error"])
    return {module: _update(path / WEIGHTS, *described) for module, described in reply["updates"].items()}


def _output_of_process(path: Path) -> bytes:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "tandem.engine.adapters.reader", str(path), str(_CPU_S)]
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=env, timeout=_WAIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"{path} was not read within {_WAIT_S:g} s; look at its file system.") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read now, as no process starts ({error}); try again.") from error
    if ended.returncode == -signal.SIGXCPU:
        raise ModelError(
            f"{path} takes more than {_CPU_S} s to read; simplify the regular expressions of rank_pattern and"
            f" alpha_pattern in {CONFIG}."
        )
    if ended.returncode:
        raise ModelError(f"{path} cannot be read: the process that reads it ended with {ended.returncode}.")
    return ended.stdout


def _update(file: Path, a: Mapping[str, Any], b: Mapping[str, Any], scale: float) -> LowRank:
    first, second = (TensorEntry(file, entry["dtype"], tuple(entry["shape"]), entry["start"]) for entry in (a, b))
    return LowRank(first, second, scale)


def _hash(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    try:
        for name in (CONFIG, WEIGHTS):
            with (path / name).open("rb") as stream:
                while piece := stream.read(_READ_BYTES):
                    digest.update(piece)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); is this process allowed to read it?") from error
    return digest.hexdigest()


def _reply(path: Path) -> Mapping[str, object]:
    try:
        updates = read_updates(path)
    except ModelError as error:
        return {"error": error.message}
    # A malformed file may cause any exception.
    except Exception as error:
        return {"error": f"{path} cannot be read as an adapter ({type(error).__name__}: {error}); save it again."}
    described = {
        module: [_described(update.a), _described(update.b), update.scale] for module, update in updates.items()
    }
    return {"updates": described}


def _described(entry: TensorEntry) -> Mapping[str, object]:
    return {"dtype": entry.dtype, "shape": entry.shape, "start": entry.start}


def main() -> None:
    """Run the reading process; its arguments are the folder and its limit of CPU time in seconds."""
    # Windows does not have it; `tandem plan` there imports this module, too.
    import resource

    seconds = int(time.process_time()) + 1 + int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(json.dumps(_reply(Path(sys.argv[1]))))


if __name__ == "__main__":
    main()
