"""Pages that need no network: one template with the style, extended by the reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from q38.base.units import format_bytes, format_seconds

PAGE = Path(__file__).with_name("page.html.jinja")


def render_page(template: Path, *, plots: Any, **context: Any) -> str:
    """Render a template that extends `page.html.jinja`.

    Args:
        plots: name -> SVG; goes into the page as it is. Everything else is escaped.
    """
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, PAGE.parent]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(bytes=format_bytes, seconds=format_seconds, number=short_number)
    drawn = {name: Markup(svg) for name, svg in plots.items()}
    return environment.get_template(template.name).render(plots=drawn, **context)


def short_number(value: float | None, digits: int = 4) -> str:
    """Significant digits, thousands apart; a dash for None."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"
