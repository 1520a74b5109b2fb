"""Model folders: chat templates, special tokens, defaults, and what a broken one says."""

import json
import shutil
from pathlib import Path

import pytest

from router.chat_template import ChatTemplate, ChatTurn
from router.model_folder import GenerationDefaults, read_generation_defaults
from router.tokenizer import Tokenizer
from wire.errors import InvalidArgument, ModelError

TURNS = [ChatTurn("user", "<b>Hi</b> & 'you'")]


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(model, tmp_path / "model"))


def configure(folder: Path, **values: object) -> Tokenizer:
    config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, **values}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(folder)


def test_folder_without_or_with_a_broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json is no readable tokenizer"):
        Tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        Tokenizer(folder)


def test_broken_config_and_template(folder: Path) -> None:
    with pytest.raises(ModelError, match="does not compile"):
        configure(folder, chat_template="{% for %}")
    (folder / "tokenizer_config.json").write_text("nonsense")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json cannot be read"):
        Tokenizer(folder)


def test_bos_and_eos_follow_the_config(folder: Path) -> None:
    plain = configure(folder).encode("fox")
    assert configure(folder, add_bos_token=True).encode("fox") == [1, *plain]
    assert configure(folder, add_bos_token=True, add_eos_token=True).encode("fox") == [1, *plain, 2]
    assert configure(folder, add_bos_token=False).encode("fox") == plain


def test_template_places(folder: Path) -> None:
    with pytest.raises(InvalidArgument, match="no chat template"):
        configure(folder).encode_chat(TURNS)
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ bos_token }}yes"}]
    tokenizer = configure(folder, chat_template=named)
    assert tokenizer._inner.decode(tokenizer.encode_chat(TURNS), skip_special_tokens=False) == "<|im_start|>yes"
    (folder / "chat_template.jinja").write_text("file")
    tokenizer = configure(folder, chat_template="config")
    assert tokenizer.decode(tokenizer.encode_chat(TURNS)) == "file"


def test_template_environment() -> None:
    source = (
        "{% for m in messages %}\n{% if loop.index == 2 %}{% break %}{% endif %}\n{{ m | tojson }}\n{% endfor %}"
        "{% generation %}{{ strftime_now('%Y')[:2] }}{% endgeneration %}{{ tools is none }}"
    )
    rendered = ChatTemplate(source, {}).render([*TURNS, *TURNS])
    assert rendered == '{"role": "user", "content": "<b>Hi</b> & \'you\'"}\n20True'


def test_template_may_refuse() -> None:
    with pytest.raises(InvalidArgument, match="roles must alternate") as refusal:
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}).render(TURNS)
    assert refusal.value.field == "messages"


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ 1 / 0 }}",
    ],
)
def test_template_may_not_escape_nor_fail_otherwise(attack: str) -> None:
    with pytest.raises(InvalidArgument):
        ChatTemplate(attack, {}).render(TURNS)


def test_generation_defaults(folder: Path) -> None:
    assert read_generation_defaults(folder) == GenerationDefaults(1.0, 0, 1.0, 0.0)
    (folder / "generation_config.json").write_text(
        '{"temperature": 0.6, "top_k": 20, "top_p": null, "repetition_penalty": 1.05}'
    )
    assert read_generation_defaults(folder) == GenerationDefaults(0.6, 20, 1.0, 0.0, 1.05)
