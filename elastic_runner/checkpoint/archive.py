"""Reading torch.save archives without running what they hold."""

from __future__ import annotations

import io
import pickle
import re
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from elastic_runner.errors import Damaged, NotData
from elastic_runner.storage.faults import map_error

# What torch's weights-only unpickler says of a global, a call or an object that is not data. Operand 149 opens every
# pickle of protocol 4 and later, which torch.save never writes.
_NAMES_CODE = re.compile(
    r"(?=Unsupported (?:global|class)|Trying to (?:load|instantiate|call)|Can only (?:build|create)"
    r"|Unsupported operand 149)"
)

_OF_MEMORY = re.compile(r"out of memory|[Cc]annot allocate|can't allocate|not enough memory|bad_alloc")
_ADVICE = re.compile(r" was not an allowed |\. Please |\. This is an internal |\. If you ")

UNREADABLE = (RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, OverflowError, struct.error)
"""What unpickling noise can raise."""


def load_plain(data: io.BytesIO, where: str) -> Any:
    """``torch.load``, weights-only. Raises NotData where code would run, Damaged where nothing can be read."""
    # torch warns of any other protocol than its own; the refusal that follows says more.
    with only_data(where), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected pickle protocol")
        return torch.load(data, map_location="cpu", weights_only=True)


@contextmanager
def only_data(where: str) -> Iterator[None]:
    """Map what a weights-only ``torch.load`` raises: NotData where code would run, Damaged where it is all noise."""
    try:
        yield
    except pickle.UnpicklingError as error:
        # It says which global, class or function it met; bytes that are no pickle at all it cannot name.
        if _NAMES_CODE.search(str(error)):
            reason = _NAMES_CODE.split(str(error), maxsplit=1)[-1].strip().split("\n")[0]
            reason = _ADVICE.split(reason)[0]
            raise NotData(f"{where} holds more than tensors and plain data and was not loaded: {reason}") from None
        raise Damaged(f"{where} cannot be read: it is no torch.save archive") from None
    except UNREADABLE as error:
        if isinstance(error, torch.OutOfMemoryError) or _OF_MEMORY.search(str(error)):
            raise  # says nothing of the file
        raise Damaged(f"{where} cannot be read: {_ADVICE.split(first_line(error))[0]}") from error
    except OSError as error:
        raise map_error(error, f"read {where}") from error


def first_line(error: BaseException) -> str:
    """Kind and first line of an error."""
    return f"{type(error).__name__}: {str(error).strip()}".split("\n")[0]
