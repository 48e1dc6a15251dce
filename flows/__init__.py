import os

# Deployed runs start in an empty folder: see tasks/prefect/run_folder.py.
if folder := os.environ.pop("FINETUNE_RUN_FOLDER", ""):
    from tasks.environment_variables import ignore_prefect_settings_here

    ignore_prefect_settings_here()
    os.chdir(folder)
