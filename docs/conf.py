"""The site, for Sphinx: `make site` makes build/site of it, static files that load nothing from elsewhere.

Its pages are those of the repository, where they lie, so that one link serves a forge and the site. The navigation is
read from the lists of docs/index.md, so that no page needs a syntax which a forge does not show.
"""

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert

ROOT = Path(__file__).parents[1]
project = html_title = "operant"
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "*.md",
    "benchmarks/README.md",
    "benchmarks/results/*.md",
    "recipes/**/README.md",
    "tests/**/README.md",
]
exclude_patterns = [".*", "runs", "build", "src"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
html_theme = "furo"
html_math_renderer = "mathml"
html_static_path = html_css_files = ["site.css"]
html_copy_source = False
highlight_language = "none"
html_show_sphinx = html_show_copyright = False
pygments_style, pygments_dark_style = "friendly", "github-dark"
maximum_signature_line_length = 100
python_display_short_literal_types = True
MADE = {
    "Look something up": "API reference <reference/index>\n",
}
"""Pages that exist on the site alone, by section."""
METHODS = "docs/algorithms"
"""The page that lists the methods."""
BESIDE = ("docs/log", "docs/mistakes", "docs/strangers/first", "docs/strangers/second", "docs/strangers/third")
"""Pages that others lead to, and that are not on the side."""


def setup(app: Any) -> None:
    app.connect("source-read", with_navigation)
    app.add_html_math_renderer("mathml", (mathml("inline"), None), (mathml("block"), None))
    app.connect("html-page-context", without_icon)
    app.connect("build-finished", front_page)


def with_navigation(app: Any, page: str, source: list[str]) -> None:
    """Add to each section of the first page, and to the list of methods, its links for the side of every page."""
    if page == root_doc:
        for section in re.split(r"^## ", source[0], flags=re.MULTILINE)[1:]:
            title = section.partition("\n")[0]
            source[0] += _listed(section, f":caption: {title}\n", MADE.get(title, ""))
    elif page in BESIDE:
        source[0] = f"---\norphan: true\n---\n{source[0]}"
    elif page == METHODS:
        source[0] += _listed(source[0].replace("`", ""))


def _listed(text: str, caption: str = "", more: str = "") -> str:
    links = re.findall(r"^- \[([^\]]+)\]\(([^)]+)\.md\)", text, re.MULTILINE)
    lines = "".join(f"{name} <{target}>\n" for name, target in links)
    return f"\n```{{toctree}}\n:hidden:\n{caption}\n{lines}{more}```\n"


def mathml(display: str) -> Any:
    """Formulas as MathML, which browsers draw without a script."""

    def visit(writer: Any, node: nodes.Element) -> None:
        writer.body.append(convert(node.astext(), display=display))
        raise nodes.SkipNode

    return visit


NO_ICON = '<link rel="icon" href="data:,">'
"""Without it a browser asks the server for a favicon.ico."""


def without_icon(app: Any, page: str, template: str, context: dict[str, Any], document: object) -> None:
    context["metatags"] = context.get("metatags", "") + NO_ICON


def front_page(app: Any, error: Exception | None) -> None:
    """The address of the site itself leads to the first page."""
    if error is None:
        lead = f'<!doctype html><meta http-equiv="refresh" content="0; url={root_doc}.html"><title>{project}</title>'
        link = f'<a href="{root_doc}.html">{project}</a>'
        (Path(app.outdir) / "index.html").write_text(lead + NO_ICON + link + "\n", encoding="utf-8")
