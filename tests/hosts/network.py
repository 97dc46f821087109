"""Network namespaces as hosts, joined by a switch: with delay, with a bandwidth, with cables that can be pulled.

    with network(4, delay=0.01) as hosts:
        process = hosts[1].start([...], log)    a program on the second host
        hosts[1].kill()                         every process of it, at once
        hosts[1].unplug()                       nothing arrives any more, and nobody is told

Hosts reach each other through the switch only: neither loopback nor abstract sockets of another one. TCP is end to end,
so that a pulled cable is silence and not a reset. The switch is the kernel's bridge. Delay is netem's where the kernel
has it; else `relay.py` is the switch. Made with user namespaces, so that no rights are needed, and gone with this
process.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

import pytest

CABLE = "eth0"  # its name on every host
RELAY = Path(__file__).with_name("relay.py")


def _sh(holder: int, script: str) -> None:
    """Run commands in the namespaces of a process."""
    done = subprocess.run([*_inside(holder), "sh", "-ec", script], capture_output=True, text=True)
    assert done.returncode == 0, f"{script}\n{done.stderr}"


def _inside(holder: int) -> list[str]:
    return ["nsenter", "--target", str(holder), "--user", "--net", "--preserve-credentials"]


def _probe(script: str) -> bool:
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return False
    return subprocess.run(["unshare", "-rn", "sh", "-ec", script], capture_output=True).returncode == 0


@cache
def can_make_hosts() -> bool:
    """Whether this machine lets us make namespaces, virtual cables and a bridge."""
    return _probe("ip link add cable0 type veth peer name cable1; ip link add switch type bridge")


@cache
def has_netem() -> bool:
    return _probe("ip link add cable0 type veth peer name cable1; tc qdisc add dev cable0 root netem delay 1ms")


@cache
def can_limit() -> bool:
    return _probe(
        "ip link add cable0 type veth peer name cable1; tc qdisc add dev cable0 root tbf rate 1mbit burst 9k latency 1s"
    )


class Host:
    """One namespace. `number` counts from 0, and the addresses are in this order too."""

    def __init__(self, number: int, holder: int, switch: int, relayed: bool) -> None:
        self.number, self.holder = number, holder
        self.address = f"10.77.0.{number + 1}"
        self._switch, self._relayed = switch, relayed
        self._started: list[subprocess.Popen[bytes]] = []
        self._namespace = os.readlink(f"/proc/{holder}/ns/net")

    def start(self, command: list[str], log: IO[bytes] | int | None = None, **options: Any) -> subprocess.Popen[bytes]:
        """A program on this host; its output goes to `log`."""
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": CABLE, **options.pop("env", {})}
        whole = [*_inside(self.holder), *command]
        started = subprocess.Popen(whole, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment, **options)
        self._started.append(started)
        return started

    def processes(self) -> list[int]:
        """Every process of this host, but for the one that holds it."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.holder:
                with suppress(OSError):  # gone meanwhile
                    if os.readlink(entry / "ns/net") == self._namespace:
                        found.append(int(entry.name))
        return found

    def kill(self) -> None:
        """SIGKILL to all of its processes, until there are none."""
        while found := self.processes():
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        for started in self._started:
            started.wait()

    def unplug(self) -> None:
        """Pull the cable at the switch: packets of both directions are lost, and the host's own end stays up."""
        assert not self._relayed, "cables of the kernel's switch can be pulled, and the relay has none"
        _sh(self._switch, f"ip link set port{self.number} nomaster")

    def plug(self) -> None:
        """Put the cable back."""
        _sh(self._switch, f"ip link set port{self.number} master switch")


@contextmanager
def network(count: int, delay: float = 0.0, rate: float | None = None) -> Iterator[list[Host]]:
    """So many hosts; `delay` in seconds of one direction, `rate` in bits per second of what each host sends.

    A test that asks for them where the machine does not permit it is skipped.
    """
    if not can_make_hosts():
        pytest.skip("needs unshare, nsenter and ip, and the right to make namespaces")
    if rate is not None and not can_limit():
        pytest.skip("needs a kernel with the qdisc tbf")
    holders: list[subprocess.Popen[bytes]] = []
    relayed = delay > 0 and not has_netem()
    relay = None
    hosts: list[Host] = []
    try:
        switch = _hold(holders, ["unshare", "-rn"])
        if not relayed:
            _sh(switch, "ip link add switch type bridge; ip link set switch up")
        for number in range(count):
            holder = _hold(holders, [*_inside(switch), "unshare", "-n"])
            hosts.append(Host(number, holder, switch, relayed))
            _connect(hosts[-1], delay, rate, relayed)
        if relayed:
            ports = [f"port{host.number}" for host in hosts]
            whole = [*_inside(switch), sys.executable, "-S", str(RELAY), str(delay), *ports]
            relay = subprocess.Popen(whole, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
            assert relay.stdout is not None
            assert relay.stdout.readline() == b"ready\n"
        yield hosts
    finally:
        for host in hosts:
            host.kill()
        if relay is not None:
            relay.kill()
            relay.communicate()
        for holder_process in holders:
            assert holder_process.stdin is not None
            holder_process.stdin.close()
            holder_process.wait()


def _hold(holders: list[subprocess.Popen[bytes]], how: list[str]) -> int:
    """A process that keeps new namespaces, until this one ends, by whatever means: then its input does."""
    process = subprocess.Popen([*how, "sh", "-c", "echo; exec cat >&2"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    holders.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"
    process.stdout.close()
    return process.pid


def _connect(host: Host, delay: float, rate: float | None, relayed: bool) -> None:
    port = f"port{host.number}"
    _sh(
        host._switch,
        f"ip link add {port} mtu 9000 type veth peer name {CABLE} mtu 9000 netns {host.holder}; ip link set {port} up"
        + ("" if relayed else f"; ip link set {port} master switch"),
    )
    limits = []
    if delay and not relayed:
        limits.append(f"tc qdisc add dev {CABLE} root handle 1: netem delay {delay * 1e3:g}ms limit 100000")
    if rate is not None:
        place = "parent 1:" if limits else "root"
        limits.append(f"tc qdisc add dev {CABLE} {place} tbf rate {rate:g}bit burst 32k latency 10s")
    commands = [f"ip addr add {host.address}/24 dev {CABLE}", f"ip link set {CABLE} up", "ip link set lo up", *limits]
    _sh(host.holder, "; ".join(commands))
    if relayed:
        subprocess.run([*_inside(host.holder), sys.executable, "-S", str(RELAY), "whole-frames", CABLE], check=True)
