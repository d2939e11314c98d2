"""What a page of ours must be: well-formed, and complete without a network."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_VOID = {"meta", "link", "br", "img", "input", "hr"}


class _Page(HTMLParser):
    """Collects what a browser would load, and checks that tags are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in _VOID:
            self.open.append(tag)
        for name, value in attributes:
            local = (value or "").startswith(("#", "data:"))
            if name in ("src", "href", "xlink:href", "srcset", "action", "data") and not local:
                self.loads.append(f"{tag} {name}={value}")
            if name == "style":
                self.loads += re.findall(r"url\((?!#|\"#|'#)[^)]*\)", value or "")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> inside {self.open[-3:]}"
        self.open.pop()


def check_page(html: str) -> list[str]:
    """Fail unless the page is closed properly and loads nothing. Returns its tags in order."""
    page = _Page()
    page.feed(html)
    page.close()
    assert page.open == []
    assert page.loads == []
    assert not {"script", "link", "iframe", "object", "embed"} & set(page.tags)
    for style in re.findall(r"<style[^>]*>(.*?)</style>", html, flags=re.DOTALL):
        assert "@import" not in style and not re.search(r"url\((?!#)", style)
    return page.tags
