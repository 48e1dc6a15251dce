"""Child programs that need MLflow and torch together, or the Hub's clients, kept out of the flow's process."""
