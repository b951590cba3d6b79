"""Names of torch that are private, or pickled into files, and that the checkpoint floor leans on.

When one of these fails after an upgrade of torch, look at the place that is named before anything else.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import io
import pickle
import pickletools
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.launcher.api as launcher_api
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from elastic_runner.checkpoint.archive import load_plain
from elastic_runner.checkpoint.layout import files_of, pieces_of
from elastic_runner.checkpoint.metadata import METADATA, make_metadata, parse_metadata
from elastic_runner.checkpoint.names import wrapped_attribute
from elastic_runner.checkpoint.pickled import ALLOWED, StandIn, _Unpickler
from elastic_runner.errors import Damaged, NotData


def test_storage_info_says_where_an_item_lies() -> None:
    """checkpoint/sharded.py writes and reads it."""
    info = _StorageInfo("file", 3, 4)
    assert (info.relative_path, info.offset, info.length) == ("file", 3, 4)
    optional = {f.name for f in dataclasses.fields(info) if f.default is not dataclasses.MISSING}
    assert {f.name for f in dataclasses.fields(info)} - optional == {"relative_path", "offset", "length"}


def globals_of(data: bytes) -> set[tuple[str, str]]:
    """Every (module, name) that a pickle asks for."""
    found: set[tuple[str, str]] = set()

    class Listing(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found.add((module, name))
            return super().find_class(module, name)

    Listing(io.BytesIO(data)).load()
    return found


def test_metadata_ask_for_nothing_that_is_not_allowed(tmp_path: Path) -> None:
    """checkpoint/metadata.py reads what stock DCP makes, and makes the same."""
    dtypes = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.bool, torch.complex64]
    state = {f"t{i}": torch.zeros(2, dtype=dtype) for i, dtype in enumerate(dtypes)}
    dcp.save(
        {**state, "plain": {"a": 1}, "nested": {"b": [torch.ones(1)]}},
        storage_writer=dcp.FileSystemWriter(tmp_path / "data"),
        no_dist=True,
    )
    own = pickle.dumps(make_metadata(files_of(0, pieces_of(state)), {"plain": ("__0_0.distcp", 0, 5)}))
    assert globals_of(own) <= globals_of((tmp_path / "data" / METADATA).read_bytes())
    asked = globals_of((tmp_path / "data" / METADATA).read_bytes())
    assert ("torch.distributed.checkpoint.metadata", "Metadata") in asked
    assert {f"{module}.{name}" for module, name in asked} <= ALLOWED | {"collections.OrderedDict"}


def test_metadata_of_stock_dcp_are_read_as_torch_reads_them(tmp_path: Path) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.bool, torch.complex64]
    state = {f"t{i}": torch.zeros(2, 3, dtype=dtype) for i, dtype in enumerate(dtypes)}
    nested = {"b": [torch.ones(1), {"c": torch.ones(()), "d": torch.ones(0, 4)}], "e": (1, "x")}
    dcp.save({**state, "plain": {"a": 1}, "nested": nested}, checkpoint_id=tmp_path, no_dist=True)
    data = (tmp_path / METADATA).read_bytes()
    ours, torchs = parse_metadata(data, "x"), pickle.loads(data)
    assert ours.state_dict_metadata == torchs.state_dict_metadata
    assert ours.storage_data == torchs.storage_data
    assert [index.index for index in ours.storage_data] == [index.index for index in torchs.storage_data]
    assert [type(info) for info in ours.storage_data.values()] == [_StorageInfo] * len(ours.storage_data)


class OfPython3112(pickle.Pickler):
    """Writes the members of enumerations as Debian 12's Python does."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_metadata_written_by_another_python_are_read(tmp_path: Path) -> None:
    metadata = make_metadata(files_of(0, pieces_of({"t": torch.zeros(2, 3)})), {})
    stream = io.BytesIO()
    OfPython3112(stream).dump(metadata)
    assert ("builtins", "getattr") in globals_of(stream.getvalue())
    assert parse_metadata(stream.getvalue(), "x").state_dict_metadata == metadata.state_dict_metadata


def test_what_is_allowed_exists() -> None:
    """An allowed name that has gone means that torch pickles another one now."""
    for full in ALLOWED - {"pathlib._local.PosixPath"}:
        module, _, name = full.rpartition(".")
        assert hasattr(importlib.import_module(module), name)


def test_what_is_allowed_runs_nothing_and_touches_nothing() -> None:
    """Every name gives a stand-in; the one real type, dict, takes no attributes."""
    unpickler = _Unpickler(io.BytesIO())
    for full in ALLOWED:
        module, _, name = full.rpartition(".")
        found = unpickler.find_class(module, name)
        assert issubclass(found, StandIn)
        # A class, given by a pickle's BUILD the state (None, {attribute: value}), would have the attribute set.
        with pytest.raises(TypeError):
            pickle.Unpickler.load(_Unpickler(io.BytesIO(building(module, name))))
        assert "__truediv__" not in vars(found)
    with pytest.raises(TypeError, match="immutable"):
        _Unpickler(io.BytesIO(building("collections", "OrderedDict"))).load()


def building(module: str, name: str) -> bytes:
    """A pickle that sets an attribute of what it names."""
    named = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)) + b"\x93"
    return b"\x80\x04" + named + b"N}\x8c\x0b__truediv__" + named + b"s\x86b."


class Payload:
    def __reduce__(self) -> Any:
        return print, ("never",)


class OldPayload(dict):  # type: ignore[type-arg]
    def __init__(self) -> None:
        self["x"] = 1


def saved(value: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


@pytest.mark.parametrize(
    "data",
    [
        saved(Payload()),
        saved([OldPayload()]),
        saved(print),
        io.BytesIO(pickle.dumps(Payload(), 2)),
        io.BytesIO(pickle.dumps(Payload(), 5)),
    ],
    ids=["reduce", "class", "function", "protocol 2", "protocol 5"],
)
def test_what_torch_says_of_code_is_recognised(data: io.BytesIO) -> None:
    """checkpoint/sharded.py tells code from noise by the words of torch's weights-only unpickler."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with pytest.raises(NotData):
            load_plain(data, "x")


@pytest.mark.parametrize(
    "data", [b"", bytes(100), b"PK\x03\x04" + bytes(100), b"noise" * 20, saved(1).getvalue()[:200]]
)
def test_what_torch_says_of_noise_is_recognised(data: bytes) -> None:
    with pytest.raises(Damaged):
        load_plain(io.BytesIO(data), "x")


def test_torch_save_writes_protocol_2() -> None:
    """Operand 149 (FRAME) counts as code, since it opens pickles of protocol 4 and later only."""
    assert pickletools.code2op["\x95"].name == "FRAME"
    assert pickletools.code2op["\x95"].proto == 4
    assert torch.serialization.DEFAULT_PROTOCOL == 2


def test_wrappers_keep_their_module_where_they_did() -> None:
    """checkpoint/names.py knows two of them by name."""
    compiled = torch.compile(nn.Linear(1, 1), backend="eager")
    assert wrapped_attribute(compiled) == "_orig_mod"  # type: ignore[arg-type]
    assert list(compiled._modules) == ["_orig_mod"]  # type: ignore[attr-defined]
    wrapped = checkpoint_wrapper(nn.Linear(1, 1))
    assert wrapped_attribute(wrapped) == "_checkpoint_wrapped_module"
    assert list(wrapped._modules) == ["_checkpoint_wrapped_module"]
    assert wrapped_attribute(nn.DataParallel(nn.Linear(1, 1))) == "module"


def test_checkpoint_exceptions_hold_each_ranks_own() -> None:
    """checkpoint/load.py unpacks them; they are no Exception, so a plain ``except Exception`` misses them."""
    error = CheckpointException("x", {1: (ValueError("own"), None)})  # type: ignore[dict-item]
    assert isinstance(error.failures[1][0], ValueError)
    assert not issubclass(CheckpointException, Exception)


def test_extra_state_is_called_so() -> None:
    """checkpoint/capture.py treats it apart."""
    assert torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX == "_extra_state"


def test_the_agent_is_built_from_a_name_and_runs_by_one_method() -> None:
    """launch/agent.py puts its own in place of the name and overrides the method."""
    assert launcher_api.LocalElasticAgent is LocalElasticAgent
    assert "LocalElasticAgent(" in inspect.getsource(launcher_api.launch_agent)
    assert "result = self._invoke_run(role)" in inspect.getsource(LocalElasticAgent.run)
    loop = inspect.getsource(LocalElasticAgent._invoke_run)
    assert "self._initialize_workers(self._worker_group)" in loop and "self._exit_barrier()" in loop
    begin = inspect.getsource(LocalElasticAgent._initialize_workers)
    assert "self._rendezvous(worker_group)" in begin and "self._start_workers(worker_group)" in begin
    start = inspect.getsource(LocalElasticAgent._start_workers)
    assert "restart_count = spec.max_restarts - self._remaining_restarts" in start
    assert "self._pcontext = start_processes(" in start
    assert "self._pcontext.close(death_sig, timeout)" in inspect.getsource(LocalElasticAgent._shutdown)


def test_torch_makes_a_worker_the_way_that_forking_replaces() -> None:
    """launch/forking.py."""
    import torch.distributed.elastic.multiprocessing.api as api
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    assert "get_subprocess_handler(" in inspect.getsource(api.SubprocessContext._start)
    assert list(inspect.signature(SubprocessHandler._popen).parameters) == ["self", "args", "env"]
    made = inspect.getsource(SubprocessHandler.__init__)
    assert "self.local_rank_id = local_rank_id" in made.partition("self._popen(args_str, env_vars)")[0]
    assert "self._popen(args_str, env_vars)" in made
    used = set(re.findall(r"handler\.proc\.(\w+)", inspect.getsource(api.SubprocessContext)))
    assert used <= {"poll", "pid", "wait"}, "ForkedProcess has what is used"


def test_fsdp_hands_whole_gradients_to_its_reduce_scatter_and_sums_none_of_its_own() -> None:
    """train/sharded.py takes its place; of one rank it is not called, and train/exact.py takes the gradients."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_reduce
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    reduce = inspect.getsource(foreach_reduce)
    assert "reduce_scatter_input = reduce_scatter_comm.allocate(" in reduce
    assert "output_tensor=reduce_output,\n                input_tensor=reduce_scatter_input," in reduce
    assert "if world_size > 1:\n            reduce_scatter_comm(" in reduce
    # The memory of one unit's gradient is used again for the next microbatch's: what was done with it is waited for.
    assert "wait_event(oldest.event)" in inspect.getsource(FSDPParamGroup.post_backward)
