"""A network link between this network namespace and another one, with delay, loss, or cut.

Usage: wire.py NAMESPACE HERE THERE (names of the two ends)

Two TAP devices with this process between them replace a veth pair with `tc netem`, for kernels without netem. It
prints a line when both ends are up. Each JSON line on stdin changes {"delay_s", "loss", "cut"} and is acknowledged.
The process exits, and the devices disappear, when stdin closes.
"""

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
MTU = 9000
FRAME_BYTES_MAX = 1 << 16
FRAMES_A_TURN = 64
ADDRESSES = ("198.18.77.1", "198.18.77.2")
"""Both ends of a /30 in the range for benchmarks (RFC 2544), which no real network uses."""


def open_end(name: str, address: str) -> int:
    """Creates a TAP device in the current namespace, up, with an address."""
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    for command in (
        "ip link set lo up",
        f"ip link set {name} mtu {MTU} up",
        f"ip addr add {address}/30 dev {name}",
    ):
        subprocess.run(command.split(), check=True)
    return end


def enter(namespace: str) -> None:
    with open(f"/var/run/netns/{namespace}") as there:
        if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")


class Wire:
    """Forwards frames until stdin closes."""

    def __init__(self, here: int, there: int) -> None:
        self._other = {here: there, there: here}
        self._on_the_way: list[tuple[float, int, int, bytes]] = []
        self._frames = 0
        self._rng = random.Random(1)
        self.delay_s, self.loss, self.cut = 0.0, 0.0, False

    def run(self) -> None:
        commands = sys.stdin.fileno()
        while True:
            ready, _, _ = select.select([commands, *self._other], [], [], self._patience_s())
            if commands in ready:
                line = sys.stdin.readline()
                if not line:
                    return
                self.__dict__.update(json.loads(line))
                print("ok", flush=True)
            for end in self._other:
                if end in ready:
                    self._take(end)
            self._deliver()

    def _take(self, end: int) -> None:
        for _ in range(FRAMES_A_TURN):
            try:
                frame = os.read(end, FRAME_BYTES_MAX)
            except BlockingIOError:
                return
            if not self.cut and self._rng.random() >= self.loss:
                self._frames += 1
                due = time.monotonic() + self.delay_s
                heapq.heappush(self._on_the_way, (due, self._frames, self._other[end], frame))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._on_the_way and self._on_the_way[0][0] <= now:
            _, _, end, frame = heapq.heappop(self._on_the_way)
            if not self.cut:
                # A full queue drops frames, as a real one does.
                with contextlib.suppress(BlockingIOError):
                    os.write(end, frame)

    def _patience_s(self) -> float | None:
        return max(0.0, self._on_the_way[0][0] - time.monotonic()) if self._on_the_way else None


def main() -> None:
    namespace, here, there = sys.argv[1:]
    near = open_end(here, ADDRESSES[0])
    enter(namespace)
    far = open_end(there, ADDRESSES[1])
    print("up", flush=True)
    Wire(near, far).run()


if __name__ == "__main__":
    main()
