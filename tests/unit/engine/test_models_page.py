"""docs/models.md and the README name what is supported."""

from tandem.engine.models.families import families
from tandem.protocol.generate import ROOT


def test_every_architecture_is_in_the_table() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    table = page.partition("## Supported architectures")[2].partition("## Tokenizers")[0]
    named = {
        word for line in table.splitlines() if line.startswith("| `") for word in line.split("|")[1].split("`")[1::2]
    }
    assert named == {name for family in families() for name in family.architectures}
