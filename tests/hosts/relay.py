"""A switch that delays every frame, for kernels without netem: between namespaces, whose TCP stays end to end.

    relay.py DELAY PORT...           pass frames between the ports, each DELAY seconds after it came
    relay.py whole-frames DEVICE     let a device send frames as they are on a wire

A kernel leaves checksums, and the cutting of large segments, to the receiving end of a virtual cable. A program that
passes frames on would pass them on unfinished, so `whole-frames` turns that off.
"""

from __future__ import annotations

import ctypes
import fcntl
import select
import socket
import struct
import sys
import time
from collections import deque

ETH_P_ALL = 3
SOL_PACKET, PACKET_IGNORE_OUTGOING = 263, 23
SIOCETHTOOL = 0x8946
SETTERS = (0x17, 0x1F, 0x24)  # ETHTOOL_STXCSUM, ETHTOOL_STSO, ETHTOOL_SGSO
LONGEST = 70_000  # bytes of a frame


def send_whole_frames(device: str) -> None:
    """Turn off what a device leaves to others."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        for setter in SETTERS:
            value = (ctypes.c_uint32 * 2)(setter, 0)
            fcntl.ioctl(handle, SIOCETHTOOL, struct.pack("16sP", device.encode(), ctypes.addressof(value)))


def relay(delay: float, names: list[str]) -> None:
    """Learn which address is behind which port, and pass frames on when their time has come."""
    ports = []
    for name in names:
        port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
        port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
        port.bind((name, 0))
        port.setblocking(False)
        ports.append(port)
    behind: dict[bytes, socket.socket] = {}
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()
    print("ready", flush=True)
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select(ports, [], [], pause)
        for port in ready:
            while (frame := _next(port)) is not None:
                behind[frame[6:12]] = port
                known = behind.get(frame[:6])
                for other in [known] if known is not None else [each for each in ports if each is not port]:
                    waiting.append((time.monotonic() + delay, other, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, other, frame = waiting.popleft()
            try:
                other.send(frame)
            except (BlockingIOError, InterruptedError):  # a full queue loses frames, as switches do
                continue


def _next(port: socket.socket) -> bytes | None:
    try:
        return port.recv(LONGEST)
    except BlockingIOError:
        return None


if __name__ == "__main__":
    if sys.argv[1] == "whole-frames":
        send_whole_frames(sys.argv[2])
    else:
        relay(float(sys.argv[1]), sys.argv[2:])
