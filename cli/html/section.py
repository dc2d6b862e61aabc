"""A part of the page: a heading, sentences, pictures, tables. Entry: `Section`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cli.html.markup import Html, join, tag


@dataclass(frozen=True, slots=True)
class Section:
    """One part.

    Attributes:
        identity: id of its heading, unique in the page.
        title: its heading.
        sentences: what the reader is looking at, and what it says here.
        body: pictures, legends and tables, in order.
    """

    identity: str
    title: str
    sentences: Sequence[str | Html]
    body: Sequence[Html] = ()

    def html(self, suffix: str = "") -> Html:
        """Return it, its heading followed by what must be said of every figure."""
        return tag(
            "section",
            tag("h2", self.title + suffix, id=self.identity),
            *(tag("p", sentence) for sentence in self.sentences),
            join(self.body, "\n"),
            aria_labelledby=self.identity,
        )


def figure(*content: Html, caption: str = "") -> Html:
    """Return a picture with its legend and what is said of it."""
    return tag("figure", *content, tag("figcaption", caption) if caption else Html(""))
