"""A hub between TUN devices that delays, slows, loses and cuts packets.

python -m tests.harness.network_hub NAME...

device 0 --line-->|     |--line--> device 0        a line: rate, then delay; in order
device 1 --line-->| hub |--line--> device 1        a packet passes two lines: its sender's
device 2 --line-->|     |--line--> device 2        upward one and its receiver's downward one

It implements in a process what `tc netem` implements in some kernels, and can cut a device at once.
The number of the device of an IPv4 packet is the last byte of its destination, minus one. Commands
are JSON lines (`{"device": 1, "delay_s": ..., "bytes_per_s": ..., "loss": ..., "is_up": ...}`),
each answered by a line once it is in effect. The hub and its devices end at EOF of standard input.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import random
import select
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

# from linux/if_tun.h and linux/virtio_net.h
_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_IFF_TUN = 0x0001
_IFF_NO_PI = 0x1000
_IFF_VNET_HDR = 0x4000
_TUN_F_CSUM = 0x01
_TUN_F_TSO4 = 0x02
_VNET_HEADER_BYTES = 10
# destination address in an IPv4 packet
_DESTINATION = slice(_VNET_HEADER_BYTES + 16, _VNET_HEADER_BYTES + 20)
_PACKET_BYTES_MAX = _VNET_HEADER_BYTES + 65536
_QUEUE_BYTES_MAX = 1500 * 1000  # bytes queued for a line's rate, like netem's 1,000 packets
_BATCH = 64  # packets read from one device before the others


@dataclass(slots=True)
class Line:
    """One direction of a device's link."""

    delay_s: float = 0.0
    bytes_per_s: float = float("inf")
    loss: float = 0.0  # share of dropped packets
    is_up: bool = True
    free_at: float = 0.0  # time when everything sent so far has left the queue

    def arrival(self, now: float, num_bytes: int) -> float | None:
        """Computes when a packet that is sent now arrives; None if it is dropped."""
        waiting_s = max(0.0, self.free_at - now)
        if not self.is_up or waiting_s * self.bytes_per_s > _QUEUE_BYTES_MAX:
            return None
        self.free_at = now + waiting_s + num_bytes / self.bytes_per_s
        if random.random() < self.loss:
            return None
        return self.free_at + self.delay_s


class Device:
    """A TUN device of this process, with its two lines."""

    def __init__(self, name: str) -> None:
        self.fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(self.fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
        self.up, self.down = Line(), Line()

    def shape(self, settings: dict[str, float]) -> None:
        for line in (self.up, self.down):
            for name, value in settings.items():
                setattr(line, name, value)

    def set_large_packets(self, flags: int) -> None:
        fcntl.ioctl(self.fd, _TUNSETOFFLOAD, flags)


class Hub:
    def __init__(self, names: list[str]) -> None:
        self.devices = [Device(name) for name in names]
        # a heap ordered by arrival time
        self._on_the_way: list[tuple[float, int, Device, bytes]] = []
        self._num_packets = 0
        self._set_large_packets()

    def run(self) -> None:
        by_fd = {device.fd: device for device in self.devices}
        while True:
            wait_s = None
            if self._on_the_way:
                wait_s = max(0.0, self._on_the_way[0][0] - time.monotonic())
            readable, _, _ = select.select([*by_fd, sys.stdin], [], [], wait_s)
            for found in readable:
                if found is not sys.stdin:
                    self._take(by_fd[found])
                elif not self._obey(sys.stdin.readline()):
                    return
            self._deliver(time.monotonic())

    def _obey(self, command: str) -> bool:
        if not command:
            return False
        settings = json.loads(command)
        self.devices[settings.pop("device")].shape(settings)
        self._set_large_packets()
        print("done", flush=True)
        return True

    def _set_large_packets(self) -> None:
        # Packets of 64 KiB save this process work, but loss must affect single packets.
        is_lossy = any(device.up.loss for device in self.devices)
        for device in self.devices:
            device.set_large_packets(0 if is_lossy else _TUN_F_CSUM | _TUN_F_TSO4)

    def _take(self, device: Device) -> None:
        for _ in range(_BATCH):
            try:
                packet = os.read(device.fd, _PACKET_BYTES_MAX)
            except BlockingIOError:
                return
            number = packet[_DESTINATION][-1] - 1 if packet[_VNET_HEADER_BYTES] >> 4 == 4 else -1
            if not 0 <= number < len(self.devices):
                continue
            target = self.devices[number]
            size = len(packet) - _VNET_HEADER_BYTES
            sent_at = device.up.arrival(time.monotonic(), size)
            arrives_at = None if sent_at is None else target.down.arrival(sent_at, size)
            if arrives_at is not None:
                self._num_packets += 1
                heapq.heappush(self._on_the_way, (arrives_at, self._num_packets, target, packet))

    def _deliver(self, now: float) -> None:
        while self._on_the_way and self._on_the_way[0][0] <= now:
            _, _, device, packet = heapq.heappop(self._on_the_way)
            if device.down.is_up:
                with suppress(OSError):  # the device is full or not configured yet
                    os.write(device.fd, packet)


def main() -> None:
    hub = Hub(sys.argv[1:])
    with suppress(OSError):  # so that delays do not grow while workers compute
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    print("ready", flush=True)
    hub.run()


if __name__ == "__main__":
    main()
