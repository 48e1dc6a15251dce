"""The rows of a run as a Croissant 1.0 data set (JSON-LD, https://docs.mlcommons.org/croissant): their sources with
digests, and the columns that were read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from tasks.cache.results import Lock, PinnedFile
from tasks.home import without_credentials
from tasks.hub.client import repository_url

_CROISSANT_TERMS = (
    *("citeAs", "column", "equivalentProperty", "extract", "field", "fileProperty", "fileObject", "fileSet", "format"),
    *("includes", "isLiveDataset", "jsonPath", "key", "md5", "parentField", "path", "recordSet", "references", "regex"),
    *("repeated", "replace", "samplingRate", "separator", "source", "subField", "transform"),
)
CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "dct": "http://purl.org/dc/terms/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "sc": "https://schema.org/",
    "conformsTo": "dct:conformsTo",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
    **{term: f"cr:{term}" for term in _CROISSANT_TERMS},
}
"""The standard context of Croissant 1.0."""
TYPES = {"int64": "cr:Int64", "double": "cr:Float64", "bool": "sc:Boolean"}
"""Types of columns by Arrow's names; others are text. The items of a list have one of these."""
ENCODINGS = {
    ".csv": "text/csv",
    ".tsv": "text/tab-separated-values",
    ".json": "application/json",
    ".jsonl": "application/jsonlines",
    ".ndjson": "application/jsonlines",
    ".parquet": "application/x-parquet",
    ".pq": "application/x-parquet",
}
"""Media types of files with named columns, by the ends of their names."""
OTHER = "application/octet-stream"
NO_DIGEST = "https://github.com/mlcommons/croissant/issues/80"
"""Croissant's placeholder for the digest of a repository, whose commit pins its files."""


def build_croissant(record: Mapping[str, Any]) -> dict[str, Any]:
    """The data set of a lineage record as JSON values. Equal records give equal values.

    Each file of rows is a file object with its digest, and a record set with the columns that were read from it. A
    repository of the Hub is one file object. An object of Python has neither.
    """
    name, rows = record["recipe"]["name"], record.get("rows") or {}
    counts = ", ".join(
        f"{split.removesuffix('_rows')} {number:,}"
        for split, number in (rows.get("figures") or {}).items()
        if split.endswith("_rows")
    )
    digest = rows.get("digest") or "0" * 64
    sources = [*_list_sources(record)]
    data = record["recipe"]["data"]
    # The sets of a mixture may name their columns differently, and a file without a header names none.
    columns = [] if data.get("mix") or data.get("header") else rows.get("columns") or []
    return {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": f"{CONTEXT['cr']}1.0",
        "name": name,
        "description": f"The rows of a run of the recipe {name}" + (f": {counts}" if counts else ""),
        "url": f"urn:sha256:{digest}",
        "version": f"0.0.0+{digest[:16]}",
        "distribution": sources,
        "recordSet": [_describe_rows(source, columns, rows) for source in sources if columns and _has_columns(source)],
    }


def _list_sources(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The pinned files and repositories, each once."""
    number = 0
    for pinned in Lock.model_validate(record.get("lock") or {}).sets:
        if pinned.hub is not None:
            name, _, _ = pinned.hub.name.partition("@")
            yield {
                "@type": "cr:FileObject",
                "@id": f"source-{number}",
                "name": name,
                "contentUrl": f"{repository_url('dataset', name)}/tree/{pinned.hub.commit}",
                "encodingFormat": "git+https",
                "sha256": NO_DIGEST,
            }
            number += 1
        for file in {file.path: file for files in pinned.files.values() for file in files}.values():
            yield _describe_file(f"source-{number}", file)
            number += 1


def _describe_file(reference: str, file: PinnedFile) -> dict[str, Any]:
    path = without_credentials(file.path)
    return {
        "@type": "cr:FileObject",
        "@id": reference,
        "name": path.rpartition("/")[2],
        "contentUrl": path,
        **({} if file.size_bytes is None else {"contentSize": f"{file.size_bytes} B"}),
        "encodingFormat": ENCODINGS.get(PurePosixPath(path).suffix, OTHER),
        "sha256": file.sha256,
    }


def _has_columns(source: Mapping[str, Any]) -> bool:
    return source["encodingFormat"] in ENCODINGS.values()


def _describe_rows(
    file: Mapping[str, Any], columns: list[Mapping[str, Any]], rows: Mapping[str, Any]
) -> dict[str, Any]:
    """The record set of a file: its columns that are read, by the names under which they are stored."""
    reference = file["@id"].replace("source", "rows")
    fields: list[dict[str, Any]] = []
    for column in columns:
        if not column["source"]:
            continue
        items = re.fullmatch(r"(?:large_)?list<\w+: (\w+).*>", column["type"])
        # A label is stored as the index of its name, and is a name in the source.
        is_name = column["name"] in ("label", "labels") and rows.get("labels")
        kind = "string" if is_name else items[1] if items else column["type"]
        fields.append(
            {
                "@type": "cr:Field",
                "@id": f"{reference}/{len(fields)}",
                "name": column["name"],
                "dataType": TYPES.get(kind, "sc:Text"),
                **({"repeated": True} if items else {}),
                "source": {"fileObject": {"@id": file["@id"]}, "extract": {"column": column["source"]}},
            }
        )
    return {"@type": "cr:RecordSet", "@id": reference, "name": file["name"], "field": fields}
