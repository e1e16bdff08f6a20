"""Hooks of mkdocs: put the pages outside docs/ on the site, and point links between files to the site's pages.

Invariant: every page is written for the repository, where its links are relative paths. Only this file knows the site.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
# File in the repository -> page of the site. README is the site's first page.
OUTSIDE = {
    "README.md": "index.md",
    "FORMAT.md": "specification.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "kernels/NOTES.md": "kernel-notes.md",
    "quantize/NOTES.md": "quantizer-notes.md",
}
_LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(?=\))")
_FENCE = re.compile(r"(^```.*?^```$)", flags=re.MULTILINE | re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside docs/ to the files of the site."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page with each link to a file of the repository replaced by a link to the file's page."""
    source = page.file.src_uri
    place = next((path for path, target in OUTSIDE.items() if target == source), f"docs/{source}")

    def to_page(match: re.Match[str]) -> str:
        opening, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
        path = OUTSIDE.get(path, path.removeprefix("docs/"))
        return f"{opening}{posixpath.relpath(path, posixpath.dirname(source) or '.')}{anchor}"

    pieces = _FENCE.split(markdown)
    return "".join(piece if index % 2 else _LINK.sub(to_page, piece) for index, piece in enumerate(pieces))
