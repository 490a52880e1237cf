"""What nobody reads keeps nobody waiting."""

from __future__ import annotations

import os
import signal
import threading

from launch.running import Start, wait_gone

from ftcomm.launch import background


def test_what_has_no_room_is_counted() -> None:
    read, write = os.pipe()
    writer = background.BackgroundWriter(write)
    count = background.LINES + 65536 // 100 + 500
    for number in range(count):
        writer.write(f"{number:99}\n")
    heard = b""
    while len(heard) < 80_000:
        heard += os.read(read, 4096)
    writer.write("the last\n")
    rest: list[bytes] = []
    thread = threading.Thread(target=lambda: rest.extend(iter(lambda: os.read(read, 4096), b"")))
    thread.start()
    writer.close()
    writer._thread.join()
    os.close(write)
    thread.join()
    os.close(read)
    *lines, last = (heard + b"".join(rest)).decode().splitlines()
    assert last == "the last"
    # Said as soon as there is room, which may come in between.
    left_out = [
        int(line.split()[1]) for line in lines if line.endswith("lines are missing here: nobody read them in time")
    ]
    numbers = [int(line) for line in lines if not line.startswith("ftrun")]
    assert numbers == sorted({*numbers})
    assert left_out
    assert len(numbers) + sum(left_out) == count


def test_ftrun_ends_by_a_signal_while_nobody_reads(start: Start) -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    for piece in (65536, 1):  # all room there is
        try:
            while True:
                os.write(write, b"x" * piece)
        except BlockingIOError:
            pass
    os.set_blocking(write, True)
    script = """
    import os, signal
    os.write(1, b"%d\\n" % os.getpid())
    signal.pause()
    """
    run = start(script, "--nproc-per-node", "2", stderr=write)
    os.close(write)
    workers = [os.pidfd_open(int(line)) for line in run.read_lines(2)]
    run.send(signal.SIGTERM)
    assert run.finish()[0] == 143
    wait_gone(workers)
    os.close(read)
