"""Tables as text, which is also Markdown, and as HTML for notebooks."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence

_NUMERIC = ("bits", "bytes", "rows", "SQNR dB", "output SQNR dB", "differing bytes")
"""Headers of the columns that are aligned right."""


def text_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table in plain ASCII, as wide as its contents."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.MARKDOWN)
    for header in headers:
        is_number = header in _NUMERIC or header.endswith(" us")
        table.add_column(header, no_wrap=True, justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*row)
    text = io.StringIO()
    # A fixed width and no colours: the output does not depend on the terminal.
    console = Console(file=text, width=10_000, color_system=None, markup=False, emoji=False, highlight=False)
    console.print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines() if line.strip())


def html_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same table as HTML, its cells escaped."""

    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{line('th', headers)}{''.join(line('td', row) for row in rows)}</table>"
