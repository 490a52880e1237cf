"""The stores: one contract, checked on each kind; then what is special about sockets and files."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from ftcomm import ConfigError
from ftcomm.errors import SystemFailure, Timeout
from ftcomm.stores import MAX_VALUE, Store, tcp, wire
from ftcomm.stores.file import FileStore
from ftcomm.stores.memory import MemoryStore
from ftcomm.stores.tcp import TcpStore
from ftcomm.stores.tcp_server import TcpStoreServer

Connect = Callable[[], Store]


@pytest.fixture(params=["memory", "file", "tcp", "torch"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connect]:
    """Each call gives another client of the same store."""
    if request.param == "memory":
        store = MemoryStore()
        yield lambda: store
    elif request.param == "file":
        yield lambda: FileStore(str(tmp_path / "store"))
    elif request.param == "torch":
        distributed = pytest.importorskip("torch.distributed")
        from ftcomm.stores.torch_store import TorchStore

        hosted = distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        yield lambda: TorchStore(hosted)
    else:
        server = TcpStoreServer()
        yield lambda: TcpStore(*server.address)
        server.close(0)


def test_get_and_set(connect: Connect) -> None:
    one, other = connect(), connect()
    assert one.get("a") is None
    value = bytes(range(256))
    one.set("a", value)
    one.set("b", b"2")
    assert (other.get("a"), other.get("b")) == (value, b"2")
    other.set("a", b"changed")
    assert one.get("a") == b"changed"


def test_compare_set(connect: Connect) -> None:
    one, other = connect(), connect()
    assert one.compare_set("k", b"not there", b"x") == b""
    assert one.compare_set("k", b"", b"first") == b"first"
    assert other.compare_set("k", b"", b"second") == b"first"
    assert other.compare_set("k", b"first", b"\x00\xff") == b"\x00\xff"
    assert one.get("k") == b"\x00\xff"


def test_compare_set_has_one_winner(connect: Connect) -> None:
    stores = [connect() for _ in range(4)]
    barrier = threading.Barrier(4)
    results: list[set[bytes]] = [set() for _ in range(4)]

    def run(number: int) -> None:
        barrier.wait()
        for round in range(20):
            results[number].add(b"%d:" % round + stores[number].compare_set(f"r{round}", b"", b"%d" % number))

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] == results[1] == results[2] == results[3]
    assert len(results[0]) == 20


def test_wait_names_what_is_missing(connect: Connect) -> None:
    store = connect()
    store.set("here", b"1")
    assert store.wait(["here"], 0.05) == []
    assert store.wait(["here", "not", "neither"], 0.05) == ["not", "neither"]


def test_wait_ends_when_the_key_comes(connect: Connect) -> None:
    store, writer = connect(), connect()
    if type(store).__name__ == "TorchStore":
        pytest.skip("one hosted torch store is one connection; a job uses one per process")
    waited: list[list[str]] = []
    thread = threading.Thread(target=lambda: waited.append(store.wait(["late"], 30)))
    thread.start()
    writer.set("late", b"1")
    thread.join(30)
    assert waited == [[]]


def test_tcp_wait_of_weeks() -> None:
    """More milliseconds than the kernel takes at a time."""
    server = TcpStoreServer()
    store, writer = TcpStore(*server.address), TcpStore(*server.address)
    waited: list[list[str]] = []
    thread = threading.Thread(target=lambda: waited.append(store.wait(["late"], 3e6)))
    thread.start()
    while not server._waits and thread.is_alive():
        pass
    writer.set("late", b"1")
    thread.join(30)
    assert waited == [[]]
    server.close(0)


def test_tcp_set_looks_only_at_who_waits_for_it() -> None:
    """At the start of a large job all wait for the keys of all."""
    looks = []

    class Values(dict[str, bytes]):
        def __contains__(self, key: object) -> bool:
            looks.append(key)
            return super().__contains__(key)

    server = TcpStoreServer()
    server._values = Values()
    keys = [f"k{number}" for number in range(64)]
    stores = [TcpStore(*server.address) for _ in range(9)]
    waited: list[list[str]] = []

    def wait(store: TcpStore, keys: list[str]) -> None:
        with suppress(SystemFailure):
            waited.append(store.wait(keys, 30))

    threads = [threading.Thread(target=wait, args=(store, [*keys, "last"])) for store in stores[:7]]
    threads.append(threading.Thread(target=wait, args=(stores[7], keys[::-1])))
    for thread in threads:
        thread.start()
    while len(server._waits) < len(threads):
        pass
    looks.clear()
    for key in keys:
        stores[8].set(key, b"1")
    threads[-1].join(30)
    assert waited == [[]]
    assert len(looks) <= len(keys)
    stores[0]._sock.shutdown(socket.SHUT_RDWR)  # one that waits goes
    stores[8].set("last", b"1")
    for thread in threads:
        thread.join(30)
    assert waited == [[]] * 7
    assert not server._waits_for
    server.close(0)


def test_tcp_secret() -> None:
    server = TcpStoreServer(secret=b"s" * 32)
    store = TcpStore(*server.address, secret=b"s" * 32)
    store.set("k", b"v")
    for wrong in (b"", b"t" * 32):
        with pytest.raises(ConfigError, match="another secret"):
            TcpStore(*server.address, secret=wrong)
    assert store.get("k") == b"v"
    server.close(0)


@pytest.mark.parametrize("loopback", ["127.0.1.1", "::1"])
def test_a_hosts_own_name_is_listened_for_everywhere(monkeypatch: pytest.MonkeyPatch, loopback: str) -> None:
    """Debian and Ubuntu have it at 127.0.1.1, where no other host comes. Only with a secret; and localhost is what it is."""
    family = socket.AF_INET6 if ":" in loopback else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((loopback, 0))
        except OSError:
            pytest.skip("this machine has no such address")
    known = socket.getaddrinfo

    def found(host: str, *more: Any, **named: Any) -> Any:
        return known(loopback if host == "our-host" else host, *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", found)
    server = TcpStoreServer("our-host", secret=b"s" * 32)
    assert server.address[0] == "our-host"
    for where in (server.address[0], "::1" if family == socket.AF_INET6 else "127.0.0.1"):
        store = TcpStore(where, server.address[1], b"s" * 32)
        store.set("k", b"v")
        store.close()
    server.close(0)
    for host, secret in (("our-host", b""), ("localhost", b"s" * 32), (loopback, b"s" * 32)):
        server = TcpStoreServer(host, secret=secret)
        assert server.address[0] not in ("our-host", "0.0.0.0", "::")
        server.close(0)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n" + b"x" * 200,
        b"\x00" * (wire.NONCE + wire.PROOF),
        b"short",
        os.urandom(4096),
    ],
)
def test_tcp_survives_garbage(garbage: bytes) -> None:
    server = TcpStoreServer()
    with socket.create_connection(server.address) as sock:
        sock.sendall(garbage)
    store = TcpStore(*server.address)
    store.set("k", b"v")
    assert store.get("k") == b"v"
    server.close(0)


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff\xff\xff\xff\x01\x01\x00",  # a length over the limit
        b"\x00\x00\x00\x00\x01\xff\xff",  # more fields than allowed
        b"\x04\x00\x00\x00\x01\x01\x00\xff\xff\xff\xff",  # a field longer than its frame
        wire.pack(99),
        wire.pack(wire.GET),
        wire.pack(wire.GET, b"\xff"),
        wire.pack(wire.GET, b"k" * 2000),
        wire.pack(wire.SET, b"k", b""),
        wire.pack(wire.WAIT, b"1"),
    ],
)
def test_tcp_drops_a_client_that_breaks_the_protocol(frame: bytes) -> None:
    server = TcpStoreServer()
    good, bad = TcpStore(*server.address), TcpStore(*server.address)
    bad._sock.sendall(frame)
    assert bad._sock.recv(1) == b""
    good.set("k", b"v")
    assert good.get("k") == b"v"
    server.close(0)


def test_tcp_limits() -> None:
    server = TcpStoreServer()
    store = TcpStore(*server.address)
    store.set("k", b"v" * MAX_VALUE)
    assert store.get("k") == b"v" * MAX_VALUE
    for key, value in (("k" * 2000, b"v"), ("", b"v"), ("k", b"v" * (MAX_VALUE + 1)), ("k", b"")):
        with pytest.raises(ConfigError):
            store.set(key, value)
    server.close(0)


def test_tcp_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="in use"):
        TcpStoreServer(port=taken.getsockname()[1])


def test_tcp_without_secret_is_loopback_only() -> None:
    with pytest.raises(ConfigError, match="FTCOMM_SECRET"):
        TcpStoreServer(host="0.0.0.0")


def test_tcp_no_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(Timeout, match="did not come up"):
        TcpStore("127.0.0.1", port, timeout=0.05)


@contextmanager
def server_that(does: Callable[[socket.socket], None]) -> Iterator[int]:
    """Does this with the first connection, and goes on listening; gives its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: does(listener.accept()[0]))
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


def test_tcp_something_else_listens() -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(b"220 mail.example.org ESMTP " + b"x" * 64)

    with server_that(answer) as port, pytest.raises(ConfigError, match="Something else"):
        TcpStore("127.0.0.1", port)


def test_tcp_lost_server() -> None:
    server = TcpStoreServer()
    store = TcpStore(*server.address)
    server.close(0)
    with pytest.raises(SystemFailure, match="lost|closed"):
        store.get("k")


def test_tcp_an_answer_that_comes_too_late_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    server = TcpStoreServer()
    other, store = TcpStore(*server.address), TcpStore(*server.address)
    for key in ("a", "b"):
        other.set(key, key.encode())
    other.release()
    store.release()
    held, whole = threading.Event(), server._answer

    def answer(client: Any, operation: int, parts: list[bytes]) -> None:
        if parts == [b"a"]:
            held.wait()
        whole(client, operation, parts)

    monkeypatch.setattr(server, "_answer", answer)
    with monkeypatch.context() as patch:
        patch.setattr(tcp, "_GRACE", 0.1)
        with pytest.raises(SystemFailure, match="does not answer"):
            store.get("a")
    held.set()
    assert store.get("b") == b"b"
    assert all(
        client.released for client in server._clients
    )  # of a new connection nobody waits for the end of the start
    server.close(0)


def test_tcp_an_answer_to_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    server = TcpStoreServer()
    store = TcpStore(*server.address)
    whole = server._send

    def send(client: Any, data: bytes) -> None:
        whole(client, wire.pack(wire.SET) if data == wire.pack(wire.GET, b"") else data)

    monkeypatch.setattr(server, "_send", send)
    with pytest.raises(SystemFailure, match="sent the answer to operation 2 for that to 1"):
        store.get("a")
    server.close(0)


def test_tcp_host_waits_for_those_who_still_start() -> None:
    server = TcpStoreServer()
    early, late = TcpStore(*server.address), TcpStore(*server.address)
    early.release()
    closing = threading.Thread(target=server.close, args=(60.0,))
    closing.start()
    late.set("k", b"v")  # still served
    late.release()
    closing.join(60)
    assert not closing.is_alive()


def test_file_with_a_half_written_tail(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = FileStore(str(path))
    store.set("a", b"1")
    store.set("b", b"2")
    whole = path.read_bytes()
    for cut in range(len(whole) // 2 + 1, len(whole)):
        path.write_bytes(whole[:cut])
        again = FileStore(str(path))
        assert (again.get("a"), again.get("b")) == (b"1", None)
        again.set("c", b"3")
        other = FileStore(str(path))
        assert (other.get("a"), other.get("b"), other.get("c")) == (b"1", None, b"3")


def test_file_that_is_something_else(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.write_text("A text file, much longer than a header.")
    with pytest.raises(ConfigError, match="not an ftcomm rendezvous file"):
        FileStore(str(path)).get("k")


def test_file_in_a_folder_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be opened"):
        FileStore(str(tmp_path / "no" / "store"))


def test_a_server_that_ends_in_the_handshake_is_not_one_with_another_secret() -> None:
    """Of a killed process the connection may be closed before the listening socket."""

    def end(connection: socket.socket) -> None:
        connection.sendall(wire.MAGIC + wire.challenge())
        connection.recv(1000)
        connection.close()

    with server_that(end) as port, pytest.raises(SystemFailure, match="rank 0, its host, may have ended"):
        TcpStore("127.0.0.1", port)


def test_a_server_that_had_come_up_and_is_gone_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(SystemFailure, match="rank 0, its host, may have ended"):
        TcpStore("127.0.0.1", port, timeout=1e6, came_up=True)
