"""A Slurm of its own processes on loopback, of two nodes, for one module of tests; Debian's ``slurm-wlm`` has them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "sinfo")
NODES = ("n1", "n2")


def find_missing() -> str:
    """Says why no such Slurm can be started here; empty where it can be tried."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} is not installed (Debian: slurm-wlm)"
    return "" if os.geteuid() == 0 else "slurmd starts jobs of users, for which it must be root"


@dataclass(kw_only=True)
class Slurm:
    """Daemons by their names, slurmd of node ``n1`` as ``n1``. environ: of a process that submits."""

    folder: Path
    environ: dict[str, str]
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *command: str) -> None:
        """Starts a daemon in the foreground."""
        environ = {**os.environ, **self.environ}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.daemons[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environ, start_new_session=True)

    def call(self, *command: str) -> str:
        """Calls a tool of Slurm's; returns what it prints."""
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **self.environ}, timeout=60, check=False
        )
        return done.stdout + done.stderr

    def logs(self) -> str:
        """The last lines of all daemons."""
        return "\n".join(f"{path.name}:\n{path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.log")))


@contextmanager
def start_slurm() -> Iterator[Slurm]:
    """Starts it, and ends it; raises ``RuntimeError`` with all logs where its nodes do not come up."""
    with (
        tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp", ignore_cleanup_errors=True) as name,
        ExitStack() as ends,
    ):
        folder = Path(name)
        folder.chmod(0o755)
        slurm = Slurm(folder=folder, environ={"SLURM_CONF": str(folder / "slurm.conf")})
        ends.callback(_end, slurm)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        munge = [f"--{what}={folder / f'munge.{what[:4]}'}" for what in ("socket", "pid-file", "seed-file")]
        slurm.start("munged", "munged", "--foreground", "--force", f"--key-file={key}", *munge)
        ports = _free_ports(1 + len(NODES))
        (folder / "slurm.conf").write_text(_configuration(folder, ports), encoding="utf-8")
        slurm.start("slurmctld", "slurmctld", "-D", "-c")
        for node in NODES:
            (folder / node).mkdir()
            slurm.start(node, "slurmd", "-D", "-N", node)
        ends_s = time.monotonic() + 60
        while slurm.call("sinfo", "--noheader", "--format=%D %T").strip() != f"{len(NODES)} idle":
            if time.monotonic() > ends_s:
                raise RuntimeError(f"the nodes have not come up: {slurm.call('sinfo')}\n{slurm.logs()}")
            time.sleep(0.5)
        yield slurm


def _configuration(folder: Path, ports: Sequence[int]) -> str:
    host = socket.gethostname()
    lines = [
        "ClusterName=loopback",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={ports[0]}",
        "SlurmUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={folder / 'munge.sock'}",
        f"StateSaveLocation={folder}",
        f"SlurmdSpoolDir={folder}/%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd.%n.pid",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SwitchType=switch/none",
        "MpiDefault=none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "ReturnToService=2",
        "JobRequeue=1",
        "SlurmdTimeout=10",
        "KillWait=5",
        "MinJobAge=300",
    ]
    lines += [
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=2000 State=UNKNOWN"
        for node, port in zip(NODES, ports[1:], strict=True)
    ]
    lines.append(f"PartitionName=all Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP")
    return "\n".join([*lines, "SlurmdParameters=config_overrides", ""])


def _free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [item.getsockname()[1] for item in held]


def _end(slurm: Slurm) -> None:
    for process in reversed(slurm.daemons.values()):
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
            continue
        process.kill()
        process.wait()
