"""The documents hang together: generated pages are current, every page has its place, every link leads somewhere."""

import inspect
import re
import shutil
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from harness import cli, errors
from scripts import reference_pages, terminal_picture

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
SITE = YAML(typ="safe").load((ROOT / "mkdocs.yml").read_text())
LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)\)")


def placed(entries):
    """The pages that a navigation names, in order."""
    for entry in entries:
        for target in entry.values():
            if isinstance(target, str):
                yield target
            else:
                yield from placed(target)


def anchors(path):
    """The anchors of a page's headings, as the site makes them."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ +(.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}


@pytest.mark.parametrize("name", reference_pages.pages())
def test_a_reference_page_says_what_the_code_says(name):
    written = (DOCS / "reference" / name).read_text()
    assert written == reference_pages.pages()[name], "run `python scripts/reference_pages.py`"


def test_every_page_has_one_place_on_the_site():
    named = list(placed(SITE["nav"]))
    there = [str(page.relative_to(DOCS)) for page in PAGES]
    assert sorted(named) == sorted(there)


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_a_page_and_a_heading_there(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    lost = []
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            lost.append(target)
    assert lost == []


def test_the_exit_codes_are_those_of_the_errors_everywhere():
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.HarnessError)]
    codes = {0, cli.BUG, *(kind.exit_code for kind in kinds)}
    assert codes == {0, 1, 2, 3, 4, 5, 6, 70, 130}
    page = (DOCS / "reference" / "exit-codes.md").read_text()
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", page, flags=re.MULTILINE)} == codes
    for text in (cli.EXIT_CODES, (ROOT / "README.md").read_text().partition("Exit codes")[2][:400]):
        assert {code for code in codes if re.search(rf"\b{code}\s", text)} == codes


def test_every_verb_stands_in_the_readme():
    [verbs] = [action.choices for action in cli.parser()._actions if action.choices and action.dest != "version"]
    rows = (ROOT / "README.md").read_text().partition("| verb |")[2].partition("\n\n")[0]
    named = [name for row in rows.splitlines() for name in re.findall(r"`([a-z]+)`", row.split("|")[1])]
    assert sorted(named) == sorted(verbs)


def test_a_page_that_the_code_writes_says_so():
    assert all((DOCS / "reference" / name).read_text().startswith("<!-- made by ") for name in reference_pages.pages())


def test_pictures_load_nothing_from_elsewhere():
    pictures = [path.read_text() for path in DOCS.rglob("*.svg")]
    pictures.append(terminal_picture.picture(["--version"]))
    assert len(pictures) > 1
    for drawn in pictures:
        assert "@font-face" not in drawn
        assert not re.search(r'(href|src)="https?:|url\("?https?:', drawn)


def test_the_site_is_built_strictly_and_whole_without_a_network(tmp_path, monkeypatch):
    main = pytest.importorskip("zensical.main", reason="zensical is in the `docs` dependency group")
    from click.testing import CliRunner

    shutil.copytree(DOCS, tmp_path / "docs")
    shutil.copyfile(ROOT / "mkdocs.yml", tmp_path / "mkdocs.yml")
    monkeypatch.chdir(tmp_path)
    built = CliRunner().invoke(main.cli, ["build", "--strict", "--config-file", "mkdocs.yml"])
    assert built.exit_code == 0, built.output
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) >= len(PAGES)
    loaded = [
        tag
        for page in pages
        for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page.read_text())
        if re.search(r'(?:src|href)="(?:https?:)?//', tag)
    ]
    assert loaded == []
