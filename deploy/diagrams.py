"""Draws the diagrams of the documentation, docs/diagrams/*.mmd, as SVG files: `python -m deploy.diagrams MERMAID`.

MERMAID is the script `package/dist/mermaid.min.js` of the npm package mermaid (`npm pack mermaid@11`). Pages show the
SVG files, so that they need no script and no network. Each file ends with the hash of the source that it was drawn of.
"""

import asyncio
import hashlib
import sys
from pathlib import Path

from deploy.browser import open_page

FOLDER = Path(__file__).parent.parent / "docs" / "diagrams"
_DRAW = """async (source) => {
    mermaid.initialize({startOnLoad: false, htmlLabels: false, flowchart: {htmlLabels: false, wrappingWidth: 320}});
    return (await mermaid.render("diagram", source)).svg;
}"""


def mark_of(source: str) -> str:
    """Return the comment at the end of the SVG file of this source."""
    return f"<!-- drawn from {hashlib.sha256(source.encode()).hexdigest()} -->\n"


async def draw(script: Path) -> None:
    """Draw every diagram in a headless Chromium, with Mermaid's `script`."""
    for file in sorted(FOLDER.glob("*.mmd")):
        source = file.read_text(encoding="utf-8")
        async with open_page() as page:
            await page.add_script_tag(path=script)
            svg: str = await page.evaluate(_DRAW, source)
        file.with_suffix(".svg").write_text(f"{svg}\n{mark_of(source)}", encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(draw(Path(sys.argv[1])))
