"""What libraries compute again and again in the processes of the tests, computed once by the server of forks."""

from __future__ import annotations

import importlib.metadata
import ssl
from functools import cache

import certifi
from mlflow.store.db import utils

# Reads and parses the file of the distribution: libraries ask for versions when they are imported.
importlib.metadata.version = cache(importlib.metadata.version)
# Imports some seventy migrations whenever a database is opened.
utils._get_latest_schema_revision = cache(utils._get_latest_schema_revision)
utils._get_latest_schema_revision()
# Reads the certificates of all authorities for each client of HTTP: a command has several.
create_context = ssl.create_default_context
context_of = cache(lambda cafile: create_context(cafile=cafile))
ssl.create_default_context = lambda *arguments, **options: (
    context_of(**options) if options.keys() == {"cafile"} and not arguments else create_context(*arguments, **options)
)
ssl.create_default_context(cafile=certifi.where())
