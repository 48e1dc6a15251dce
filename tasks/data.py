"""Stage: rows, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.runtime.hub import told
from tasks.runtime.refs import Pins
from tasks.runtime.stage import Ingredients, Work, stage
from training.recipe import Recipe

# What a reader of this source imports, beside pyarrow.
LIBRARIES = {"hub": ("pyarrow", "datasets"), "json": ("pyarrow", "ijson")}
# Where rows lie, which names are theirs there, and how large a file may be: the files' content says it all.
NOT_READ = {"path", "config", "revision", "splits", "max_file_gb"}


def ingredients(recipe: Recipe, pins: Pins) -> Ingredients:
    """What is done to the rows, and the content of the files, the commit, or the object's code and fingerprint."""
    data = recipe.data
    read = data.model_dump(exclude=NOT_READ)
    read["checks"].pop("truncated", None)  # another stage's
    code = ["training.rows.load"]
    if data.source in ("hub", "python"):
        read |= data.model_dump(include={"path", "config", "splits"})
    if data.source == "python":
        code.append(data.path.partition(":")[0])
    files = {split: [pin.sha256 for pin in pinned] for split, pinned in pins.data_files.items()}
    return Ingredients(
        {
            "data": read,
            "files": files,
            "commit": pins.data_hub.commit if pins.data_hub else None,
            "fingerprint": pins.data_fingerprint,
        },
        code=code,
        libraries=LIBRARIES.get(data.source, ("pyarrow",)),
        names={
            "commit": f"{data.path} at {data.revision or 'main'}",
            "fingerprint": f"what {data.path} is made from",
            **{f"files.{split}": ", ".join(p.path for p in pinned) for split, pinned in pins.data_files.items()},
        },
    )


@stage(ingredients)
def load_data(work: Work, recipe: Recipe, pins: Pins) -> Mapping[str, Any]:
    """Reads every split into Arrow, checks it, and fixes the labels' names and order."""
    from training.rows.load import load

    if pins.data_hub is None:
        files = {split: [pin.path for pin in pinned] for split, pinned in pins.data_files.items()}
        return load(recipe.data, files, work.out, work.progress)
    with told("dataset", recipe.data.path, pins.data_hub.commit):
        return load(recipe.data, {"commit": pins.data_hub.commit}, work.out, work.progress)
