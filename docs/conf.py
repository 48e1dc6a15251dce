"""Sphinx settings of the documentation site: `make docs`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]  # the project, whose tables are shown, and the extension

project = "finetune"
copyright = "the authors of finetune, Apache-2.0"
extensions = ["myst_parser", "sphinx_copybutton", "reference_tables"]
exclude_patterns = ["build"]
html_theme = "furo"
html_title = "finetune"
html_static_path = ["static"]
html_css_files = ["site.css"]

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
myst_links_external_new_tab = False
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
