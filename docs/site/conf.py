"""The site: Sphinx reads the repository's own Markdown, so a link that works there works here.

The source folder is the root of the repository, because README.md is the first page, and CHANGELOG.md and others
are pages too. What a reader of the repository should not see is added while reading: the tables of contents, and the
tables that are generated from the code.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from pygments.lexers.special import TextLexer

sys.path.insert(0, str(Path(__file__).parent))

import arguments
import generated
import sidebar

import penstock

project = "Penstock"
version = release = penstock.__version__
copyright = "the Penstock contributors"
html_title = "Penstock"
html_theme = "furo"
pygments_dark_style = "github-dark"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_favicon = "static/favicon.svg"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"sidebar_hide_name": False, "navigation_with_keys": True}

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/**/*.md"]
exclude_patterns = [".venv", "build", "examples", "bench", "src", "tests", "runs"]
nitpicky = True

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
highlight_language = "text"

default_role = "code"  # docstrings write code as Markdown does
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_preserve_defaults = True  # as they are written: LossOptions()
autodoc_typehints = "none"  # the table of arguments has them
autodoc_class_signature = "mixed"
python_maximum_signature_line_length = 88
add_module_names = True
toc_object_entries_show_parents = "hide"

PAGES = {  # what the side bar shows, in order; README.md is the page above all of them
    "Learn": ["docs/tutorial", "docs/explanations/index", "docs/primer"],
    "Do": ["docs/guides/index"],
    "Look up": ["docs/reference/index", "docs/glossary"],
    "Project": ["CHANGELOG", "CONTRIBUTING", "ARCHITECTURE", "SECURITY"],
}
FILE = re.compile(r"<!-- file: (?P<name>[\w.-]+) -->\n```(?P<language>\w+)\n")
MARK = re.compile(r"<!-- generated: (?P<name>\w+) -->")
FIRST = """<!doctype html>
<meta charset="utf-8">
<meta http-equiv="refresh" content="0; url=README.html">
<title>Penstock</title>
"""


def toctree(entries: list[str], caption: str = "") -> str:
    head = f":caption: {caption}\n" if caption else ""
    return "\n\n```{toctree}\n:hidden:\n" + head + "\n" + "\n".join(entries) + "\n```\n"


def complete(app: Any, name: str, source: list[str]) -> None:
    """Add what only the site has to a page: tables of contents, names of files, and tables from the code."""
    if name == root_doc:
        source[0] += "".join(toctree(entries, caption) for caption, entries in PAGES.items())
    elif name.endswith("/index"):  # such a page lists its folder: the side bar has the same pages in the same order
        source[0] += toctree([page for pages in sidebar.groups(source[0]).values() for page in pages])
    source[0] = FILE.sub("```{code-block} \\g<language>\n:caption: \\g<name>\n\n", source[0])
    if MARK.search(source[0]):
        app.env.note_reread()  # the code may have changed, though the page has not
        source[0] = MARK.sub(lambda mark: generated.TABLES[mark["name"]](), source[0])


def open_with_readme(app: Any, error: Exception | None) -> None:
    """A site is opened at index.html."""
    if error is None and app.builder.format == "html":
        (Path(app.outdir) / "index.html").write_text(FIRST, encoding="utf-8")


def setup(app: Any) -> None:
    app.add_lexer("drawn", TextLexer)  # what `penstock primer` draws
    app.connect("source-read", complete)
    app.connect("autodoc-process-docstring", arguments.tabulate)
    app.connect("html-page-context", sidebar.label, priority=600)  # after the theme has made the side bar
    app.connect("build-finished", open_with_readme)
