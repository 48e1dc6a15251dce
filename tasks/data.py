"""Stage: rows, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.runtime.hub import told
from tasks.runtime.refs import Pins
from tasks.runtime.stage import Ingredients, Work, stage
from training.recipe import Recipe

# What a reader of this source imports, beside pyarrow.
LIBRARIES = {"hub": ("pyarrow", "datasets"), "python": ("pyarrow",)}


def ingredients(recipe: Recipe, pins: Pins) -> Ingredients:
    """The columns and labels, and the content of the files, the commit, or the callable's code and fingerprint."""
    data = recipe.data
    read = data.model_dump(include={"source", "text", "label", "label_names"})
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
        return load(recipe.data, {s: [pin.path for pin in pinned] for s, pinned in pins.data_files.items()}, work.out)
    with told("dataset", recipe.data.path, pins.data_hub.commit):
        return load(recipe.data, {"commit": pins.data_hub.commit}, work.out)
