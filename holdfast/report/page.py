"""The page that the report and the live view share: one file of HTML with its style, script and data inside.

Its security policy lets this very script run and nothing else, and nothing be fetched but a live page's data.
"""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from importlib.resources import files
from typing import Any

CSS = files("holdfast.report").joinpath("page.css").read_text(encoding="utf-8")
SCRIPT = files("holdfast.report").joinpath("page.js").read_text(encoding="utf-8")
_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()


def policy(*, live: bool) -> str:
    """The content security policy; styles may stand in the page, as the pictures' own do."""
    fetched = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src 'sha256-{_HASH}'; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {fetched}; base-uri 'none'; form-action 'none'"
    )


def page_html(title: str, body: str, data: dict[str, Any], *, live: bool = False) -> str:
    """A whole page: ``body`` is markup with everything from outside escaped, ``data`` goes to the script."""
    icon = '\n<link rel="icon" href="data:,">' if live else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy(live=live)}">
<title>{escape(title)}</title>{icon}
<style>{CSS}</style>
</head>
<body>
{body}
<script type="application/json" id="data">{json_in_html(data)}</script>
<script>{SCRIPT}</script>
</body>
</html>
"""


def json_in_html(data: Any) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
