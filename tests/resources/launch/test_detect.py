"""Where each engine says that a task is, and addresses that cannot be right."""

import pytest

from jaxfound.config.schema import ConfigError
from jaxfound.resources.launch.detect import Task, check_reachable, detect, first_host
from jaxfound.resources.launch.hosts import Asked, places_of
from jaxfound.resources.launch.place import Place

SLURM = {
    "SLURM_JOB_ID": "30007",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "WORLD_SIZE": "16",
    "RANK": "9",
    "LOCAL_WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node01",
    "MASTER_PORT": "29500",
}
JOBSET = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "JOBSET_NAME": "llm",
    "REPLICATED_JOB_NAME": "hosts",
    "JOB_COMPLETIONS": "3",
    "JOB_COMPLETION_INDEX": "1",
}
TASKS = {
    "slurm": (SLURM, Task("SLURM", 3, 2, 1, 0, "gpu07:15007")),
    "mpi": (MPI, Task("Open MPI", 6, 3, 2, 1, "")),
    "torchrun": (TORCHRUN, Task("torchrun", 16, 9, 8, 1, "node01:29501")),
    "jobset": (JOBSET, Task("JobSet", 3, 1, 1, 0, "llm-hosts-0-0.llm:29500")),
    "mpirun inside of slurm": ({**SLURM, **MPI}, Task("Open MPI", 6, 3, 2, 1, "")),
    "torchrun inside of slurm": (
        {**SLURM, **TORCHRUN},
        Task("torchrun", 16, 9, 8, 1, "node01:29501"),
    ),
    "a batch script of slurm": ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, None),
    "nobody": ({"PATH": "/bin", "RANK": "3"}, None),
}


def places(asked, *, task=None, accelerators=0):
    return places_of(
        asked, task=task, accelerators=accelerators, host="here", run_id="run", port=4000
    )


@pytest.mark.parametrize(("env", "task"), TASKS.values(), ids=TASKS.keys())
def test_the_task_is_what_the_engine_says(env, task):
    assert detect(env) == task


@pytest.mark.parametrize(
    ("env", "lost"), [(SLURM, "SLURM_LOCALID"), (TORCHRUN, "RANK"), (JOBSET, "JOB_COMPLETIONS")]
)
def test_a_variable_that_is_missing_is_named(env, lost):
    with pytest.raises(ConfigError, match=f"{lost} is not set"):
        detect({k: v for k, v in env.items() if k != lost})


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("a1,a2", "a1"),
        ("rack1-node[3,5].cluster", "rack1-node3.cluster"),
    ],
)
def test_the_first_host_of_a_nodelist(nodelist, host):
    assert first_host(nodelist) == host


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "127.0.1.1", "[::1]"])
def test_a_loopback_is_refused_when_there_are_several_hosts(address):
    check_reachable(f"{address}:1", num_hosts=1, is_first=True)
    for is_first in (True, False):
        with pytest.raises(ConfigError, match="they would never meet"):
            check_reachable(f"{address}:1", num_hosts=3, is_first=is_first)


def test_a_name_that_resolves_to_a_loopback_is_refused_but_on_the_host_of_that_name():
    def debian(name):
        return "127.0.1.1"

    check_reachable("node01:1", num_hosts=3, is_first=True, resolve=debian)
    with pytest.raises(ConfigError, match=r"127\.0\.1\.1"):
        check_reachable("node01:1", num_hosts=3, is_first=False, resolve=debian)


def test_flags_place_the_processes_of_a_host():
    asked = Asked(3, 1, "10.0.0.5:29500", 2)
    assert places(asked, accelerators=8) == (
        Place("10.0.0.5:29500", 6, 2, (0, 1, 2, 3), run_id="run", host_id="here"),
        Place("10.0.0.5:29500", 6, 3, (4, 5, 6, 7), run_id="run", host_id="here"),
    )


def test_a_task_a_host_becomes_an_agent_of_all_its_processes():
    task = Task("SLURM", 3, 2, 1, 0, "10.0.0.5:15007")
    (alone,) = places(Asked(), task=task, accelerators=8)
    assert (alone.num_processes, alone.process, alone.local_devices) == (3, 2, ())
    each = places(Asked(per_node=0), task=task, accelerators=8)
    assert [(p.process, p.local_devices) for p in each] == [(16 + i, (i,)) for i in range(8)]


def test_a_task_a_device_becomes_an_agent_of_one_process():
    task = Task("torchrun", 16, 9, 8, 1, "10.0.0.5:29501")
    (place,) = places(Asked(), task=task, accelerators=8)
    assert (place.num_processes, place.process, place.local_devices) == (16, 9, (1,))


def test_simulated_hosts_have_devices_of_their_own():
    found = places(Asked(simulate_hosts=3, devices_per_host=8, per_node=2))
    assert [(p.process, p.virtual_devices, p.host_id) for p in found] == [
        (p, 4, f"simulated-{p // 2}") for p in range(6)
    ]
    assert {p.coordinator for p in found} == {"127.0.0.1:4000"}
    (last,) = places(Asked(0, 2, "127.0.0.1:5", 1, simulate_hosts=3))
    assert (last.process, last.num_processes) == (2, 3)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (Asked(nnodes=3), "needs --node-rank"),
        (Asked(3, 3, "10.0.0.5:1"), "ranks go from 0 to 2"),
        (Asked(3, 0), "need --coordinator"),
        (Asked(1, 0, per_node=3), "cannot share 8 accelerators"),
        (Asked(simulate_hosts=2, devices_per_host=3, per_node=2), "cut into 2 equal parts"),
        (Asked(0, 1, simulate_hosts=2), "need the same --coordinator"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(asked, named):
    with pytest.raises(ConfigError, match=named):
        places(asked, accelerators=8)
