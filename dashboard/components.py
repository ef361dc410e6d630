"""The one module that knows Mantine and AG Grid; pages ask it for parts and stay free of both.

Mantine for Dash has one main maintainer: whoever must replace it replaces this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dash_ag_grid as dag  # type: ignore[import-untyped]
import dash_mantine_components as dmc  # type: ignore[import-untyped]
from dash import dcc, html

from trine.dashboard.attributes import aria
from trine.dashboard.theme import FONT, Theme

__all__ = ["choice", "choices", "copy_button", "free_choice", "graph", "grid", "provider"]


def provider(children: Any, id: str) -> Any:
    """The root that everything of Mantine needs; its colour scheme follows the address."""
    return dmc.MantineProvider(
        children,
        id=id,
        forceColorScheme="light",
        theme={"fontFamily": FONT, "defaultRadius": "sm", "primaryColor": "dark", "autoContrast": True},
    )


def choice(id: str, label: str, options: Sequence[tuple[str, str]], value: str | None, hint: str = "") -> Any:
    """One of some (value, label) options, or none."""
    return dmc.Select(
        id=id,
        label=label,
        data=[{"value": key, "label": text} for key, text in options],
        value=value,
        placeholder=hint,
        clearable=True,
        searchable=True,
        size="xs",
        className="control",
        comboboxProps={"withinPortal": True},
    )


def choices(id: str, label: str, options: Sequence[tuple[str, str]], values: Sequence[str], hint: str) -> Any:
    """Several of some options; none means all."""
    return dmc.MultiSelect(
        id=id,
        label=label,
        data=[{"value": key, "label": text} for key, text in options],
        value=list(values),
        placeholder="" if values else hint,
        clearable=True,
        searchable=True,
        size="xs",
        className="control",
        maxDropdownHeight=260,
    )


def free_choice(id: str, label: str, suggestions: Sequence[str], value: str, hint: str) -> Any:
    """A text with suggestions, taken on Enter or when the field is left."""
    return dmc.Autocomplete(
        id=id,
        label=label,
        data=list(suggestions),
        value=value,
        placeholder=hint,
        debounce=600,
        size="xs",
        className="control",
    )


def copy_button(text: str, label: str) -> Any:
    """A button that copies ``text``, and says so."""
    return html.Span(
        [
            dcc.Clipboard(content=text, title=label, className="copy"),
            html.Span("Copy", className="copy-word"),
        ],
        className="copy-button",
    )


def graph(figure: dict[str, Any], label: str, id: str | None = None) -> Any:
    """A Plotly figure without a mode bar that uploads; ``label`` says what it shows to a screen reader."""
    named: dict[str, Any] = {} if id is None else {"id": id}
    return html.Div(
        dcc.Graph(
            figure=figure,
            config={
                "displaylogo": False,
                "displayModeBar": "hover",
                "modeBarButtonsToRemove": ["sendChartToCloud", "select2d", "lasso2d", "autoScale2d"],
                "responsive": True,
            },
            style={"height": f"{figure['layout'].get('height', 260)}px"},
            **named,
        ),
        role="img",
        className="figure",
        **aria(label=label),
    )


def grid(id: str, columns: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]], theme: Theme) -> Any:
    """A sortable, filterable table; its colours follow the page through ``data-ag-theme-mode`` of the body.

    A column with ``"number": True`` is right-aligned, sorts by ``field`` and shows ``field + "_text"``.
    """
    definitions = []
    for column in columns:
        if rows and not any(row[column["field"]] not in ("", None) for row in rows):
            continue  # nothing to see, and width is dear
        definition = {key: value for key, value in column.items() if key != "number"}
        if column.get("number"):
            definition |= {
                "type": "rightAligned",
                "filter": "agNumberColumnFilter",
                "valueFormatter": {"function": f"params.data['{column['field']}_text']"},
            }
        definitions.append(definition)
    height = min(30 * (len(rows) + 1) + 8, 420)
    return dag.AgGrid(
        id=id,
        columnDefs=definitions,
        rowData=list(rows),
        defaultColDef={
            "sortable": True,
            "resizable": True,
            "filter": True,
            # A filter on every column of a short table is clutter.
            "suppressHeaderFilterButton": len(rows) <= 12,
            "suppressHeaderMenuButton": True,
        },
        columnSize="responsiveSizeToFit",
        dashGridOptions={
            "theme": {
                "function": "themeQuartz.withPart(agGrid.colorSchemeVariable).withParams({"
                "fontFamily: 'inherit', fontSize: 13, rowHeight: 30, headerHeight: 32, wrapperBorder: false, "
                "wrapperBorderRadius: 0, columnBorder: false, headerFontWeight: 600, "
                f"backgroundColor: '{_surface(theme)}', headerBackgroundColor: 'transparent'}})"
            },
            "animateRows": False,
            "enableCellTextSelection": True,
            "tooltipShowDelay": 300,
        },
        style={"height": f"{height}px", "width": "100%"},
    )


def _surface(theme: Theme) -> str:
    from trine.dashboard.theme import PALETTES

    return PALETTES[theme]["surface"]
