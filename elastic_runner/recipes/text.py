"""Bytes of a text tree as fixed windows, split into training and validation by file."""

from __future__ import annotations

import os
import sysconfig
from dataclasses import field
from fnmatch import fnmatch
from typing import Annotated

import fsspec
import numpy as np
import torch
from annotated_types import Ge, Le
from pydantic.dataclasses import dataclass
from torch.utils.data import Dataset

from elastic_runner.config import STRICT, nested_options
from elastic_runner.data.order import key_of
from elastic_runner.errors import ConfigError


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TextConfig:
    """Which text."""

    url: str | None = None
    """Directory or glob, as a path or fsspec URL. None: the source files of Python's standard library."""
    pattern: str = "*.py"
    """File names to take below a directory."""
    options: dict[str, str] = field(default_factory=dict)
    """Options of that filesystem, as in checkpoint.options."""
    validation_percent: Annotated[int, Ge(1), Le(50)] = 5
    """Share of files kept for validation; a file's path below the common folder decides, wherever that is."""


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Non-overlapping windows of ``context`` bytes: (bytes, bytes one further), int64, shape [context] each."""

    def __init__(self, data: np.ndarray, context: int) -> None:
        self._data = data
        self._context = context

    def __len__(self) -> int:
        return max(0, (len(self._data) - 1) // self._context)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self._context
        window = torch.from_numpy(self._data[start : start + self._context + 1].astype(np.int64))
        return window[:-1], window[1:]


def load_text(config: TextConfig, context: int) -> tuple[Windows, Windows]:
    """Training and validation windows. Raises ConfigError when the tree holds too little text."""
    train: list[bytes] = []
    validation: list[bytes] = []
    filesystem, names = _files(config)
    root = os.path.commonpath(names) if len(names) > 1 else ""
    for name in names:
        chosen = validation if key_of("split", name.removeprefix(root)) % 100 < config.validation_percent else train
        chosen.append(filesystem.cat_file(name))
    parts = [Windows(np.frombuffer(b"".join(part), dtype=np.uint8), context) for part in (train, validation)]
    if not all(len(part) for part in parts):
        raise ConfigError(
            f"text.url={config.url!r}: {len(names)} files hold too little text for training and validation; "
            "check text.url and text.pattern"
        )
    return parts[0], parts[1]


def _files(config: TextConfig) -> tuple[fsspec.AbstractFileSystem, list[str]]:
    """Files in a fixed order, by their full names."""
    url = config.url or sysconfig.get_paths()["stdlib"]
    filesystem, root = fsspec.core.url_to_fs(url, **nested_options(config.options))
    if "*" in root or "?" in root:
        return filesystem, sorted(filesystem.glob(root))
    found = [name for name in filesystem.find(root) if fnmatch(name.rpartition("/")[2], config.pattern)]
    if config.url is None:  # installed packages are not the standard library
        found = [name for name in found if "/site-packages/" not in name]
    return filesystem, sorted(found)
