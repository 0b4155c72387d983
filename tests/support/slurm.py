"""Slurm with two nodes on this host, its daemons started by the tests and ended with them."""

import getpass
import os
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd", "srun", "scontrol")
NODES = ("n1", "n2")
LONGEST_S = 60

CONF = """
ClusterName=tests
SlurmctldHost={host}
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={directory}/munge.socket
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=30
{nodes}
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Why Slurm cannot be had here; empty where it can."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [name for name in DAEMONS if shutil.which(name, path=path) is None]
    if missing:
        return (
            f"Slurm's daemons are missing ({', '.join(missing)}): "
            "apt-get install slurmctld slurmd slurm-client munge"
        )
    return "" if os.getuid() == 0 else "slurmd needs root"


def _free_ports(count):
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


class Slurm:
    """A cluster of two nodes; ``close`` ends its daemons.

    Attributes:
        environment: variables by which Slurm's commands find it.

    """

    def __init__(self, directory: Path):
        self.directory, self._daemons = directory, []
        ports, host, user = _free_ports(3), socket.gethostname(), getpass.getuser()
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2"
            for name, port in zip(NODES, ports[1:], strict=True)
        )
        conf = directory / "slurm.conf"
        places = {"host": f"{host}(127.0.0.1)", "directory": directory, "nodes": nodes}
        conf.write_text(CONF.format(**places, user=user, ports=ports))
        (directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (directory / "state").mkdir()
        key = directory / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        directory.chmod(0o755)
        path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        self.environment = {"SLURM_CONF": str(conf), "PATH": path}
        files = {"key-file": key, "socket": directory / "munge.socket"}
        files |= {"pid-file": directory / "munge.pid", "log-file": directory / "munge.log"}
        files |= {"seed-file": directory / "munge.seed"}
        words = [f"--{name}={file}" for name, file in files.items()]
        self._start("munged", "--foreground", "--force", *words)
        self._await(lambda: (directory / "munge.socket").exists(), "munged")
        self._start("slurmctld", "-D", "-i", "-f", str(conf))
        for name in NODES:
            (directory / name).mkdir()
            self._start("slurmd", "-D", "-N", name, "-f", str(conf))
        self._await(self._is_idle, "Slurm")

    def run(self, *words, limit_s=LONGEST_S):
        """What one of Slurm's commands says."""
        environment = {**os.environ, **self.environment}
        return subprocess.run(
            words, env=environment, capture_output=True, text=True, check=False, timeout=limit_s
        )

    def _start(self, *words):
        environment = {**os.environ, **self.environment}
        log = (self.directory / f"{words[0]}.out").open("ab")
        self._daemons.append(
            subprocess.Popen(words, env=environment, stdout=log, stderr=log, cwd=self.directory)
        )

    def _is_idle(self):
        found = self.run("sinfo", "--noheader", "--Node", "--format=%T").stdout.split()
        return found == ["idle", "idle"]

    def _await(self, there, what):
        deadline = time.monotonic() + LONGEST_S
        while not there():
            if time.monotonic() > deadline:
                logs = "\n".join(
                    f"{p.name}: {p.read_text(errors='replace')[-1500:]}"
                    for p in self.directory.glob("*.[lo][ou][gt]")
                )
                self.close()
                raise RuntimeError(f"{what} does not start\n{logs}")
            time.sleep(0.2)

    def close(self):
        """End every daemon."""
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
