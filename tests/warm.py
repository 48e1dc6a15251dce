"""What libraries compute again and again in the processes of the tests, computed once by the server of forks."""

from __future__ import annotations

import importlib.metadata
from functools import cache

from mlflow.store.db import utils

# Reads the file of the distribution: keys of stages have some fifty versions.
importlib.metadata.version = cache(importlib.metadata.version)
# Imports some seventy migrations whenever a database is opened.
utils._get_latest_schema_revision = cache(utils._get_latest_schema_revision)
utils._get_latest_schema_revision()
