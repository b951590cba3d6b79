"""Faults on purpose: to show, and to test, what the runner survives."""
