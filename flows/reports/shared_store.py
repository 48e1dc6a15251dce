"""What a shared store holds, as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flows.reports.tables import align
from tasks.reports.formatting import format_size

if TYPE_CHECKING:
    from tasks.shared_store.bucket import Entry
    from tasks.shared_store.maintenance import Content, Plan

FILES = "files"
"""The files of all artifacts, each content once; the lines of the stages have the manifests alone."""


def format_content(url: str, content: Content, plan: Plan | None = None) -> Iterator[str]:
    """Formats a table of the bucket's parts, with what of them can go if there is a plan."""
    yield f"{url}: {format_size(content.bytes)}"
    yield ""
    groups: dict[str, list[Entry]] = {}
    for entry, (stage, _) in content.artifacts.items():
        groups.setdefault(stage, []).append(entry)
    groups = dict(sorted(groups.items())) | {
        FILES: list(content.objects.values()),
        "checkpoints": [entry for group in content.checkpoints.values() for entry in group],
        "leases, uploads": [*content.leases, *content.announced, *content.probes],
    }
    going = {*plan.entries} if plan else set()
    table = [["what", "number", "size", "needed", "can go", "frees"][: None if plan else 3]]
    for name, entries in groups.items():
        if entries:
            gone = [entry for entry in entries if entry in going]
            counts = [f"{len(entries) - len(gone):,}", f"{len(gone):,}", _format_sum(gone)] if plan else []
            table.append([name, f"{len(entries):,}", _format_sum(entries), *counts])
    yield from align(table)
    yield ""


def _format_sum(entries: list[Entry]) -> str:
    return format_size(sum(entry.bytes for entry in entries))
