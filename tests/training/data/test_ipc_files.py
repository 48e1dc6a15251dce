"""The files in which stages store rows."""

import os
import subprocess
import sys
from pathlib import Path

ASCII = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
READ = """
import pathlib
from training.data.ipc_files import read_labels
print(ascii(read_labels(pathlib.Path('.'))))
"""


def test_the_names_of_labels_do_not_depend_on_the_locale(tmp_path: Path) -> None:
    (tmp_path / "labels.json").write_text('["schön", "良い"]', encoding="utf-8")
    environment = {**os.environ, **ASCII, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    read = subprocess.run([sys.executable, "-c", READ], cwd=tmp_path, env=environment, capture_output=True, text=True)

    assert read.stdout == "['sch\\xf6n', '\\u826f\\u3044']\n", read.stderr
