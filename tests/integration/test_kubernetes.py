"""The plain Job on a real cluster: a pod is deleted in the middle, the job finishes, and its record is without a gap.

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
import yaml

from elastic_runner.launch.kubernetes import KubernetesJob, render

GIVEN = ("KUBECONFIG", "ELASTIC_RUNNER_IMAGE", "ELASTIC_RUNNER_CLAIM")
STEPS = 4000
MINUTES = 15
WAIT = f"--timeout={MINUTES}m"
SMALL = (
    "--model.layers", "1", "--model.width", "32", "--model.heads", "2", "--model.context", "32",
    "--data.global-batch", "16", "--evaluation.every", str(STEPS),
)  # fmt: skip
"""A model that leaves the time to what is tested."""

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


def audit(job: KubernetesJob, manifests: str) -> dict[str, Any]:
    """What ``elastic-runner audit`` says, in a pod like the job's: the run directory is not seen from here."""
    (spec,) = (each["spec"]["template"]["spec"] for each in yaml.safe_load_all(manifests) if each["kind"] == "Job")
    spec["containers"][0] |= {"command": ["sh", "-c"], "args": [f"elastic-runner audit --json {job.run_dir} || true"]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"{job.name}-audit"}, "spec": spec}
    kubectl("apply", "-f", "-", manifests=json.dumps(pod))
    try:
        kubectl("wait", f"pod/{job.name}-audit", "--for=jsonpath={.status.phase}=Succeeded", WAIT)
        said: dict[str, Any] = json.loads(kubectl("logs", f"{job.name}-audit"))
        return said
    finally:
        kubectl("delete", "pod", f"{job.name}-audit")


def test_a_pod_is_deleted_and_the_job_finishes() -> None:
    name = f"er-{uuid.uuid4().hex[:8]}"
    selector = f"app.kubernetes.io/instance={name}"
    job = KubernetesJob(
        name=name, image=os.environ["ELASTIC_RUNNER_IMAGE"], claim=os.environ["ELASTIC_RUNNER_CLAIM"],
        run_dir=f"/runs/{name}", nodes="2", cpus="500m", memory="2Gi", shm="64Mi",
    )  # fmt: skip
    steps = ("--training.max-steps", str(STEPS), "--checkpoint.every", "500")
    manifests = render(job, ("-m", "elastic_runner.recipes.gpt", *SMALL, *steps), made_by="test")
    version = json.loads(kubectl("version", "-o", "json"))["serverVersion"]
    old = (int(version["major"]), int(version["minor"].rstrip("+"))) < (1, 31)
    kubectl("apply", "-f", "-", *(["--validate=false"] if old else []), manifests=manifests)
    try:
        kubectl("wait", f"job/{name}", "--for=jsonpath={.status.active}=2", WAIT)
        kubectl("wait", "--for=condition=ready", "pod", "-l", selector, WAIT)
        kubectl("delete", "pod", pods(selector)[0]["metadata"]["name"], "--wait=false")
        kubectl("wait", "--for=condition=complete", f"job/{name}", WAIT)
        said = audit(job, manifests)
        assert (said["verdict"], said["steps"]) == ("proven", STEPS), said
        assert len(said["attempts"]) > 1, "the deletion came too late"
    finally:
        kubectl("delete", "-f", "-", "--ignore-not-found", manifests=manifests)
