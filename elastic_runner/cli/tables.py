"""Tables on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table


def print_table(table: Table) -> None:
    """Print a table; a line for each row where the output is piped."""
    console = Console()
    if not console.is_terminal:
        console.width = 10_000
    console.print(table)
