"""One worker process: its device, process groups, deadlines, signals, and the run it takes part in."""
