"""RunConfig and its sections, read from a TOML file and dotted command-line flags.

Order of precedence: flags, then the file (``--config FILE`` or ``ELASTIC_RUNNER_CONFIG``), then defaults.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import pydantic
from annotated_types import Ge, Gt, MinLen
from pydantic.dataclasses import dataclass

from elastic_runner.environment import read_environment
from elastic_runner.errors import ConfigError, ExitCode
from elastic_runner.uncaught import exit_by_code
from elastic_runner.verdict import Verdict, tell

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Positive = Annotated[int, Gt(0)]
NotNegative = Annotated[int, Ge(0)]
Seconds = Annotated[float, Gt(0)]
Hours = Annotated[float, Gt(0)]
ReplayPolicy: TypeAlias = Literal["warn", "stop", "off"]

STRICT = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False)
"""Unknown names are errors. A recipe's own sections use it too."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainingConfig:
    """The optimisation loop."""

    max_steps: Positive = 100
    """Target number of optimizer steps. Raising it continues a finished run."""
    clip_norm: Annotated[float, Gt(0)] | None = None
    """Clip the global gradient norm to this value. None: only measure it."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Compute type: autocast under single, dp and ddp; FSDP's mixed precision under fsdp and hsdp.
    fp16 scales the loss dynamically and needs CUDA."""
    non_finite: Literal["stop", "skip"] = "stop"
    """What a loss or gradient norm that is not finite does: stop the run, or skip that update (counted)."""
    skip_failing: NotNegative = 0
    """Skip a global batch whose step has failed in the same way checkpoint.demote_after times in a row, as with a
    sample that cannot be read, instead of going back and at last ending the run; at most so many of them in a run. All
    of its samples are then left out of that epoch, for good (but may fill up its last batch, by data.last_batch); the
    ledger, status and audit tell it. The failures count against launch's budget of crashes, which progress between two
    such batches gives back. Not in a run's first step, where launch takes the program to be at fault, and not
    with streams. 0: never."""
    replay: ReplayPolicy = "warn"
    """Steps that are done again after a fault are compared with what the ledger says of them. What the first that
    came to something else does: warn with a diagnosis, or stop the run by ReplayDiverged. off: nothing is compared."""
    compare_replicas: NotNegative = 100
    """ddp, hsdp: compare the parameters of the replicas every so many steps, and besides at each checkpoint; a rank
    that differs is named, and the run goes back to where all were the same (have checkpoint.keep at 2 or more). It
    reads each parameter once; a step does so several times, so that at one step in a hundred it costs less than 1 %.
    Needs the same kind of processor on all nodes. 0: never."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataConfig:
    """The global batch and how it is loaded."""

    global_batch: Positive = 32
    """Samples per optimizer step, at every world size."""
    shards: Positive = 8
    """Logical shards (microbatches) per global batch; the upper bound of the world size. Must divide global_batch."""
    last_batch: Literal["drop", "pad"] = "drop"
    """The tail of an epoch that fills no global batch: leave it out, or fill up with the epoch's first samples."""
    loader_workers: NotNegative = 0
    """Loader processes per rank. 0 loads in the training process."""
    prefetch: Positive = 2
    """Microbatches that each loader process prepares ahead."""

    def __post_init__(self) -> None:
        if self.global_batch % self.shards:
            raise ValueError(f"data.shards={self.shards} must divide data.global_batch={self.global_batch}")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DdpConfig:
    """Options of torch's DistributedDataParallel."""

    bucket_cap_mb: Positive = 25
    """Size of a gradient bucket in MiB."""
    find_unused_parameters: bool = False
    """Search each backward for parameters without a gradient. Needed when a step leaves out a part of the model."""
    broadcast_buffers: bool = True
    """Broadcast rank 0's buffers (BatchNorm statistics) before each forward."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order. Excludes accumulation under DDP."""
    gradient_as_bucket_view: bool = True
    """Let gradients share memory with the buckets."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class FsdpConfig:
    """Options of FSDP2 (``fully_shard``)."""

    wrap_classes: tuple[str, ...] = ()
    """Names of block classes to shard as units. Empty: wrap by size."""
    wrap_min_params: Positive = 1_000_000
    """Wrapping by size: the smallest number of parameters that makes a unit."""
    reshard_after_forward: bool = True
    """Free gathered parameters after forward (ZeRO-3) or keep them until backward (ZeRO-2)."""
    forward_prefetch: NotNegative = 1
    """Units gathered ahead in forward."""
    backward_prefetch: NotNegative = 1
    """Units gathered ahead in backward."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory. Needs an accelerator."""
    shard_size: Positive | None = None
    """hsdp: ranks per shard group; default one node. Where it does not divide the world, the largest divisor of both
    is used."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StrategyConfig:
    """How the model is spread over ranks; the model's code stays as it is."""

    name: Literal["single", "dp", "ddp", "fsdp", "hsdp"] = "ddp"
    """single: one process. dp: torch's DataParallel, for comparison only: one process drives all GPUs of a node,
    limited by the GIL and by copying the model in every forward. ddp: replicas. fsdp: sharded. hsdp: sharded
    within groups, replicated across them."""
    checkpoint_classes: tuple[str, ...] = ()
    """Names of block classes whose activations are computed again in backward instead of kept."""
    ddp: DdpConfig = field(default_factory=DdpConfig)
    """Used when name is ddp."""
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    """Used when name is fsdp or hsdp."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CheckpointConfig:
    """Saving and restoring."""

    url: str | None = None
    """Any fsspec URL or path. None: checkpoints/ in the run directory."""
    options: dict[str, str] = field(default_factory=dict)
    """Options of that filesystem, dotted for nested ones: client_kwargs.endpoint_url http://... Never logged."""
    every: Positive = 20
    """Save every so many steps, and at the last one."""
    format: Literal["sharded", "full"] = "sharded"
    """sharded: every rank writes its part, in DCP layout. full: one file by global rank 0 that torch.load reads."""
    mode: Literal["async", "sync"] = "async"
    """async: a step waits for one copy of the state, and writing goes on beside training. sync: for all of it. The
    run's last save is always waited for."""
    when_busy: Literal["wait", "skip"] = "wait"
    """async: what a save that is due does while the one before is still being written. Skipped ones are counted."""
    spill: str | None = None
    """A directory on each node where a save goes that the storage does not take. It is uploaded when the run is
    started again; the next save that succeeds makes it needless."""
    failures_allowed: NotNegative = 3
    """Saves that may fail in a row, through trouble with the storage, before the run ends by SaveFailed."""
    keep: Positive = 3
    """Newest healthy checkpoints to keep. What another keep_* field or a pin keeps comes on top."""
    keep_every: Positive | None = None
    """Keep besides the first checkpoint at or after every multiple of so many steps."""
    keep_hours: Hours | None = None
    """Keep besides the first checkpoint, and then one every so many hours."""
    keep_best: NotNegative = 0
    """Keep besides so many of the best by best_metric, of those that were saved with that metric."""
    best_metric: Annotated[str, MinLen(1)] = "loss"
    """Name of a metric given at save."""
    best_mode: Literal["min", "max"] = "min"
    """Whether smaller or larger is better."""
    demote_after: NotNegative = 2
    """Go back to an older checkpoint when the newest has led to the same failure so many times. 0: never."""
    verify: Literal["digests", "sizes"] = "digests"
    """What restore checks before it loads."""
    allow_missing: tuple[str, ...] = ()
    """Glob patterns of keys that may be absent from a checkpoint; they keep their fresh values."""
    allow_extra: tuple[str, ...] = ()
    """Glob patterns of keys in a checkpoint that may be left unread."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SnapshotConfig:
    """Copies of the state in the node's memory, from which a killed worker's step is restored. They need
    ``elastic-runner launch``, and a loop that calls ``checkpointer.maybe_save`` at the end of every step."""

    enabled: bool = True
    """Whether they are taken."""
    every: Positive | None = None
    """Take one every so many steps. None: every step, or less often to stay within ``share``."""
    share: Annotated[float, Gt(0)] = 0.05
    """every = None: the most that snapshots may cost, as a part of the time that steps take."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrackingConfig:
    """Curves in other tools, told from global rank 0, with the optimizer step as the only unit. Servers and keys come
    from the tools' own environment variables."""

    trackers: tuple[str, ...] = ()
    """tensorboard (files in the run directory), mlflow, wandb, or a "module:attribute" of your own: see
    elastic_runner/tracking/protocol.py."""
    project: str | None = None
    """What mlflow (experiment) and wandb group runs by. None: by their own default."""
    name: str | None = None
    """The run's name there. None: the last part of run_dir."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TimeoutConfig:
    """Deadlines in seconds, one per phase. Past one, the launcher gathers the stacks of all ranks and restarts them;
    without ``elastic-runner launch`` the process prints its own and leaves, to be restarted."""

    setup: Seconds = 180
    """Finding the peers and building the process groups."""
    first_step: Seconds = 1200
    """The first step of an attempt, with compilation and warm-up."""
    step: Seconds = 600
    """Any other step, its data included."""
    save: Seconds = 1800
    """How long a save may stand still, on every rank; while bytes move, it may take as long as it needs."""
    load: Seconds = 1800
    """How long selecting, verifying and loading a checkpoint may stand still, as for ``save``."""
    evaluate: Seconds = 1800
    """One evaluation."""
    on_main: Seconds = 3600
    """What one rank does while the others wait (worker.on_main, worker.local_main_first), such as a download."""
    teardown: Seconds = 60
    """Leaving the process groups; and, when the program ends by an error, what a save that is going on is given."""
    storage: Seconds = 300
    """One storage operation, retries included."""
    tracking: Seconds = 30
    """How long the end of an attempt waits for trackers to take what is left; no more than half of ``teardown``."""
    learned_factor: Annotated[float, Ge(0)] = 10
    """A step may take so many times the longest of the last steps (a thousand at least), and no more than
    timeouts.step. 0: only timeouts.step counts."""
    learned_floor: Seconds = 120
    """The learned limit of a step is never below this: what comes up now and then, such as a compilation, must fit."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunConfig:
    """A training run. Recipes derive from it and add sections of their own."""

    run_dir: Annotated[str, MinLen(1)] = "runs/default"
    """Directory or fsspec URL of the run, shared by all nodes: summary, ledger, attempts, checkpoints."""
    storage_options: dict[str, str] = field(default_factory=dict)
    """Options of run_dir's filesystem, as in checkpoint.options. Never logged."""
    seed: int = 0
    """Decides initial weights, sample order and every random number of the run."""
    determinism: Literal["elastic", "order", "off"] = "order"
    """elastic: the result is the same to the last bit at every world size up to ``data.shards`` and under single, ddp
    and fsdp, as long as processor, torch and ``data`` stay the same. On the CPU each process computes in one thread;
    on an accelerator only deterministic kernels run; bf16 and fp16 are autocast under fsdp too, which gathers
    parameters in fp32. The optimizer must treat each number by itself (AdamW, SGD, ...; not fused on the CPU).
    order: same samples in the same order and the same random numbers at any world size. off: the same samples;
    random numbers differ by rank and attempt."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """The optimisation loop."""
    data: DataConfig = field(default_factory=DataConfig)
    """The global batch."""
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    """How the model is spread over ranks."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving and restoring."""
    snapshot: SnapshotConfig = field(default_factory=SnapshotConfig)
    """Copies in memory."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """Curves in other tools."""
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)
    """Deadlines per phase."""

    def __post_init__(self) -> None:
        if self.training.skip_failing and not self.checkpoint.demote_after:
            raise ValueError("training.skip_failing skips after checkpoint.demote_after failures, which is 0")


C = TypeVar("C", bound=RunConfig)


def read_config(cls: type[C], path: str | Path) -> C:
    """Read a TOML file into ``cls``. Raises ConfigError naming file, field and reason."""
    try:
        with Path(path).open("rb") as file:
            tree = tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"configuration file {path} does not exist") from None
    except OSError as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    try:
        return pydantic.TypeAdapter(cls).validate_python(_merged(asdict(cls()), tree))
    except pydantic.ValidationError as error:
        raise ConfigError(f"{path}: {describe(error)}") from None


def _merged(defaults: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    """``tree`` over ``defaults``, section by section, so that naming one field of a section keeps the others."""
    result = dict(defaults)
    for name, value in tree.items():
        below = defaults.get(name)
        # A table of free keys, such as storage options, is replaced as a whole.
        if isinstance(value, dict) and isinstance(below, dict) and below:
            value = _merged(below, value)
        result[name] = value
    return result


def describe(error: pydantic.ValidationError) -> str:
    """One readable line for a validation error: each field with what is wrong about it."""
    return "; ".join(f"{'.'.join(map(str, e['loc'])) or 'value'}: {e['msg']}" for e in error.errors())


def load_config(cls: type[C] = RunConfig, args: Sequence[str] | None = None) -> C:  # type: ignore[assignment]
    """The script's configuration: the launcher's file, then ``args`` (default ``sys.argv``).

    Raises ConfigError for a bad file or value; an unknown flag prints a usage error and exits with code 2, as does a
    ConfigError that nobody catches; ``--help`` exits 0.
    """
    import tyro  # only the scripts that parse a command line need it

    exit_by_code()
    arguments = list(sys.argv[1:] if args is None else args)
    environment = read_environment()
    path, arguments = _take_config_flag(arguments, environment.config_file)
    default = cls() if path is None else read_config(cls, path)
    about = (
        f"{cls.__doc__}\n\nSettings can also come from a TOML file: --config FILE, or ELASTIC_RUNNER_CONFIG; flags win."
    )
    try:
        return tyro.cli(
            cls, default=default, args=arguments, description=about, console_outputs=environment.local_rank == 0
        )
    except SystemExit as left:
        if left.code == ExitCode.USAGE:
            tell(environment.agent_dir, Verdict(code=left.code, message="wrong command line", final=True))
        raise


def _take_config_flag(arguments: list[str], path: str | None) -> tuple[str | None, list[str]]:
    rest: list[str] = []
    queue = iter(arguments)
    for argument in queue:
        if argument == "--config":
            path = next(queue, None)
            if path is None:
                raise ConfigError("--config needs a file name")
        elif argument.startswith("--config="):
            path = argument.partition("=")[2]
        else:
            rest.append(argument)
    return path, rest


def nested_options(options: dict[str, str]) -> dict[str, Any]:
    """``{"client_kwargs.endpoint_url": u}`` as the nested keyword arguments fsspec takes."""
    result: dict[str, Any] = {}
    for dotted, value in options.items():
        *parents, leaf = dotted.split(".")
        place = result
        for name in parents:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise ConfigError(f"storage option {dotted!r}: {name!r} has a value of its own already")
        # Flags are text; filesystems take booleans such as anon as what they are.
        place[leaf] = {"true": True, "false": False}.get(value.lower(), value)
    return result
