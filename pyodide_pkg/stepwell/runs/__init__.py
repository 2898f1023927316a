"""What a page can ask for: an answer of the loaded model, or a workload."""
