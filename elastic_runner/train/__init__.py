"""The training loop: strategies, gradient synchronisation, steps, evaluation and the run's record."""
