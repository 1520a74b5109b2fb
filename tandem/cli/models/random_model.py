"""Creates a model folder without weights for performance runs: a real model's shape and a matching tokenizer."""

import json
import shutil
from pathlib import Path

from tandem.cli.models.default_model import find_default_model
from tandem.engine.models.load_spec import load_spec
from tandem.engine.models.shapes import write_shape
from tandem.engine.weights.gguf import default_cache, prepare_model

_TOKENIZER = "tokenizer.json"
_TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def random_model(shape: str) -> Path:
    """Create a model folder with the shape named `shape` ("llama-3-8b") in the user's cache, and return its path.

    The folder is for `EngineSettings.random_weights`. Its tokenizer is the default model's, extended to the shape's
    vocabulary size: with random weights any token id can be sampled, and a client that counts or times text needs some
    text for each token id.
    Raises InvalidArgument for an unknown shape.
    """
    folder = write_shape(shape, default_cache() / f"random-{shape}")
    small = prepare_model(find_default_model())
    for name in _TOKENIZER_FILES:
        if (small / name).is_file():
            shutil.copyfile(small / name, folder / name)
    tokenizer = json.loads((small / _TOKENIZER).read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    known = 1 + max(vocabulary.values())
    # No merge yields these tokens, so prompts are encoded as before. Ġ is a space in byte-level vocabularies.
    vocabulary.update({f"Ġ{id_}": id_ for id_ in range(known, load_spec(folder).vocab_size)})
    (folder / _TOKENIZER).write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    return folder
