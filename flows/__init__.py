import os

# Deployed runs start in an empty folder: see tasks/prefect/run_folder.py.
if folder := os.environ.pop("FINETUNE_RUN_FOLDER", ""):
    os.chdir(folder)
