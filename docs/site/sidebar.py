"""The side bar: pages of a folder stand under the headings that its index page has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from bs4 import BeautifulSoup, Tag

HEADING = re.compile(r"^## (?P<heading>.+)$|\]\((?P<page>[\w-]+)\.md\)", re.MULTILINE)


def groups(index: str) -> dict[str, list[str]]:
    """The pages that an index page links to, by heading; those before the first heading are under the empty one."""
    found: dict[str, list[str]] = {"": []}
    heading = ""
    for match in HEADING.finditer(index):
        if match["heading"]:
            heading = match["heading"]
            found[heading] = []
        elif not any(match["page"] in pages for pages in found.values()):
            found[heading].append(match["page"])
    return found


def label(app: Any, page: str, template: str, context: dict[str, Any], document: Any) -> None:
    """Put the headings into the theme's side bar, between the pages that it lists."""
    tree = context.get("furo_navigation_tree")
    if not tree:
        return
    soup = BeautifulSoup(tree, "html.parser")
    for folder in ("guides", "explanations"):
        text = (Path(app.srcdir) / "docs" / folder / "index.md").read_text(encoding="utf-8")
        (entry,) = (link.parent for link in soup.select("li.toctree-l1 > a") if link.text == folder.capitalize())
        items = entry.select("li.toctree-l2") if isinstance(entry, Tag) else []
        for heading, pages in groups(text).items():
            if heading:
                title = soup.new_tag("li", attrs={"class": "group"})
                title.string = heading
                items[0].insert_before(title)
            items = items[len(pages) :]
        assert items == [], f"the side bar has other pages of {folder} than its index"
    context["furo_navigation_tree"] = str(soup)
