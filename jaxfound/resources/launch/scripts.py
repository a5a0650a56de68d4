"""What SLURM and Kubernetes need to know of a run, as text: they schedule, agents restart. Pure."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jaxfound.resources.launch.exits import Exit

# Of the notice's time, kept for what comes after the save: leaving, and the engine's own work.
SPARE_S = 30


@dataclass(frozen=True)
class Request:
    """A run as an engine is asked for it.

    Attributes:
        name: of the job.
        train: arguments of `jaxfound train`, the config first.
        nodes: hosts.
        gpus_per_node: accelerators of each; 0 = none is asked for.
        minutes: wall time that is asked for.
        notice_s: from the engine's notice to the end; the local save must fit in.
        max_restarts: restarts in a row that may commit no step.
        image: of the container, where there is one.
        min_nodes: fewest hosts that the run can start with; 0 = `nodes`.
    """

    name: str
    train: Sequence[str]
    nodes: int
    gpus_per_node: int
    minutes: int = 24 * 60
    notice_s: int = 180
    max_restarts: int = 3
    image: str = "jaxfound"
    min_nodes: int = 0

    @property
    def agent(self) -> tuple[str, ...]:
        """The command that each host runs."""
        return (
            "jaxfound", "launch",
            "--max-restarts", str(self.max_restarts),
            "--grace", str(max(1, self.notice_s - SPARE_S)),
            "--", "train", *self.train,
        )  # fmt: skip


def sbatch_script(asked: Request) -> str:
    """Return a batch script: one agent a host, a requeue after a pre-emption or a lost host."""
    hours, minutes = divmod(asked.minutes, 60)
    nodes = f"{asked.min_nodes}-{asked.nodes}" if asked.min_nodes else f"{asked.nodes}"
    gpus = f"#SBATCH --gpus-per-node={asked.gpus_per_node}\n" if asked.gpus_per_node else ""
    return f"""#!/bin/bash
# Written by `jaxfound launch slurm`. Partition and account are yours to add.
#SBATCH --job-name={asked.name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --exclusive
#SBATCH --time={hours:02d}:{minutes:02d}:00
# The notice goes to the agents, which save and leave; the batch shell gets none.
#SBATCH --signal=TERM@{asked.notice_s}
# After a lost host or a pre-emption the job comes back, and goes on from its newest checkpoint.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

# An agent ends with an error only when it has given up: then all of them end.
srun --kill-on-bad-exit=1 {shlex.join(asked.agent)}
code=$?
echo "jaxfound launch ended with $code"
if [ "$code" -eq {int(Exit.PREEMPTED)} ]; then
  # Saved after the notice: another turn, and no failure.
  scontrol requeue "$SLURM_JOB_ID"
  exit 0
fi
exit "$code"
"""


def jobset_manifest(asked: Request) -> str:
    """Return a JobSet: one pod a host, replaced after a pre-emption, never after a refusal."""
    return f"""# Written by `jaxfound launch jobset`. Volumes for data and runs are yours to add.
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {asked.name}
spec:
  failurePolicy:
    maxRestarts: {asked.max_restarts}
    rules:
    # What was asked for cannot be done, or there is no checkpoint to go on from.
    - action: FailJobSet
      onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
  - name: hosts
    replicas: 1
    template:
      spec:
        completionMode: Indexed
        parallelism: {asked.nodes}
        completions: {asked.nodes}
        activeDeadlineSeconds: {60 * asked.minutes}
        backoffLimit: 0
        podFailurePolicy:
          rules:
          # Evicted, or saved after a notice: the pod comes back, the others wait for it.
          - action: Ignore
            onPodConditions:
            - type: DisruptionTarget
          - action: Ignore
            onExitCodes:
              containerName: train
              operator: In
              values: [{int(Exit.PREEMPTED)}]
          - action: FailJob
            onExitCodes:
              containerName: train
              operator: In
              values: [{int(Exit.REFUSED)}, {int(Exit.CHECKPOINT)}]
{_pod(asked)}"""


# What can be written, by the engine's name.
SCRIPTS: Mapping[str, Callable[[Request], str]] = {
    "slurm": sbatch_script,
    "jobset": jobset_manifest,
}


def _quoted(word: str) -> str:
    """Return a word as a YAML string that is no number, boolean or flag of YAML."""
    return "'" + word.replace("'", "''") + "'"


def _pod(asked: Request) -> str:
    """Return what each pod of a JobSet is."""
    command = "\n".join(f"              - {_quoted(word)}" for word in asked.agent)
    limit = f"\n              resources: {{limits: {{nvidia.com/gpu: {asked.gpus_per_node}}}}}"
    gpus = limit if asked.gpus_per_node else ""
    return f"""        template:
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: {asked.notice_s}
            containers:
            - name: train
              image: {asked.image}
              command:
{command}{gpus}
              env:
              - name: JOBSET_NAME
                valueFrom:
                  fieldRef:
                    fieldPath: metadata.labels['jobset.sigs.k8s.io/jobset-name']
              - name: REPLICATED_JOB_NAME
                valueFrom:
                  fieldRef:
                    fieldPath: metadata.labels['jobset.sigs.k8s.io/replicatedjob-name']
              - name: JOB_COMPLETIONS
                value: "{asked.nodes}"
              volumeMounts:
              - name: shared-memory
                mountPath: /dev/shm
            volumes:
            - name: shared-memory
              emptyDir:
                medium: Memory
"""
