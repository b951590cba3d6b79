"""The plain Job on a real cluster: a pod is deleted in the middle, and the job finishes.

By hand: KUBECONFIG, ELASTIC_RUNNER_IMAGE (deploy/docker/Dockerfile, where the nodes find it) and ELASTIC_RUNNER_CLAIM
(a PersistentVolumeClaim that all nodes can write). A server too old for exit-code policies leaves them out.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import uuid
from typing import Any

import pytest

from elastic_runner.launch.kubernetes import KubernetesJob, render

GIVEN = ("KUBECONFIG", "ELASTIC_RUNNER_IMAGE", "ELASTIC_RUNNER_CLAIM")
STEPS = 4000
MINUTES = 15

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * MINUTES * 60),
    pytest.mark.skipif(
        shutil.which("kubectl") is None or not all(map(os.environ.get, GIVEN)),
        reason=f"needs kubectl and a cluster: {', '.join(GIVEN)}",
    ),
]


def kubectl(*arguments: str, manifests: str | None = None) -> str:
    done = subprocess.run(
        ["kubectl", *arguments], input=manifests, capture_output=True, text=True, timeout=MINUTES * 60 + 60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def pods(selector: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(kubectl("get", "pods", "-l", selector, "-o", "json"))["items"]
    return found


def test_a_pod_is_deleted_and_the_job_finishes() -> None:
    name = f"er-{uuid.uuid4().hex[:8]}"
    selector, wait = f"app.kubernetes.io/instance={name}", f"--timeout={MINUTES}m"
    job = KubernetesJob(
        name=name, image=os.environ["ELASTIC_RUNNER_IMAGE"], claim=os.environ["ELASTIC_RUNNER_CLAIM"],
        run_dir=f"/runs/{name}", nodes="2", cpus="500m", memory="2Gi", shm="64Mi",
    )  # fmt: skip
    steps = ("--training.max-steps", str(STEPS), "--checkpoint.every", "500")
    manifests = render(job, ("-m", "elastic_runner.recipes.digits", *steps), made_by="test")
    version = json.loads(kubectl("version", "-o", "json"))["serverVersion"]
    old = (int(version["major"]), int(version["minor"].rstrip("+"))) < (1, 31)
    kubectl("apply", "-f", "-", *(["--validate=false"] if old else []), manifests=manifests)
    try:
        kubectl("wait", "--for=condition=ready", "pod", "-l", selector, wait)
        first = sorted(pod["metadata"]["uid"] for pod in pods(selector))
        victim = pods(selector)[0]["metadata"]["name"]
        kubectl("delete", "pod", victim, "--wait=false")
        kubectl("wait", "--for=condition=complete", f"job/{name}", wait)
        last = pods(selector)
        assert sorted(pod["metadata"]["uid"] for pod in last) != first, "another pod took its place"
        said = "\n".join(kubectl("logs", pod["metadata"]["name"]) for pod in last)
        assert f"finished at step {STEPS} of {STEPS}" in said, said
    finally:
        kubectl("delete", "-f", "-", "--ignore-not-found", manifests=manifests)
