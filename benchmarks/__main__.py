"""Runs one benchmark by its name."""

from __future__ import annotations

import sys

HELP = """usage: scripts/bench BENCHMARK [flags]

benchmarks:
  checkpoint     saving and loading against memcpy, raw direct I/O, torch.distributed.checkpoint and a plain S3 upload
  control-plane  the rendezvous with up to 1,000 simulated nodes
  exact          determinism = "elastic" against plain DDP and FSDP2: seconds, bytes and memory of a step
  recovery       seconds from a fault to the next committed step, against stock torchrun on the same script

'scripts/bench BENCHMARK --help' says what is measured and how."""


def main() -> int:
    """Returns the exit code."""
    name, rest = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("--help", [])
    if name in ("-h", "--help", "help"):
        print(HELP)
        return 0 if len(sys.argv) > 1 else 2
    if name == "checkpoint":
        from benchmarks.checkpoint import main as checkpoint

        return checkpoint(rest)
    if name == "control-plane":
        from benchmarks.control_plane import main as control_plane

        return control_plane(rest)
    if name == "exact":
        from benchmarks.exact import main as exact

        return exact(rest)
    if name == "recovery":
        from benchmarks.recovery import main as recovery

        return recovery(rest)
    print(f"scripts/bench: no benchmark {name!r}; --help lists them", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
