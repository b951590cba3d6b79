"""Dynamic loss scaling for fp16 (Micikevicius et al., "Mixed Precision Training", ICLR 2018).

torch's GradScaler finds overflows in each rank's own gradients; ranks with different shards would decide
differently. Here the global gradient norm decides, which is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_GROWTH_INTERVAL = 2000
_START = 2.0**16


class LossScaler:
    """The scale and when it changes. It stays untouched unless precision is fp16."""

    def __init__(self) -> None:
        self.scale = _START
        self._good_steps = 0

    def update(self, finite: bool) -> None:
        """Halve after an overflow; double after 2000 good steps in a row."""
        if not finite:
            self.scale, self._good_steps = max(1.0, self.scale / 2), 0
            return
        self._good_steps += 1
        if self._good_steps == _GROWTH_INTERVAL:
            self.scale, self._good_steps = self.scale * 2, 0

    def state_dict(self) -> dict[str, Any]:
        """Scale and good steps."""
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them over."""
        self.scale, self._good_steps = state["scale"], state["good_steps"]
