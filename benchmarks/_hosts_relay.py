"""A line between two network namespaces that takes a while: whole IP packets, for a kernel that has no netem.

    nsenter -t PID -n python benchmarks/_hosts_relay.py 0.001       one millisecond each way

It makes two TUN devices, ``line0`` and ``line1``, says "ready", and hands each packet that comes out of one to the other once
the delay has passed since it was read. Whoever started it moves a device into the other namespace and gives both their
addresses; they go with this process, which ends with its standard input. TCP's large segments stay whole on the way, as they do
on a veth: the header in which the kernel says how to cut them goes with the packet. A tbf on a device shapes what comes here.

What Python does for each packet bounds the bandwidth: the benchmark measures with iperf3 on the same line how far it goes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import os
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6 = 0x01, 0x02, 0x04
LARGEST = 10 + 65535  # virtio's header and an IP packet
BATCH = 64  # packets of one direction before the other one and the timer have their turn
CLOCK_MONOTONIC, TFD_NONBLOCK, TFD_TIMER_ABSTIME = 1, 0o4000, 1
_libc = ctypes.CDLL(None, use_errno=True)


class Timer:
    """A timerfd: Python has them from 3.13 on, and epoll's own timeout is one of whole milliseconds."""

    def __init__(self) -> None:
        self.fd = _libc.timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    def set(self, deadline: int) -> None:
        """Nanoseconds of the monotonic clock; one that is over wakes at once."""
        at = struct.pack("qqqq", 0, 0, *divmod(deadline, 10**9))
        if _libc.timerfd_settime(self.fd, TFD_TIMER_ABSTIME, at, None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 8)


def tun(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6)
    return fd


def relay(ends: tuple[int, int], delay: int) -> None:
    """Until standard input ends. All packets have the same delay, so that the oldest is always the next one."""
    waiting: deque[tuple[int, int, bytes]] = deque()
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    timer, poll = Timer(), select.epoll()
    for fd in (*ends, timer.fd):
        poll.register(fd, select.EPOLLIN)
    poll.register(sys.stdin.fileno(), select.EPOLLIN | select.EPOLLHUP)
    now, read, write = time.monotonic_ns, os.read, os.write
    while True:
        for fd, _ in poll.poll():
            if fd == timer.fd:
                timer.clear()
            elif fd not in other:
                return
            else:
                to, idle = other[fd], not waiting
                with contextlib.suppress(BlockingIOError):
                    for _ in range(BATCH):
                        packet = read(fd, LARGEST)
                        waiting.append((now() + delay, to, packet))
                if idle and waiting:
                    timer.set(waiting[0][0])
        due = now()
        if waiting and waiting[0][0] <= due:
            while waiting and waiting[0][0] <= due:
                _, to, packet = waiting.popleft()
                with contextlib.suppress(OSError):  # a device that is down: the packet is lost, as on a cable
                    write(to, packet)
            if waiting:
                timer.set(waiting[0][0])


def main() -> None:
    gc.disable()  # nothing here makes cycles, and a collection would be a delay of its own
    with contextlib.suppress(OSError):  # a cable does not wait for a processor; not allowed without root
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    ends = tun("line0"), tun("line1")
    print("ready", flush=True)
    relay(ends, round(float(sys.argv[1]) * 1e9))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
