"""Evaluation and prediction: each sample once, exact means, rows in the order of the dataset."""
