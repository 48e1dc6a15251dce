"""Child programs that need MLflow and torch together, kept out of the flow's process."""
