"""Storage: a narrow protocol over local disks and any fsspec filesystem."""

from elastic_runner.storage.local import LocalStorage
from elastic_runner.storage.protocol import Storage, Written
from elastic_runner.storage.remote import SECRET, FsspecStorage, abort_old_uploads, creates_exclusively, open_storage

__all__ = [
    "SECRET",
    "FsspecStorage",
    "LocalStorage",
    "Storage",
    "Written",
    "abort_old_uploads",
    "creates_exclusively",
    "open_storage",
]
