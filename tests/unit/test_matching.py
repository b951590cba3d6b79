"""Which key goes where: pure decisions about names."""

from __future__ import annotations

import pytest
import torch

from elastic_runner.checkpoint.matching import Lenience, check_shapes, match_groups, match_model
from elastic_runner.errors import Mismatch

STRICT = Lenience()


def test_equal_names_match() -> None:
    matched = match_model({"a": ["a"], "b": ["b"]}, ["b", "a"], {}, STRICT)
    assert (matched.source, matched.fresh, matched.ignored) == ({"a": "a", "b": "b"}, [], [])


@pytest.mark.parametrize(
    ("wanted", "saved", "saved_aliases", "source"),
    [
        (
            {"head": ["head", "embed"]},
            ["embed"],
            {"head": "embed"},
            {"head": "embed"},
        ),  # tied, defined in the other order
        ({"embed": ["embed"], "head": ["head"]}, ["embed"], {"head": "embed"}, {"embed": "embed", "head": "embed"}),
        ({"embed": ["embed", "head"]}, ["head"], {}, {"embed": "head"}),  # only one of two was ever saved
    ],
)
def test_ties(
    wanted: dict[str, list[str]], saved: list[str], saved_aliases: dict[str, str], source: dict[str, str]
) -> None:
    assert match_model(wanted, saved, saved_aliases, STRICT).source == source


def test_two_saved_tensors_cannot_become_one() -> None:
    with pytest.raises(Mismatch, match="head"):
        match_model({"embed": ["embed", "head"]}, ["embed", "head"], {}, STRICT)


def test_all_names_are_in_the_error_and_its_text_stays_short() -> None:
    wanted = {f"w{i:02}": [f"w{i:02}"] for i in range(20)}
    with pytest.raises(Mismatch, match=r"w00, w01, .* and 12 more; .* s0, .*allow_missing") as caught:
        match_model(wanted, ["s0", "s1"], {}, STRICT)
    assert caught.value.missing == tuple(wanted)
    assert caught.value.extra == ("s0", "s1")


def test_patterns_allow_only_what_they_fit() -> None:
    lenience = Lenience(allow_missing=["new.*"], allow_extra=["old.?"])
    wanted = {"a": ["a"], "new.x": ["new.x"]}
    matched = match_model(wanted, ["a", "old.1"], {}, lenience)
    assert (matched.fresh, matched.ignored) == (["new.x"], ["old.1"])
    with pytest.raises(Mismatch) as caught:
        match_model({**wanted, "newer": ["newer"]}, ["a", "old.1", "old.10"], {}, lenience)
    assert (caught.value.missing, caught.value.extra) == (("newer",), ("old.10",))


def test_nothing_loaded_is_an_error_whatever_is_allowed() -> None:
    with pytest.raises(Mismatch, match="no tensor"):
        match_model({"a": ["a"]}, ["b"], {}, Lenience(allow_missing=["*"], allow_extra=["*"]))


SAVED = [{"params": ["a", "b"], "lr": 0.1}, {"params": ["c"], "lr": 0.2}]


def test_settings_go_by_name() -> None:
    assert match_groups(SAVED, [["c"], ["b", "a"]]) == [{"lr": 0.2}, {"lr": 0.1}]
    assert match_groups(SAVED, [["a"], ["b"], ["c"]]) == [{"lr": 0.1}, {"lr": 0.1}, {"lr": 0.2}]


def test_new_parameters_take_their_groups_settings_or_keep_their_own() -> None:
    assert match_groups(SAVED, [["a", "new"], ["other"]]) == [{"lr": 0.1}, None]


def test_a_group_cannot_mix_different_settings() -> None:
    with pytest.raises(Mismatch, match=r"group 0 mixes.* a and c") as caught:
        match_groups(SAVED, [["a", "b", "c"]])
    assert caught.value.misshapen == ("c",)


def test_settings_that_are_tensors_or_nan_compare_by_value() -> None:
    saved = [{"params": [name], "lr": torch.tensor(0.1), "x": float("nan")} for name in "ab"]
    assert match_groups(saved, [["a", "b"]])[0] is not None
    saved[1]["lr"] = torch.tensor(0.2)
    with pytest.raises(Mismatch):
        match_groups(saved, [["a", "b"]])


def test_shape_and_type_differences_are_described() -> None:
    saved = {"a": (torch.Size([2, 3]), torch.float32), "b": (torch.Size([1]), torch.float32)}
    check_shapes(saved, saved.__getitem__, {"a": "a", "b": "b"})
    with pytest.raises(
        Mismatch, match=r"a is \[3, 2\] float32 in the model, \[2, 3\] float32 .*; b is \[1\] bfloat16"
    ) as caught:
        check_shapes(
            {"a": (torch.Size([3, 2]), torch.float32), "b": (torch.Size([1]), torch.bfloat16)},
            saved.__getitem__,
            {"a": "a", "b": "b"},
        )
    assert len(caught.value.misshapen) == 2
