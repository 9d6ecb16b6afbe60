"""The processes of a run as users see them: a line each, lanes of the Gantt picture, and what a step's record says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table

from ..base.host_status import HostStatus
from ..base.timeline import Span

MOST = 16  # lines; of more processes, the slowest are shown


def slowest(hosts: Sequence[HostStatus]) -> HostStatus:
    """The process that the other processes wait for: see `HostStatus.own_seconds`."""
    return max(hosts, key=lambda host: host.own_seconds)


def host_lines(hosts: Sequence[HostStatus]) -> list[str]:
    """A line for each process, to be printed."""
    lines = []
    for host in _shown(hosts):
        numbers = " | ".join(f"{name} {text}" for name, text in _numbers(host).items())
        mark = _mark(host, hosts)
        lines.append(f"process {host.process} ({host.host}) | {numbers}{f' | {mark}' if mark else ''}")
    return lines + _others(hosts)


class HostTable:
    """A row for each process, as it is whenever the terminal is drawn; nothing where a run has one process."""

    def __init__(self, hosts: Callable[[], Sequence[HostStatus]]) -> None:
        self._hosts = hosts

    def __rich__(self) -> Table | Group:
        hosts = self._hosts()
        if not hosts:
            return Group()
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in ("process", "host", *_numbers(hosts[0])):
            table.add_column(column, justify="left" if column in ("process", "host") else "right", no_wrap=True)
        table.add_column(no_wrap=True)
        for host in _shown(hosts):
            table.add_row(str(host.process), host.host, *_numbers(host).values(), _mark(host, hosts))
        for line in _others(hosts):
            table.add_row("", line)
        return table


def host_lanes(hosts: Sequence[HostStatus], step: int) -> list[Span]:
    """The stages of the last step as bars of the Gantt picture, a lane for each process; a process that has not told of
    that step yet has none."""
    return [
        Span(stage.name, f"process {host.process}", stage.start, stage.end, step)
        for host in hosts
        if host.step == hosts[0].step
        for stage in host.stages
    ]


def host_metrics(hosts: Sequence[HostStatus]) -> dict[str, float]:
    """Returns a step's metrics of all processes together; none where the run has one process."""
    if not hosts:
        return {}
    return {
        "hosts/processes": float(len(hosts)),
        "hosts/slowest": float(slowest(hosts).process),
        "hosts/own_seconds_max": max(host.own_seconds for host in hosts),
        "hosts/own_seconds_mean": sum(host.own_seconds for host in hosts) / len(hosts),
        "hosts/memory_bytes_max": float(max(host.memory for host in hosts)),
    }


def host_records(hosts: Sequence[HostStatus]) -> list[dict[str, Any]]:
    """Returns the records of the processes in `metrics.jsonl`, under `hosts`."""
    return [
        {
            "process": host.process,
            "host": host.host,
            "devices": host.devices,
            "memory_bytes": host.memory,
            "device_memory_bytes": host.device_memory,
            "prepare_seconds": round(host.prepared, 6),
            "train_seconds": round(host.trained, 6),
            "wait_seconds": round(host.waited, 6),
            "own_seconds": round(host.own_seconds, 6),
        }
        for host in hosts
    ]


def _shown(hosts: Sequence[HostStatus]) -> list[HostStatus]:
    chosen = sorted(hosts, key=lambda host: -host.own_seconds)[:MOST]
    return sorted(chosen, key=lambda host: host.process)


def _others(hosts: Sequence[HostStatus]) -> list[str]:
    return [f"and {len(hosts) - MOST} faster ones"] if len(hosts) > MOST else []


def _numbers(host: HostStatus) -> dict[str, str]:
    return {
        "devices": str(host.devices),
        "memory": f"{host.memory / 1e9:.1f} GB",
        "on device": f"{host.device_memory / 1e9:.1f} GB" if host.device_memory else "-",
        "prepares": f"{host.prepared:.2f} s",
        "trains": f"{host.trained:.2f} s",
        "waits": f"{host.waited:.2f} s",
    }


def _mark(host: HostStatus, hosts: Sequence[HostStatus]) -> str:
    return "slowest" if len(hosts) > 1 and host is slowest(hosts) else ""
