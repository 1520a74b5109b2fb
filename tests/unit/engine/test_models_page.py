"""docs/models.md and the README name what is supported."""

import pytest
import torch

from tandem.engine.models.allocation import allocate_parameters
from tandem.engine.models.families import families, is_supported
from tandem.engine.models.load_spec import parse_spec
from tandem.engine.models.parameters import tensors_of
from tandem.protocol.errors import ModelError
from tandem.protocol.generate import ROOT
from tests.unit.engine.published_models import MODELS, Refused, Served, table_row


def test_every_architecture_is_in_the_table() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    table = page.partition("## Supported architectures")[2].partition("## Tokenizers")[0]
    named = {
        word for line in table.splitlines() if line.startswith("| `") for word in line.split("|")[1].split("`")[1::2]
    }
    assert named == {name for family in families() for name in family.architectures}


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if isinstance(model, Served)])
def test_a_model_by_name_has_its_published_number_of_parameters(name: str) -> None:
    model = MODELS[name]
    assert isinstance(model, Served)
    weights = allocate_parameters(model.spec, torch.bfloat16, torch.device("meta"))
    assert sum(tensor.numel() for _, tensor in tensors_of(weights)) / 1e9 == pytest.approx(model.billions, rel=0.01)


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if isinstance(model, Refused)])
def test_a_model_that_the_page_refuses_is_refused(name: str) -> None:
    model = MODELS[name]
    assert isinstance(model, Refused)
    if model.config is None:
        assert not is_supported({"architectures": [model.architecture]})
        return
    assert is_supported({"architectures": [model.architecture]})
    with pytest.raises(ModelError, match=r"is not supported"):
        parse_spec(model.config)


def rows_by_name() -> list[str]:
    page = (ROOT / "docs" / "models.md").read_text()
    section = page.partition("## Models by name")[2].partition("\n## ")[0]
    _, *rows = [line for line in section.splitlines() if line.startswith("| ")]
    return rows


def test_the_table_names_all_models_in_their_order() -> None:
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows_by_name()] == list(MODELS)


@pytest.mark.parametrize(("name", "row"), list(zip(MODELS, rows_by_name(), strict=False)))
def test_a_row_of_the_table_has_the_sizes_that_the_code_computes(name: str, row: str) -> None:
    assert row == table_row(name, MODELS[name])
