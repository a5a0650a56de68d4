"""Hosts of one machine: network namespaces on one switch, each with its own NIC and address.

Run as a program, it is the doctor on one of them: its argument is JSON, its output is the report.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from jaxfound.resources.preflight.doctor import Asked, examine

PORT = 7788
ROOT = Path(__file__).resolve().parents[2]


def why_not() -> str:
    """Why no hosts can be made here; empty when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    lacking = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if lacking:
        return f"not installed: {', '.join(lacking)}"
    name = f"try{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"no network namespaces here: {tried.stderr.strip()}"
    bridge = ["ip", "-n", name, "link", "add", "switch", "type", "bridge"]
    tried = subprocess.run(bridge, capture_output=True, text=True)
    run("ip", "netns", "del", name)
    return f"no bridges here: {tried.stderr.strip()}" if tried.returncode else ""


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@dataclass
class Hosts:
    """So many hosts, as long as this is entered; host i has the address 10.77.0.(i + 1)."""

    count: int
    started: list[subprocess.Popen] = field(default_factory=list)

    def name(self, host: int | str) -> str:
        return f"jf{os.getpid()}-{host}"

    def __enter__(self) -> "Hosts":
        switch = self.name("switch")
        run("ip", "netns", "add", switch)
        run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "switch", "up")
        for i in range(self.count):
            host, port = self.name(i), f"port{i}"
            run("ip", "netns", "add", host)
            pair = ["eth0", "netns", host, "type", "veth", "peer", "name", port, "netns", switch]
            run("ip", "link", "add", *pair)
            run("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
            run("ip", "-n", host, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "eth0")
            run("ip", "-n", host, "link", "set", "eth0", "up")
            run("ip", "-n", host, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for each in ("switch", *range(self.count)):
            subprocess.run(["ip", "netns", "del", self.name(each)], capture_output=True)

    def slow_down(self, host: int, *, rate: str) -> None:
        """Limit what a host sends and receives."""
        limit = ["root", "tbf", "rate", rate, "burst", "32k", "latency", "50ms"]
        for where, nic in ((self.name(host), "eth0"), (self.name("switch"), f"port{host}")):
            run("ip", "netns", "exec", where, "tc", "qdisc", "add", "dev", nic, *limit)

    def start(
        self, host: int, folder: Path, *, skew_s: float = 0, path: str = "", **asked: object
    ) -> subprocess.Popen:
        """Start the doctor on a host, with its clock set wrong and a folder first on its path."""
        asked = {
            "process": host,
            "count": self.count,
            "local_dir": str(folder / str(host)),
            **asked,
        }
        words = json.dumps({"skew_s": skew_s, "asked": asked})
        command = [sys.executable, str(Path(__file__)), words]
        places = ":".join(part for part in (path, str(ROOT)) if part)
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.name(host), *command],
            env={**os.environ, "PYTHONPATH": places},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def end(self) -> None:
        """Kill the doctors that are still at work."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.communicate()
        self.started.clear()


def told(process: subprocess.Popen) -> dict[tuple[str, str], dict]:
    """The checks of a doctor that has ended, by verdict and name."""
    out, error = process.communicate(timeout=90)
    assert process.returncode == 0, error
    checks = json.loads(out)["checks"]
    return {(one["verdict"], one["name"]): one for one in checks}


def main(words: str) -> None:
    given = json.loads(words)
    asked = given["asked"]
    for name in ("local_dir", "shared_dir"):
        asked |= {name: Path(asked[name])} if name in asked else {}
    skew_s = given["skew_s"]
    report = examine(
        Asked(coordinator=f"10.77.0.1:{PORT}", burn_in_s=None, **asked),
        clock=lambda: time.time() + skew_s,
    )
    sys.stdout.write(json.dumps(report.as_dict()))


if __name__ == "__main__":
    main(sys.argv[1])
