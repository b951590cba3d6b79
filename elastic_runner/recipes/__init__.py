"""Real training jobs that ship with the package."""
