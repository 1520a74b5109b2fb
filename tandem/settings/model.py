"""The settings of the served model: its files and its names."""

from dataclasses import dataclass
from pathlib import Path

from tandem.settings.parsing import existing, names
from tandem.settings.setting import Settings, Topic, required, setting


@dataclass(frozen=True, slots=True)
class ModelSettings(Settings):
    """The files of the served model, and the names by which clients call it."""

    model: Path = required(
        help="Hugging Face folder, GGUF file, or a repository of the Hugging Face Hub, ORG/NAME[@REVISION]"
        "[:FILE.gguf]; default: SmolLM2-135M-Instruct.",
        topic=Topic.FIRST,
        kind=str,
        parse=lambda _option, path: Path(path),
    )
    """Once the cluster runs, this is the path of a checked folder in Hugging Face layout."""
    served_model_names: tuple[str, ...] = setting(
        (),
        help="Names by which clients call the model, the first of which answers have; default: that of --model.",
        topic=Topic.FIRST,
        option="served-model-name",
        metavar="NAME [NAME...]",
        parse=names,
    )
    tokenizer: Path | None = setting(
        None,
        help="Folder with the tokenizer and its chat templates; default: the model's own.",
        topic=Topic.MODEL,
        parse=existing,
    )
    """None = the model folder."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model in requests; without `served_model_names`, the name of the model folder."""
        return self.served_model_names or (self.model.name,)

    @property
    def name(self) -> str:
        """The model's name in answers, the first of its names."""
        return self.names[0]

    @property
    def tokenizer_folder(self) -> Path:
        """The folder with the tokenizer: `tokenizer` if it is set, else `model`."""
        return self.tokenizer or self.model
