"""Checkpoints that are committed by a manifest and restored into any world size, rank order and strategy."""
