"""How much memory this machine, or the container, has left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def available_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that can be taken without swapping or being killed for it; None where the kernel does not say."""
    found = [*_machine(proc), *_groups(proc, groups)]
    return max(0, min(found)) if found else None


def _machine(proc: Path) -> Iterator[int]:
    with suppress(OSError, ValueError, IndexError):
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024


def _groups(proc: Path, groups: Path) -> Iterator[int]:
    """What the control groups of this process leave it, its own and all above; version 2, then version 1."""
    try:
        memberships = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in memberships:
        if controllers == "":
            yield from _left(groups, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _left(groups / "memory", path, *names)


def _left(root: Path, path: str, limit: str, used: str, cache: str) -> Iterator[int]:
    own = root / path.lstrip("/")
    for group in [own, *own.parents]:
        if root not in (group, *group.parents):
            break
        # A path is the host's where the container has a namespace of its own: only the root is there then.
        with suppress(OSError, ValueError):
            most = int((group / limit).read_text())  # "max": no limit
            yield most - int((group / used).read_text()) + _cached(group, cache)


def _cached(group: Path, name: str) -> int:
    """Bytes of files that the kernel drops first."""
    for line in (group / "memory.stat").read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
