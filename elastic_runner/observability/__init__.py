"""What people see: summary, log lines, progress."""
