"""Prepares the pages for MkDocs: `python -m infra.docs FOLDER`; `--check` only says which links are broken.

The site has the layout of the repository, so that links between pages and to files need no change.
"""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from pygments.formatters import HtmlFormatter

from infra.docs.pages import REPO, Page, all_pages, broken_links

CODE_STYLES = {"": "default", "[data-bs-theme=dark] ": "github-dark"}
"""Pygments' style of code in the light and in the dark theme, by the prefix of its CSS selectors."""


def stage(folder: Path, pages: Sequence[Page]) -> None:
    """Copy all pages, and all files that they link to, into a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    for file in {page.path for page in pages} | {page.target(link) for page in pages for link in page.links}:
        copy = folder / file.relative_to(REPO)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    css = [
        HtmlFormatter(style=style).get_style_defs(f"{where}.codehilite")
        for where, style in CODE_STYLES.items()
    ]
    (folder / "code.css").write_text("\n".join(css), encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Check all links, then copy what the site consists of. Returns the exit code."""
    pages = all_pages()
    broken = list(broken_links(pages))
    for line in broken:
        print(line, file=sys.stderr)
    if not broken and "--check" not in arguments:
        stage(Path(arguments[0]), pages)
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
