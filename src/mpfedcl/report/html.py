"""One HTML file that holds everything: document, style and program, and asks nobody for more."""

import base64
import hashlib
import html
import json
from importlib.resources import files

from mpfedcl.core.json_files import Json

STYLES = ("page.css",)
SCRIPTS = (
    "charts/core.js",
    "charts/explore.js",
    "charts/lines.js",
    "charts/bars.js",
    "charts/bubbles.js",
    "charts/matrix.js",
    "charts/scatter.js",
    "charts/intervals.js",
    "charts/heat.js",
    "charts/points.js",
    "parts.js",
    "views.js",
    "comparison_views.js",
    "prototype_map.js",
)
"""What every page of mpfedcl is made of. In this order: each uses only what stands before it."""


def render_page(document: Json) -> str:
    """Return the page that shows a document."""
    style = "\n".join(read_page_file(name) for name in STYLES)
    script = "\n".join(read_page_file(name) for name in (*SCRIPTS, "page.js"))
    parts = {
        "TITLE": html.escape(str(document["title"]).encode("utf-8", "replace").decode()),
        "POLICY": html.escape(_content_security_policy(style, script)),
        "STYLE": style,
        "DOCUMENT": escape_json(document),
        "SCRIPT": script,
    }
    # Split, not replaced one after the other: what is filled in may itself look like a mark.
    pieces = read_page_file("page.html").split("@@")
    return "".join(parts[piece] if place % 2 else piece for place, piece in enumerate(pieces))


def escape_json(document: Json) -> str:
    """Return JSON that cannot end the element it stands in, whatever names it holds."""
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def read_page_file(name: str, package: str = "mpfedcl.report") -> str:
    """Return a file that pages are made of."""
    return (files(package) / "page" / name).read_text(encoding="utf-8")


def _content_security_policy(style: str, script: str) -> str:
    """Forbid all but this very style and program: no address is ever asked for anything."""
    rules = []
    for name, content in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        rules.append(f"{name} 'sha256-{digest}'")
    return "; ".join(["default-src 'none'", *rules, "base-uri 'none'", "form-action 'none'"])
