"""Manifests: valid by the published schemas, the same as those in deploy/, and true to the README's exit codes."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from kubeflow.training import KubeflowOrgV1PyTorchJob
from kubeflow.training.api_client import ApiClient
from kubeflow.training.utils.utils import FakeResponse
from kubeflow_trainer_api import models as trainer

from elastic_runner.cli.main import main
from elastic_runner.errors import ConfigError, ExitCode
from elastic_runner.launch import agent, options
from elastic_runner.launch.kubernetes import KubernetesJob, render

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
KINDS = ("job", "jobset", "trainjob", "pytorchjob")
COMMAND = ("-m", "elastic_runner.recipes.gpt")


def documents(text: str) -> dict[str, Any]:
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def rendered(kind: str = "job", *command: str, **changes: Any) -> dict[str, Any]:
    job = {"kind": kind, "name": "gpt", "image": "elastic-runner:0.1.0", "run_dir": "/runs/gpt", **changes}
    return documents(render(KubernetesJob(**job), command or COMMAND, made_by="test"))


def job_spec(found: dict[str, Any]) -> dict[str, Any]:
    """What a Job, a JobSet and a TrainingRuntime have in common."""
    if "Job" in found:
        return found["Job"]["spec"]
    spec = found["JobSet"]["spec"] if "JobSet" in found else found["TrainingRuntime"]["spec"]["template"]["spec"]
    (replicated,) = spec["replicatedJobs"]
    return replicated["template"]["spec"]


def pod(found: dict[str, Any]) -> dict[str, Any]:
    if "PyTorchJob" in found:
        return found["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    return job_spec(found)["template"]


def container(found: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod(found)["spec"]["containers"]
    return {**only, **found["TrainJob"]["spec"]["trainer"]} if "TrainJob" in found else only


def valid(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, "1.33", strict=True)


@pytest.mark.parametrize("kind", KINDS)
def test_each_file_is_what_its_first_line_renders(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (FOLDER / f"{kind}.yaml").read_text()
    line = re.match(r"# elastic-runner (.*) -- (.*)", text)
    assert line is not None
    assert main([*shlex.split(line[1]), "--dry-run", "--", *shlex.split(line[2])]) == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("changes", [{}, {"nodes": "2:4", "gpus": 8, "run_dir": "s3://bucket/gpt", "secret": "s3"}])
def test_core_kinds_are_valid_to_the_letter(changes: dict[str, Any]) -> None:
    found = rendered(**changes)
    assert list(found) == ["Service", "Job"]
    assert pod(found)["spec"]["subdomain"] == found["Service"]["metadata"]["name"], "else its pods have no names"
    for document in found.values():
        valid(document)
    for kind in ("jobset", "trainjob"):
        valid({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job_spec(rendered(kind))})
    valid({"apiVersion": "v1", "kind": "Pod", **pod(rendered("pytorchjob", **changes))})
    for document in yaml.safe_load_all((FOLDER / "claim.yaml").read_text()):
        assert document["kind"] == "PersistentVolumeClaim"
        valid(document)


def unknown(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Paths of what a model has dropped or changed; its defaults come on top."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [each for key in ours for each in unknown(ours[key], theirs.get(key), f"{path}/{key}")]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [each for one, other in zip(ours, theirs, strict=True) for each in unknown(one, other, f"{path}[]")]
    return [] if ours == theirs else [path]


def as_trainer_knows(model: Any, document: dict[str, Any]) -> Any:
    return model.from_dict(document).to_dict()


def as_training_operator_knows(model: Any, document: dict[str, Any]) -> Any:
    client = ApiClient()
    return client.sanitize_for_serialization(client.deserialize(FakeResponse(document), model))


@pytest.mark.parametrize(
    ("kind", "know", "model"),
    [
        ("JobSet", as_trainer_knows, trainer.JobsetV1alpha2JobSet),
        ("TrainingRuntime", as_trainer_knows, trainer.TrainerV1alpha1TrainingRuntime),
        ("TrainJob", as_trainer_knows, trainer.TrainerV1alpha1TrainJob),
        ("PyTorchJob", as_training_operator_knows, KubeflowOrgV1PyTorchJob),
    ],
)
def test_kubeflow_s_models_know_every_field(kind: str, know: Callable[[Any, Any], Any], model: Any) -> None:
    of = {"JobSet": "jobset", "PyTorchJob": "pytorchjob"}.get(kind, "trainjob")
    document = rendered(of, nodes="2:4", gpus=1, run_dir="s3://bucket/gpt", secret="s3")[kind]
    assert unknown(document, know(model, document)) == []
    strange = {**document, "spec": {**document["spec"], "strange": 1}}
    assert unknown(strange, know(model, strange)) == ["/spec/strange"], "else the line above shows nothing"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
@pytest.mark.parametrize("kind", KINDS)
def test_kustomize_builds_the_folder(kind: str, tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "copy")
    choice = tmp_path / "copy" / "kustomization.yaml"
    choice.write_text(choice.read_text().replace("- job.yaml", f"- {kind}.yaml"))
    done = subprocess.run(["kubectl", "kustomize", choice.parent], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = documents(done.stdout)
    assert found.pop("PersistentVolumeClaim")
    assert found.keys() == documents((FOLDER / f"{kind}.yaml").read_text()).keys()
    if kind == "job":
        assert container(found)["image"] == "registry.example/elastic-runner:0.1.0"


def test_exit_codes_do_what_the_table_in_the_readme_says() -> None:
    table = (
        (ROOT / "README.md").read_text().partition("| exit code | meaning | a Kubernetes Job")[2].partition("\n\n")[0]
    )
    promised = {int(row[1]): row[2] for row in re.finditer(r"^\| \*\*(\d+)\*\* \|[^|]*\| ([^|]*?) \|", table, re.M)}
    for kind in KINDS[:3]:
        policy = job_spec(rendered(kind))["podFailurePolicy"]["rules"]
        actions = {code: rule["action"] for rule in policy for code in rule.get("onExitCodes", {}).get("values", ())}
        words = {"Ignore": "starts another pod", "FailJob": "fails"}
        done = {int(code): words.get(actions.get(code, ""), "starts another pod; counts") for code in ExitCode}
        assert promised == {**done, 0: "is complete"}, kind
        assert policy[0] == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_does_what_the_launcher_needs(kind: str) -> None:
    found = rendered(kind, nodes="2:4", nproc_per_node="2")
    args = options.parse(container(found)["args"])
    assert (args.nnodes, args.nproc_per_node, args.rdzv_backend, args.rdzv_id) == ("2:4", "2", "elastic", "gpt")
    assert args.rdzv_endpoint == "/runs/gpt/rendezvous"
    assert (args.log_dir, args.tee) == ("/runs/gpt/logs", "3"), "case c68"
    assert (args.training_script, args.training_script_args) == (COMMAND[1], ["--run-dir=/runs/gpt"])
    (port,) = container(found)["ports"]
    assert args.health == ("0.0.0.0", port["containerPort"])
    assert container(found)["command"] == ["elastic-runner", "launch"]
    spec = pod(found)["spec"]
    assert spec["terminationGracePeriodSeconds"] >= options.DRAIN_SECONDS + agent._KILLING
    assert spec["volumes"][1]["persistentVolumeClaim"]["claimName"] == "runs"
    assert container(found)["volumeMounts"][1] == {"name": "runs", "mountPath": "/runs"}


def test_an_object_store_takes_the_place_of_the_volume() -> None:
    found = rendered(run_dir="s3://bucket/gpt", secret="s3")
    assert [volume["name"] for volume in pod(found)["spec"]["volumes"]] == ["shm"]
    assert container(found)["envFrom"] == [{"secretRef": {"name": "s3"}}]
    assert "--rdzv-endpoint=s3://bucket/gpt/rendezvous" in container(found)["args"]
    assert options.parse(container(found)["args"]).log_dir is None, "torch writes files"


@settings(max_examples=30)
@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"], include_characters=" ")), min_size=1)
)
def test_arguments_arrive_as_they_were_given(command: list[str]) -> None:
    args = container(rendered("job", *command))["args"]
    assert args[-len(command) - 1 : -1] == [text.replace("$(", "$$(") for text in command]


def test_words_and_numbers_stay_text_and_nothing_is_expanded() -> None:
    command = ["train.py", "1", "1.5", "1e3", "yes", "null", "~", "a: b", "- x", "#", "", "0x10", "2:30", "$(HOME)"]
    assert container(rendered("job", *command))["args"][-len(command) - 1 : -1] == [*command[:-1], "$$(HOME)"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "Gpt"}, "--name Gpt: small letters"),
        ({"name": "g" * 51}, "50 at most"),
        ({"nodes": "4:2"}, "--nodes 4:2: a number, or MIN:MAX"),
        ({"nodes": "0"}, "--nodes 0"),
        ({"run_dir": "/home/me/run"}, "--run-dir /home/me/run: a directory below /runs"),
        ({"memory": "16 GB"}, "--memory 16 GB: a quantity"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        rendered(**changes)


FLAGS = ("submit", "kubernetes", "--name=gpt", "--image=i", "--run-dir=/runs/gpt")


def test_a_script_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, "--dry-run"]) == ExitCode.USAGE
    assert "no script: it comes after '--'" in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 1])
def test_kubectl_gets_the_manifests(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([*FLAGS, "--", "train.py"]) == ExitCode.FAILED
    assert "there is no kubectl here" in capsys.readouterr().err
    tool = tmp_path / "kubectl"
    tool.write_text(f'#!/bin/sh\n/bin/cat > {tmp_path}/got\necho "$@"; echo refused >&2; exit {code}\n')
    tool.chmod(0o755)
    assert main([*FLAGS, "--", "train.py"]) == code
    said = capsys.readouterr()
    assert said.out == ("" if code else "apply -f -\n")
    assert ("error: kubectl: refused" in said.err) == bool(code)
    assert documents((tmp_path / "got").read_text()).keys() == {"Service", "Job"}
