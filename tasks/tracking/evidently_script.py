"""A script for a Python that has Evidently: `PYTHON evidently_script.py SAMPLES OUT`.

SAMPLES   JSON: `name` and `metadata` of the report; `kinds`, the kind of each column (numerical, categorical or text);
          `reference` and `current`, the values of each column, null where a row has none
OUT       the report: .html is Evidently's page, .json its snapshot, which `Snapshot.load` reads

It prints why columns are left out. It imports nothing of this project, which that Python need not have.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(samples: Path, out: Path) -> None:
    """Writes the report."""
    job = json.loads(samples.read_bytes())
    kinds = dict(job["kinds"])
    try:
        report = build(job, kinds)
    except ValueError as error:  # its classifier of texts fails if no word is frequent enough
        texts = [name for name, kind in kinds.items() if kind == "text"]
        if not texts:
            raise
        reason = str(error).partition("\n")[0]
        print(f"Evidently cannot compare {', '.join(texts)} ({reason}): left out.")
        report = build(job, {name: kind for name, kind in kinds.items() if kind != "text"})
    if out.suffix == ".html":
        report.save_html(str(out))
    else:
        out.write_text(report.dumps(), encoding="utf-8")


def build(job: dict[str, Any], kinds: dict[str, str]) -> Any:
    """Evidently's comparison of these columns: a Snapshot."""
    import pandas
    from evidently import DataDefinition, Dataset, Report
    from evidently.presets import DataDriftPreset

    of_kind: dict[str, list[str]] = {"numerical": [], "categorical": [], "text": []}
    for name, kind in kinds.items():
        of_kind[kind].append(name)
    definition = DataDefinition(**{f"{kind}_columns": names for kind, names in of_kind.items()})
    reference, current = (
        Dataset.from_pandas(pandas.DataFrame({name: job[sample][name] for name in kinds}), data_definition=definition)
        for sample in ("reference", "current")
    )
    return Report([DataDriftPreset()], metadata=job["metadata"]).run(current, reference, name=job["name"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
