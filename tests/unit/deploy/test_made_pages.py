"""The pages that are made of the program are what their generators write."""

from types import ModuleType

import pytest

from deploy import cli_page, errors_page, gpu_page, settings_page


@pytest.mark.parametrize(
    "generator", [settings_page, cli_page, errors_page, gpu_page], ids=lambda module: module.__name__
)
def test_the_page_is_made_of_the_program(generator: ModuleType) -> None:
    made = generator.page()
    assert generator.PAGE.read_text(encoding="utf-8") == made, f"run `python -m {generator.__name__}`"
