"""Storage: a narrow protocol over local disks and any fsspec filesystem."""

from elastic_runner.storage.local import LocalStorage
from elastic_runner.storage.protocol import Storage, Written
from elastic_runner.storage.remote import FsspecStorage, abort_old_uploads, creates_exclusively, open_storage

__all__ = [
    "FsspecStorage",
    "LocalStorage",
    "Storage",
    "Written",
    "abort_old_uploads",
    "creates_exclusively",
    "open_storage",
]
