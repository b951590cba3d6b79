"""Curves of a run in other people's tools: TensorBoard, MLflow, Weights & Biases."""
