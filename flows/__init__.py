import os

# Deployed runs start in an empty folder: see tasks/prefect/run_folder.py.
if folder := os.environ.pop("FINETUNE_RUN_FOLDER", ""):
    from tasks.environment import ignore_prefect_settings_here

    ignore_prefect_settings_here()
    os.chdir(folder)
