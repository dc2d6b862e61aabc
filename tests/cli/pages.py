"""Reads a page as a browser would, strictly: what is not as it must be is an assertion."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

VOID = {"meta", "br"}
DRAWN = {"rect", "line", "path"}
TAGS = {
    "html", "head", "meta", "title", "style", "body", "header", "main", "footer", "nav", "section", "h1",
    "h2", "h3", "p", "ul", "li", "a", "dl", "dt", "dd", "div", "span", "figure", "figcaption", "table",
    "caption", "thead", "tbody", "tr", "th", "td", "data", "details", "summary", "svg", "g", "desc", "text",
    *DRAWN,
}  # fmt: skip
UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}


@dataclass
class Element:
    """An element with what is in it."""

    tag: str
    attributes: dict[str, str | None]
    children: list[Element | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    def all(self, tag: str) -> list[Element]:
        """Every element of a kind within it, in order."""
        found = [self] if self.tag == tag else []
        for child in self.children:
            if isinstance(child, Element):
                found += child.all(tag)
        return found

    def every(self) -> list[Element]:
        """Itself and every element within it."""
        inner = [child for child in self.children if isinstance(child, Element)]
        return [self, *(one for child in inner for one in child.every())]


class Page(Element):
    """The root of a page."""

    def __init__(self) -> None:
        super().__init__("", {})
        self.ids: dict[str, Element] = {}

    def one(self, identity: str) -> Element:
        """The element of an id."""
        return self.ids[identity]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Page()
        self.open: list[Element] = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"an attribute twice: {tag} {names}"
        element = Element(tag, dict(attrs))
        self.open[-1].children.append(element)
        identity = element.attributes.get("id")
        if identity is not None:
            assert identity not in self.root.ids, f"an id twice: {identity}"
            self.root.ids[identity] = element
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in DRAWN, f"{tag} cannot close itself"
        self.open[-1].children.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> ends <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")

    def handle_pi(self, data: str) -> None:
        raise AssertionError(f"an instruction: {data}")


def read(page: str) -> Page:
    """Return a page's root, once it is sure that it is sound and needs nothing else."""
    assert page.startswith('<!DOCTYPE html>\n<html lang="en">')
    reader = _Reader()
    reader.feed(page.split("\n", 1)[1])
    reader.close()
    assert reader.open == [reader.root], f"never ended: {[one.tag for one in reader.open]}"
    root = reader.root
    check_needs_nothing(root, page)
    check_can_be_heard(root)
    return root


def check_needs_nothing(root: Page, page: str) -> None:
    """Nothing is fetched, run, or sent."""
    assert {one.tag for one in root.every()} - {""} <= TAGS
    (policy,) = [m for m in root.all("meta") if m.attributes.get("http-equiv") == "Content-Security-Policy"]
    assert policy.attributes["content"].startswith("default-src 'none'; style-src 'unsafe-inline'")
    for one in root.every():
        for name, value in one.attributes.items():
            assert not name.startswith("on"), f"a handler: {one.tag} {name}"
            assert name not in ("src", "srcset", "action", "formaction", "data", "poster", "xlink:href")
            if name == "href":
                assert value.startswith("#"), value
                root.one(value[1:])
            if name == "style":
                assert re.fullmatch(r"--share:[01]\.[0-9]{4}", value), value
    (style,) = root.all("style")
    assert "url(" not in style.text
    assert "@import" not in style.text
    assert "<" not in style.text
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", page)


def check_can_be_heard(root: Page) -> None:
    """What names an id finds it; every picture has a title, a description and a table."""
    for one in root.every():
        for name in ("aria-labelledby", "aria-describedby"):
            if name in one.attributes:
                assert root.one(one.attributes[name]).text.strip()
    for picture in root.all("svg"):
        if picture.attributes.get("role") == "img":
            assert [child.tag for child in picture.children if isinstance(child, Element)][:2] == [
                "title",
                "desc",
            ]
            assert root.one(picture.attributes["data-table"]).tag == "table"
        else:
            assert picture.attributes.get("aria-hidden") == "true" or picture.attributes["class"] == "mark"
    for table in root.all("table"):
        (caption,) = table.all("caption")
        assert caption.text
        head, *rows = table.all("tr")
        width = len(head.children)
        assert all(cell.attributes["scope"] == "col" for cell in head.all("th"))
        for row in rows:
            assert len(row.children) == width, f"{caption.text}: a row of {len(row.children)} under {width}"
            (name,) = row.all("th")
            assert name.attributes["scope"] == "row"
    for frame in root.all("div"):
        if frame.attributes.get("class") == "scroll":
            assert frame.attributes["tabindex"] == "0"
            assert frame.attributes["aria-label"]
    levels = [int(one.tag[1]) for one in root.every() if re.fullmatch("h[1-6]", one.tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def cells(root: Page, identity: str) -> list[dict[str, float | str | None]]:
    """Return the rows of a table by heading: exact numbers, texts; None for what is not known."""
    head, *rows = root.one(identity).all("tr")
    names = [cell.text for cell in head.all("th")]
    assert len(names) == len(set(names))
    return [
        dict(zip(names, (_value(cell) for cell in row.children if isinstance(cell, Element)), strict=True))
        for row in rows
    ]


def _value(cell: Element) -> float | str | None:
    found = cell.all("data")
    if found:
        return float(found[0].attributes["value"])
    return None if cell.text == "\u2013" else cell.text


def check_numbers(root: Element, known: set[float]) -> int:
    """Every number shown in a table is one of these, shown as what it is; returns how many there are."""
    found = [one for table in root.all("table") for one in table.all("data")]
    for one in found:
        value = float(one.attributes["value"])
        assert value in known, f"where is {value!r} ({one.text}) from?"
        assert any(is_shown(value, one.text, scale) for scale in _scales(one.text)), f"{value!r}: {one.text}"
    return len(found)


def is_shown(value: float, text: str, scale: float) -> bool:
    """Whether a text is a number over a scale, rounded to the digits it has."""
    number = re.sub(r"[^0-9.eE+-]", "", text.replace(",", "").split("%")[0].split(" ")[0])
    digits = len(number.split(".")[1]) if "." in number else 0
    return abs(float(number) - value / scale) <= 0.5 * 10**-digits * (1 + 1e-9) + 1e-12


def _scales(text: str) -> list[float]:
    if text.endswith("%"):
        return [0.01]
    unit = text.rsplit(" ", 1)[-1]
    return [UNITS[unit]] if unit in UNITS else [1, 1e6]


def numbers_of(document: Any) -> set[float]:
    """Return every number in a document."""
    if isinstance(document, dict):
        return {number for value in document.values() for number in numbers_of(value)}
    if isinstance(document, list):
        return {number for value in document for number in numbers_of(value)}
    return (
        {float(document)} if isinstance(document, int | float) and not isinstance(document, bool) else set()
    )
