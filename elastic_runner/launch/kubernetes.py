"""Kubernetes: manifests rendered by a pure function, and handed to ``kubectl``.

The files are for people: one node is one pod, which runs one agent, and none of them is special. What the kinds have in
common, the pod, is the same text in each.
"""

from __future__ import annotations

import json
import re
import shutil
import string
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import indent
from typing import Literal

from elastic_runner import paths
from elastic_runner.errors import ConfigError, ExitCode, SubmitError
from elastic_runner.launch.schedulers import comment, node_range

RUNS = "/runs"
"""Where the shared volume is mounted."""
PORT = 8080
"""Of an agent's health."""
GRACE = 660
"""Seconds from TERM to KILL: the ten minutes that ``launch`` gives workers to drain, and one for itself."""
_WORKLOADS = ("job.", "jobset.", "trainjob.", "pytorchjob.")
"""How kubectl's names of what is started begin."""
_TRIES = 6
"""Failures that count, of each node: where one ends all nodes, each of their pods has failed."""
_APPLYING = 120.0
"""Seconds for kubectl."""


@dataclass(frozen=True, kw_only=True)
class KubernetesJob:
    """What the manifests say."""

    kind: Literal["job", "jobset", "trainjob", "pytorchjob"] = "job"
    """job needs no operator; jobset, trainjob (Kubeflow Trainer) and pytorchjob (Training Operator) need theirs."""
    name: str
    """Name of the job and of what belongs to it: small letters, digits, '-'; 50 at most."""
    image: str
    """Container image with elastic-runner and the script."""
    run_dir: str
    """Run directory below /runs, where the shared volume is mounted, or an fsspec URL that all nodes see. The script
    gets it as --run-dir, the rendezvous is in it."""
    nodes: str = "1"
    """Pods: N, or MIN:MAX: trains on as many as there are, once there are MIN."""
    nproc_per_node: str = "1"
    """Workers in each, as torchrun takes it: a number, gpu, cpu, auto."""
    claim: str = "runs"
    """PersistentVolumeClaim of the shared volume (ReadWriteMany), where the run directory is no URL."""
    secret: str | None = None
    """Secret whose keys become environment variables, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."""
    gpus: int = 0
    """Of a pod (nvidia.com/gpu)."""
    cpus: str = "4"
    """Of a pod."""
    memory: str = "16Gi"
    """Of a pod. Part of it are snapshots, two copies of what its workers hold of the state, and --shm."""
    shm: str = "2Gi"
    """Size of /dev/shm, through which loader processes hand over batches."""


class _Template(string.Template):
    """What is filled in begins with @."""

    delimiter = "@"


_POD = """\
metadata:
  labels:
    app.kubernetes.io/name: elastic-runner
    app.kubernetes.io/instance: @name
  annotations:
    prometheus.io/scrape: "true"
    prometheus.io/port: "@port"
    prometheus.io/path: /metrics
spec:@subdomain@restart
  # On TERM all ranks stop at one step and save; a preStop hook would only come before that.
  terminationGracePeriodSeconds: @grace
  securityContext:
    runAsNonRoot: true
    runAsUser: 1000
    runAsGroup: 1000
    fsGroup: 1000
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile:
      type: RuntimeDefault
  containers:
    - name: @container
@command@secret
      ports:
        - name: health
          containerPort: @port
      startupProbe: # torch takes its time to be imported
        httpGet:
          path: /live
          port: health
        periodSeconds: 5
        failureThreshold: 60
      livenessProbe: # the agent's loop turns; hanging workers are the agent's business
        httpGet:
          path: /live
          port: health
        timeoutSeconds: 5
      readinessProbe: # all workers of this node train
        httpGet:
          path: /ready
          port: health
        timeoutSeconds: 5
      resources:
        requests:
          cpu: @cpus
          memory: @memory@gpus
        limits:
          memory: @memory@gpus
      securityContext:
        allowPrivilegeEscalation: false
        capabilities:
          drop: [ALL]
      volumeMounts:
        - name: shm
          mountPath: /dev/shm@mount
  volumes:
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: @shm@volume
"""

_COMMAND = """\
image: @image
command: [elastic-runner, launch]
args:
@args
"""

_JOB_SPEC = """\
completionMode: Indexed
completions: @most
parallelism: @most
# No pod ends with 0 before the whole run is finished; one that comes late is not waited for.
successPolicy:
  rules:
    - succeededCount: 1
# Pods that may fail for other reasons than those below. Agents have budgets of their own, which no new pod renews.
backoffLimit: @tries
podFailurePolicy:
  rules:
    - action: Ignore # drained, evicted, preempted
      onPodConditions:
        - type: DisruptionTarget
          status: "True"
    - action: Ignore # interrupted and saved
      onExitCodes:
        operator: In
        values: [@interrupted]
    - action: FailJob # wrong command line; do not retry
      onExitCodes:
        operator: In
        values: [@fatal]
template:
@pod
"""

_JOB = """\
apiVersion: v1
kind: Service # headless: gives each pod a name, @name-0.@name
metadata:
  name: @name
spec:
  clusterIP: None
  publishNotReadyAddresses: true # pods look for each other before they are ready
  selector:
    app.kubernetes.io/instance: @name
  ports:
    - name: health
      port: @port
---
apiVersion: batch/v1
kind: Job
metadata:
  name: @name
spec:
@job
"""

_JOBSET = """\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet # makes a headless service by itself
metadata:
  name: @name
spec:
  replicatedJobs:
    - name: node
      replicas: 1
      template:
        spec:
@job
"""

_TRAINJOB = """\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainingRuntime # what the pods are like
metadata:
  name: @name
  labels:
    trainer.kubeflow.org/framework: torch
spec:
  mlPolicy:
    numNodes: @most
  template:
    spec:
      replicatedJobs:
        - name: node
          template:
            metadata:
              labels:
                trainer.kubeflow.org/trainjob-ancestor-step: trainer
            spec:
@job
---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: @name
spec:
  runtimeRef:
    apiGroup: trainer.kubeflow.org
    kind: TrainingRuntime
    name: @name
  trainer:
    numNodes: @most
@command
"""

_PYTORCHJOB = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: @name
spec:
  runPolicy:
    cleanPodPolicy: Running
    # There is no policy by exit codes here: what must not be retried is tried this often all the same.
    backoffLimit: @tries
  pytorchReplicaSpecs:
    Worker: # no Master: no pod is special
      replicas: @most
      restartPolicy: OnFailure
      template:
@pod
"""


def render(job: KubernetesJob, command: Sequence[str], *, made_by: str) -> str:
    """The manifests. ``command``: the script, or -m and a module, and its arguments; ``made_by``: the command line that
    they come from. Raises ConfigError."""
    least, most = node_range(job.nodes)
    _check(job, command)
    trainer = job.kind == "trainjob"
    texts = {"job": (_JOB, 2), "jobset": (_JOBSET, 10), "trainjob": (_TRAINJOB, 14), "pytorchjob": (_PYTORCHJOB, 8)}
    text, depth = texts[job.kind]
    container = _fill(_COMMAND, image=_scalar(job.image), args=_list(_arguments(job, least, most, command)))
    pod = _pod(job, "image: elastic-runner # the TrainJob names another one\n" if trainer else container)
    spec = _fill(
        _JOB_SPEC, most=most, pod=indent(pod, "  "), interrupted=int(ExitCode.INTERRUPTED),
        fatal=f"{int(ExitCode.USAGE)}, {int(ExitCode.DO_NOT_RETRY)}", tries=_TRIES * most,
    )  # fmt: skip
    body = _fill(
        text, name=job.name, most=most, port=PORT, tries=_TRIES * most,
        job=indent(spec, " " * depth), pod=indent(pod, " " * depth), command=indent(container, "    "),
    )  # fmt: skip
    return f"{comment(made_by)}\n{body}"


def apply(manifests: str) -> str:
    """Hand manifests to the cluster that kubectl knows; what it says. Raises SubmitError."""
    if shutil.which("kubectl") is None:
        raise SubmitError(
            "there is no kubectl here; where there is: submit kubernetes --dry-run … | kubectl apply -f -"
        )
    try:
        done = subprocess.run(
            ["kubectl", "apply", "-f", "-"], input=manifests, capture_output=True, text=True, timeout=_APPLYING
        )
    except subprocess.TimeoutExpired:
        raise SubmitError(f"kubectl has not answered in {_APPLYING:.0f} s") from None
    if done.returncode != 0:
        raise SubmitError(f"kubectl: {done.stderr.strip() or f'exit code {done.returncode}'}")
    for line in done.stdout.splitlines():
        workload, _, what = line.partition(" ")
        if what == "unchanged" and workload.startswith(_WORKLOADS):
            raise SubmitError(f"{workload} is there already, and may have ended: to start it again, kubectl delete it")
    return done.stdout


def _arguments(job: KubernetesJob, least: int, most: int, command: Sequence[str]) -> list[str]:
    launch = [
        f"--nnodes={least}" if least == most else f"--nnodes={least}:{most}",
        f"--nproc-per-node={job.nproc_per_node}",
        "--rdzv-backend=elastic",
        f"--rdzv-endpoint={paths.join(job.run_dir, 'rendezvous')}",
        f"--rdzv-id={job.name}",
        f"--health=0.0.0.0:{PORT}",
        # torch's own files; on an object store a pod's log is all there is
        *([] if "://" in job.run_dir else [f"--log-dir={paths.join(job.run_dir, 'logs')}", "--tee=3"]),
    ]
    script = [text.replace("$(", "$$(") for text in (*command, f"--run-dir={job.run_dir}")]  # or Kubernetes expands it
    return [*launch, *script]


def _pod(job: KubernetesJob, command: str) -> str:
    volume = "://" not in job.run_dir
    return _fill(
        _POD,
        name=job.name,
        container="pytorch" if job.kind == "pytorchjob" else "node",
        port=PORT,
        grace=GRACE,
        subdomain=f"\n  subdomain: {job.name} # that of the Service" if job.kind == "job" else "",
        restart="" if job.kind == "pytorchjob" else "\n  restartPolicy: Never",
        command=indent(command, " " * 6).rstrip("\n"),
        secret=f"\n      envFrom:\n        - secretRef:\n            name: {job.secret}" if job.secret else "",
        cpus=json.dumps(job.cpus),
        memory=job.memory,
        shm=job.shm,
        gpus=f'\n          nvidia.com/gpu: "{job.gpus}"' if job.gpus else "",
        mount=f"\n        - name: runs\n          mountPath: {RUNS}" if volume else "",
        volume=f"\n    - name: runs\n      persistentVolumeClaim:\n        claimName: {job.claim}" if volume else "",
    )


def _check(job: KubernetesJob, command: Sequence[str]) -> None:
    if not command:
        raise ConfigError("no script: it comes after '--', with its arguments")
    for flag, name in (("name", job.name), ("claim", job.claim), ("secret", job.secret or "s")):
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?", name):
            raise ConfigError(f"--{flag} {name}: small letters, digits and '-', 50 at most, and a letter first")
    for flag, quantity in (("cpus", job.cpus), ("memory", job.memory), ("shm", job.shm)):
        if not re.fullmatch(r"\d+(\.\d+)?(m|[kMGTP]|[KMGTP]i)?", quantity):
            raise ConfigError(f"--{flag} {quantity}: a quantity as Kubernetes has it, such as 500m, 4, 16Gi")
    if "://" not in job.run_dir and not f"{job.run_dir}/".startswith(f"{RUNS}/"):
        raise ConfigError(
            f"--run-dir {job.run_dir}: a directory below {RUNS}, the shared volume, or a URL such as s3://…"
        )


def _fill(text: str, **values: object) -> str:
    return _Template(text).substitute({key: str(value).rstrip("\n") for key, value in values.items()})


def _list(items: Sequence[str]) -> str:
    return "\n".join(f"  - {_scalar(item)}" for item in items)


_PLAIN = re.compile(r"(?:--?|/)?[A-Za-z][\w./=@%+-]*(?::[\w./=@%+-]+)*", re.ASCII)
_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n", "null"})


def _scalar(text: str) -> str:
    """A string in YAML, in quotes where it could be taken for something else. JSON's are YAML's, too."""
    plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    return text if plain else json.dumps(text, ensure_ascii=False)
