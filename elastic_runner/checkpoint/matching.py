"""Which key of a checkpoint goes where in the present model and optimizer. Pure decisions about names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from elastic_runner.errors import Mismatch


@dataclass(frozen=True, kw_only=True)
class Lenience:
    """Glob patterns of keys that need not match."""

    allow_missing: Sequence[str] = ()
    """Keys that may be absent from the checkpoint."""
    allow_extra: Sequence[str] = ()
    """Keys of the checkpoint that may be left unread."""


@dataclass(kw_only=True)
class Matched:
    """The outcome of matching."""

    source: dict[str, str] = field(default_factory=dict)
    """Wanted key -> key in the checkpoint."""
    fresh: list[str] = field(default_factory=list)
    """Wanted keys that keep their present values, by permission."""
    ignored: list[str] = field(default_factory=list)
    """Keys of the checkpoint left unread, by permission."""


def match_model(
    wanted: Mapping[str, Sequence[str]],
    saved: Iterable[str],
    saved_aliases: Mapping[str, str],
    lenience: Lenience,
) -> Matched:
    """Match model names. ``wanted``: stored name -> all names of that tensor (several when tied now).

    A tensor tied in the checkpoint and not in the model is read into each; one tied now and saved as two is an
    error, since the copies may differ. Raises Mismatch naming every missing and extra name.
    """
    saved = set(saved)
    result = Matched()
    missing: list[str] = []
    used: set[str] = set()
    for name, names in wanted.items():
        source = next((n for n in names if n in saved), None)
        if source is None:
            source = next((saved_aliases[n] for n in names if saved_aliases.get(n) in saved), None)
        if source is not None:
            result.source[name] = source
            used.add(source)
        elif allowed(name, lenience.allow_missing):
            result.fresh.append(name)
        else:
            missing.append(name)
    left = sorted(saved - used)
    result.ignored = [name for name in left if allowed(name, lenience.allow_extra)]
    extra = [name for name in left if name not in result.ignored]
    if missing or extra:
        raise _mismatch("model", missing, extra)
    if wanted and not result.source:
        raise Mismatch("no tensor of the checkpoint fits the model, whatever is allowed to be missing", missing=wanted)
    return result


def match_groups(saved: Sequence[Mapping[str, Any]], present: Sequence[Sequence[str]]) -> list[dict[str, Any] | None]:
    """Hyper-parameters for each present optimizer group (a list of parameter names), by name, not by position.

    None for a group of parameters that were not trained before. Raises Mismatch when a group would mix parameters
    whose hyper-parameters differ.
    """
    settings = {name: {k: v for k, v in group.items() if k != "params"} for group in saved for name in group["params"]}
    result: list[dict[str, Any] | None] = []
    for number, names in enumerate(present):
        known = [name for name in names if name in settings]
        first = settings[known[0]] if known else None
        different = [name for name in known if not _same(settings[name], first)]
        if different:
            raise Mismatch(
                f"optimizer group {number} mixes parameters saved with different settings: {known[0]} and "
                f"{', '.join(different[:5])}. Keep them in groups of their own.",
                misshapen=different,
            )
        result.append(first)
    return result


def check_shapes(
    wanted: Mapping[str, tuple[Any, Any]], saved: Callable[[str], tuple[Any, Any]], source: Mapping[str, str]
) -> None:
    """Compare (shape, dtype) of each wanted key with its source. Raises Mismatch describing each difference."""
    wrong = [
        f"{key} is {_say(*wanted[key])} in the model, {_say(*saved(origin))} in the checkpoint"
        for key, origin in source.items()
        if tuple(wanted[key][0]) != tuple(saved(origin)[0]) or wanted[key][1] != saved(origin)[1]
    ]
    if wrong:
        raise Mismatch(f"the checkpoint does not fit: {'; '.join(wrong[:10])}", misshapen=wrong)


def _say(shape: Any, dtype: Any) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


def _same(one: Any, other: Any) -> bool:
    # repr compares tensors, NaN and tuples alike; settings are small.
    return repr(one) == repr(other)


def allowed(name: str, patterns: Sequence[str]) -> bool:
    """Whether one of the glob patterns fits."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _mismatch(what: str, missing: Sequence[str], extra: Sequence[str]) -> Mismatch:
    parts = []
    if missing:
        parts.append(f"not in the checkpoint: {_some(missing)}")
    if extra:
        parts.append(f"in the checkpoint but not in the {what}: {_some(extra)}")
    advice = "Use the model that was saved, or name patterns in checkpoint.allow_missing / checkpoint.allow_extra."
    return Mismatch(
        f"the checkpoint does not fit the {what}; {'; '.join(parts)}. {advice}", missing=missing, extra=extra
    )


def _some(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
