"""What engines are given, as golden files: a change of what is asked of them shows in review."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from jaxfound.resources.launch.detect import detect
from jaxfound.resources.launch.scripts import SCRIPTS, Request, jobset_manifest, sbatch_script

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
ASKED = Request(
    "big", ("configs/50b-3x8.yaml", "train.steps=9", "name=it's"), nodes=3, gpus_per_node=8
)


@pytest.mark.parametrize("engine", SCRIPTS)
def test_a_script_is_the_golden_one(engine):
    path = GOLDEN / f"launch-{engine}.txt"
    found = SCRIPTS[engine](ASKED)
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(found)
    assert found == path.read_text()


def test_a_batch_script_is_bash():
    checked = subprocess.run(["bash", "-n"], input=sbatch_script(ASKED), text=True)
    assert checked.returncode == 0


@pytest.mark.parametrize(
    ("agent_ends_with", "requeues", "code"), [(0, 0, 0), (76, 1, 0), (78, 0, 78)]
)
def test_a_batch_script_comes_back_after_a_preemption_only(
    tmp_path, agent_ends_with, requeues, code
):
    for name, line in (
        ("srun", f"exit {agent_ends_with}"),
        ("scontrol", f"echo $@ > {tmp_path}/x"),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    ran = subprocess.run(
        ["bash"],
        input=sbatch_script(ASKED),
        text=True,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"},
    )
    assert ran.returncode == code
    asked = tmp_path / "x"
    assert (asked.read_text() if asked.exists() else "") == "requeue 7\n" * requeues


def test_a_manifest_runs_the_agent_with_every_argument_as_it_was():
    (job,) = yaml.safe_load(jobset_manifest(ASKED))["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert tuple(container["command"]) == ASKED.agent
    assert container["command"][-1] == "name=it's"


def test_a_pod_of_the_manifest_knows_where_it_is():
    manifest = yaml.safe_load(jobset_manifest(ASKED))
    (job,) = manifest["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    labels = {"jobset-name": manifest["metadata"]["name"], "replicatedjob-name": job["name"]}
    env = {"JOB_COMPLETION_INDEX": "2"}
    for variable in container["env"]:
        path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        label = re.fullmatch(r"metadata\.labels\['jobset\.sigs\.k8s\.io/(.*)'\]", path)
        env[variable["name"]] = labels[label[1]] if label else variable["value"]
    task = detect(env)
    assert (task.engine, task.num_tasks, task.task) == ("JobSet", 3, 2)
    assert task.coordinator == "big-hosts-0-0.big:29500"


def test_processes_are_killed_before_the_engine_does_it():
    assert float(ASKED.agent[ASKED.agent.index("--grace") + 1]) < ASKED.notice_s


def test_a_job_may_start_with_fewer_hosts():
    fewer = Request("big", ("a.yaml",), nodes=3, gpus_per_node=8, min_nodes=2)
    assert "#SBATCH --nodes=2-3\n" in sbatch_script(fewer)
