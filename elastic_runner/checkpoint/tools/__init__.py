"""What people do with checkpoints outside of a run: look, compare, export, import."""
