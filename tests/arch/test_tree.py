"""What the tree promises about itself: size of files, no machine paths, no pointers outside the project."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = ("expert_store", "drafter", "mlx_flashnext", "cli")
TEXT = {".py", ".md", ".toml", ".json", ".yaml", ".jinja"}
MACHINE_PATH = re.compile(r"/(?:work|root|home/[a-z]+|Users/[a-z]+)/")
OUTSIDE = re.compile(r"\.\./shared|\.library")


def texts() -> list[pathlib.Path]:
    """Return the text files of the project, generated and hidden ones left out."""
    places = [*PACKAGES, "tests", "bench", "docs"]
    found = [path for place in places for path in (ROOT / place).rglob("*") if path.suffix in TEXT]
    return [*found, ROOT / "README.md", ROOT / "pyproject.toml"]


def test_product_files_stay_under_five_hundred_lines() -> None:
    long = {
        path.relative_to(ROOT).as_posix(): lines
        for place in PACKAGES
        for path in (ROOT / place).rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > 500
    }
    assert long == {}


def test_no_file_names_a_place_on_somebodys_machine_or_outside_the_project() -> None:
    here = pathlib.Path(__file__)
    bad = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in texts()
        if path != here
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if MACHINE_PATH.search(line) or OUTSIDE.search(line)
    ]
    assert bad == []


def test_every_format_constant_is_documented() -> None:
    documented = (ROOT / "docs/FORMATS.md").read_text()
    missing = [
        f"{path.relative_to(ROOT)}: {value}"
        for place in PACKAGES
        for path in (ROOT / place).rglob("*.py")
        for value in re.findall(r'^FORMAT = "([^"]+)"', path.read_text(), flags=re.MULTILINE)
        if value not in documented
    ]
    assert missing == []


def test_every_study_is_listed_once():
    table = (ROOT / "bench" / "README.md").read_text()
    studies = [path for path in (ROOT / "bench" / "studies").glob("*.py") if "__main__" in path.read_text()]
    assert len(studies) > 20
    assert {path.name: table.count(f"`studies/{path.name}`") for path in studies} == {
        path.name: 1 for path in studies
    }
