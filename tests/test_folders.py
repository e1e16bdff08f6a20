"""The map in docs/development.md names every folder that holds modules, once, in the order of imports."""

import ast
import re
from pathlib import Path

from test_imports import ORDER

from helpers.documentation import PAGES
from helpers.modules import MODULES, ROOT

MAP = (ROOT / "docs" / "development.md").read_text()


def folders() -> set[str]:
    """Folders, relative to the root, that modules lie in."""
    return {f"{path.parent.relative_to(ROOT)}/" for path in MODULES.values()} | {"serving_examples/"}


def test_map_names_every_folder() -> None:
    listed = re.findall(r"^\| `([\w/]+/)` \|", MAP, flags=re.MULTILINE)
    assert sorted(listed) == sorted(folders())


def test_map_says_what_each_folder_says() -> None:
    rows = re.findall(r"^\| `([\w/]+/)` \| (.+) \|$", MAP, flags=re.MULTILINE)
    for folder, text in rows:
        said = ROOT / folder / "__init__.py"
        if said.exists() and folder != "vllm_latq/":
            assert text == " ".join(ast.literal_eval(said.read_text()).split()), folder


def test_map_is_in_the_order_of_imports() -> None:
    listed = re.findall(r"^\| `([\w/]+/)` \|", MAP, flags=re.MULTILINE)
    dotted = [folder.rstrip("/").replace("/", ".") for folder in listed]
    dotted = [name if name.startswith("vllm_latq") else f"vllm_latq.{name}" for name in dotted]
    places = [next((i for i, one in enumerate(ORDER) if f"{name}.".startswith(f"{one}.")), None) for name in dotted]
    known = [place for place in places if place is not None]
    assert known == sorted(known)


def test_make_targets_that_are_named_exist() -> None:
    """README names both commands of a new checkout."""
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {page: set(re.findall(r"(?:^ +|`)make (\w+)", page.read_text(), flags=re.MULTILINE)) for page in PAGES}
    assert {"demo", "test"} <= named[ROOT / "README.md"]
    assert set().union(*named.values()) <= targets


def test_paths_in_the_documentation_exist() -> None:
    for page in PAGES:
        named = re.findall(r"`((?:vllm_latq|quantize|kernels|tests|serving_examples|docs)/[\w/.]+)`", page.read_text())
        assert not [path for path in named if not (ROOT / Path(path)).exists()], page
