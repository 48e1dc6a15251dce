"""What libraries compute again and again in all processes of the tests, which are forks of one that has imported this."""

from __future__ import annotations

import importlib.metadata
from functools import cache

from mlflow.store.db import utils

# Reads the file of the distribution: keys of stages have some fifty versions.
importlib.metadata.version = cache(importlib.metadata.version)
# Imports some seventy migrations whenever a database is opened.
utils._get_latest_schema_revision = cache(utils._get_latest_schema_revision)
utils._get_latest_schema_revision()
