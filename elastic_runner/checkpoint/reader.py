"""What the readers of both formats have in common."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, TypeVar

from torch.distributed.checkpoint import LoadPlan
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

T = TypeVar("T")


class Reader(StorageReader):
    """A DCP reader that can also give the plain data, and leaves DCP's plans as they are."""

    @abstractmethod
    def plain(self, metadata: Metadata) -> dict[str, Any]:
        """Plain data by key; no tensor is read."""

    def close(self) -> None:
        """Let go of files; nothing, where none is held open."""

    def reset(self, checkpoint_id: Any = None) -> None:
        """Part of DCP's protocol; a reader is used for one checkpoint."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to add."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Chosen by us, never by DCP."""
        return False


def done(value: T) -> Future[T]:
    """A future that has its value already: reading and writing are done when DCP asks."""
    future: Future[T] = Future()
    future.set_result(value)
    return future
