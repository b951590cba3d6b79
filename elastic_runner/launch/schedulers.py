"""What the job files of all schedulers have in common."""

from __future__ import annotations

import re

from elastic_runner.errors import ConfigError


def node_range(text: str) -> tuple[int, int]:
    """Least and most of ``N`` or ``MIN:MAX``. Raises ConfigError."""
    match = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if least > most:
        raise ConfigError(f"--nodes {text}: a number, or MIN:MAX")
    return least, most


def comment(text: str) -> str:
    """Lines that shells and YAML pass over."""
    return "# " + text.replace("\n", "\n# ")
