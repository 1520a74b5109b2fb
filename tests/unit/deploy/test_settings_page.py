"""The page of settings is what its generator writes."""

from deploy.settings_page import PAGE, page


def test_the_page_of_settings_is_made_of_the_settings() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m deploy.settings_page`"
