"""The model that `tandem up` serves: its name, its tokenizer and template, and its context."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from router.text.answer_syntax.formats import choose_calls
from tandem.cli.start import serving
from tandem.cli.start.serving import StartView, _with_model
from tandem.protocol.errors import InvalidArgument, ModelError
from tandem.settings.cluster import ClusterSettings
from tests.factories import write_tiny_model
from tests.small_tokenizer import save_tokenizer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = write_tiny_model(tmp_path / "tiny")
    save_tokenizer(folder)
    templates = [{"name": "default", "template": "plain"}, {"name": "rag", "template": "with documents"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    return folder


def checked(model: Path | None, **settings: Any) -> ClusterSettings:
    with StartView(Console(quiet=True)) as view:
        return _with_model(ClusterSettings.of(Path(), **settings), model, view)


def test_a_model_has_the_name_of_its_folder_or_those_that_are_given(model: Path) -> None:
    assert checked(model).served.name == "tiny"
    named = checked(model, served_model_names=("big", "big-latest"))
    assert (named.served.model, named.served.names) == (model, ("big", "big-latest"))


def test_a_chat_template_is_a_file_or_one_of_the_models(model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("mine: {{ messages }}")
    assert checked(model).router.chat_template == ""
    assert checked(model, chat_template=str(tmp_path / "mine.jinja")).router.chat_template == "mine: {{ messages }}"
    assert checked(model, chat_template="rag").router.chat_template == "with documents"
    shipped = checked(model, chat_template="smollm2").router.chat_template
    assert choose_calls("auto", shipped) == "hermes"
    with pytest.raises(InvalidArgument, match=r"--chat-template: other is no file; .* are: default, rag; .*: smollm2"):
        checked(model, chat_template="other")
    (tmp_path / "broken.jinja").write_text("{{ messages")
    with pytest.raises(ModelError, match="does not compile"):
        checked(model, chat_template=str(tmp_path / "broken.jinja"))


def test_the_small_model_is_offered_tools_by_a_template_that_tandem_ships(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "find_default_model", lambda: model)
    assert choose_calls("auto", checked(None).router.chat_template) == "hermes"
    assert checked(None, chat_template="rag").router.chat_template == "with documents"


def test_a_tokenizer_of_another_folder_is_checked(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    with pytest.raises(ModelError, match="tokenizer"):
        checked(model)
    assert checked(model, tokenizer=tmp_path).served.tokenizer == tmp_path


def test_a_context_longer_than_the_models_is_refused(model: Path) -> None:
    longest = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    assert checked(model, max_model_len=longest).engine.max_model_len == longest
    with pytest.raises(InvalidArgument, match=f"is {longest + 1}, and the model's context has 1 to {longest} tokens"):
        checked(model, max_model_len=longest + 1)
    with pytest.raises(InvalidArgument, match="--max-model-len: 0 is less than 1"):
        checked(model, max_model_len=0)
