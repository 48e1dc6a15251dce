"""Exports of a model as text: size, speed, and the comparison with the model, from the figures of compare_exports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.cache.refs import Comparison
from tasks.tracking.reports import format_size, format_value


def summarize_exports(figures: Mapping[str, Any]) -> str:
    """`onnx-int8 released, 812 rows/s (3.4 times torch)`, for each export."""
    return "; ".join(
        f"{name} {'released' if one['released'] else 'not released'}, {one['rows_per_second']:,.0f} rows/s "
        f"({one['rows_per_second'] / one['torch_rows_per_second']:.1f} times torch)"
        for name, one in figures.items()
    )


def tabulate_exports(figures: Mapping[str, Any]) -> list[dict[str, str]]:
    """One row per export: file, size, speed beside that of torch, and the metric beside that of the model."""
    table = []
    for name, one in figures.items():
        comparison = Comparison.model_validate(one["comparison"])
        precision = {"no": "fp32"}.get(one["torch_precision"], one["torch_precision"])
        table.append(
            {
                "export": name,
                "released": "yes" if one["released"] else "no",
                "size": format_size(one["bytes"]),
                "rows/s": f"{one['rows_per_second']:,.0f}",
                f"torch {precision}, rows/s": f"{one['torch_rows_per_second']:,.0f}",
                f"{comparison.split}.{comparison.metric}": format_value(comparison.value),
                "of the model": format_value(comparison.champion_value),
                f"worse by at most, {100 * comparison.confidence:g}%": format_value(-min(comparison.at_least, 0.0)),
                "allowed": f"{-comparison.margin:g}",
            }
        )
    return table


def describe_refused(name: str, figures: Mapping[str, Any]) -> str:
    """The reason why an export is not released, and the next step."""
    found = Comparison.model_validate(figures["comparison"])
    rows = f"{found.rows:,} rows of {found.split}"
    values = f"{found.metric} {format_value(found.value)} against {format_value(found.champion_value)} of the model"
    if found.gain < found.margin:
        reason = f"it is worse by more than {-found.margin:g}"
        step = "allow a larger release.export_margin, or leave this export out"
    else:
        reason = f"a loss of more than {-found.margin:g} is not ruled out at {100 * found.confidence:g}% confidence"
        step = f"add rows to {found.split}, allow a larger release.export_margin, or leave this export out"
    return f"{name} is not released: {values} on the same {rows}, so {reason}: {step}."
