"""``mpi://``: whole programs under Open MPI's mpirun, some of whose ranks are killed."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from pathlib import Path

import pytest
from mpi import running
from mpi.running import ULFM, Done, needs_mpi
from tables import most

import ftcomm

UNDER_MPIRUN = Path(__file__).parents[1] / "mpi" / "under_mpirun.py"

# Ranks die with mpirun: PDEATHSIG.
PREAMBLE = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
import ftcomm, numpy as np

def die():
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


def mpirun(program: str, *flags: str, ranks: int = 4, **environment: str) -> Done:
    return running.mpirun(["-c", PREAMBLE + textwrap.dedent(program)], *flags, ranks=ranks, **environment)


@needs_mpi
def test_auto_is_mpi() -> None:
    done = mpirun(
        """
        comm = ftcomm.init()
        data = np.full(1000, comm.rank + 1.0)
        comm.all_reduce(data)
        say(comm.rank, comm.size, data[0], comm.stats()["authority"])
        """,
        *ULFM,
    )
    assert done == Done(0, [f"{r} 4 10.0 shm" for r in range(4)], "")


@needs_mpi
@pytest.mark.parametrize("victims", most(["0"], ["2", "0,1,3"]))
def test_survivors_shrink_and_end(victims: str) -> None:
    """mpirun's exit code is 0: nobody hangs in MPI_Finalize, nobody is killed for leaving without it."""
    done = mpirun(
        """
        victims = set(map(int, os.environ["VICTIMS"].split(",")))
        comm = ftcomm.init()
        me = comm.rank
        try:
            comm.barrier()
        except ftcomm.PeerFailure:
            pass  # of a victim that was through before this rank was
        if me in victims:
            die()
        while victims & set(comm.slots):  # shrink() may leave out more of them than the error could name
            try:
                comm.all_reduce(np.ones(100_000))
            except ftcomm.PeerFailure:
                comm = comm.shrink()
        data = np.full(1000, me)
        comm.all_reduce(data)
        import mpi4py
        say(me, comm.size, data[0], mpi4py.rc.finalize)
        """,
        *ULFM,
        VICTIMS=victims,
    )
    alive = sorted(set(range(4)) - set(map(int, victims.split(","))))
    assert done.lines == [f"{r} {len(alive)} {sum(alive)} False" for r in alive], done
    assert done.code == 0, done


@needs_mpi
def test_survivors_go_on_under_lossy() -> None:
    done = mpirun(
        """
        comm = ftcomm.init(options=ftcomm.Options(policy="lossy"))
        for step in range(20):
            if step == 5 and comm.rank == 0:
                die()
            outcome = comm.all_reduce(np.ones(100_000))
        say(comm.rank, outcome.contributors)
        """,
        *ULFM,
    )
    assert done == Done(0, [f"{r} (1, 2, 3)" for r in (1, 2, 3)], "")


@needs_mpi
def test_without_ulfm_it_warns_and_mpirun_ends_the_job() -> None:
    program = """
        comm = ftcomm.init()
        comm.barrier()
        if comm.rank == int(os.environ["VICTIM"]):
            die()
        comm.barrier()
        """
    done = mpirun(program, ranks=2, VICTIM="-1")
    assert (done.code, done.errors.count("--with-ft ulfm")) == (0, 1), done
    assert mpirun(program, ranks=2, VICTIM="1").code != 0


@needs_mpi
@pytest.mark.parametrize("first", ["from mpi4py import MPI", "pass"], ids=["user", "ftcomm"])
def test_mpi_is_the_users_too(first: str) -> None:
    """Before and after: MPI stays usable, and is finalized by whoever imported it first, the same one on all ranks."""
    done = mpirun(
        f"""
        {first}
        comm = ftcomm.init()
        from mpi4py import MPI
        comm.barrier()
        say(MPI.COMM_WORLD.allreduce(comm.rank))
        """,
        *ULFM,
        ranks=3,
    )
    assert done == Done(0, ["3"] * 3, "")


@needs_mpi
@pytest.mark.parametrize("victim", [0, 2])
def test_dies_before_ftcomm_hears_of_it(victim: int) -> None:
    """MPI is up in all; one dies before its first message."""
    done = mpirun(
        """
        from mpi4py import MPI
        MPI.COMM_WORLD.Barrier()
        if MPI.COMM_WORLD.rank == int(os.environ["VICTIM"]):
            die()
        try:
            ftcomm.init()
        except ftcomm.PeerFailure as error:
            say(error.ranks, error.evidence)
        sys.stdout.flush()
        os._exit(0)  # whoever imports MPI first has to mind MPI_Finalize
        """,
        *ULFM,
        ranks=3,
        VICTIM=str(victim),
    )
    assert done.lines == [f"({victim},) ('mpi',)"] * 2, done


@needs_mpi
@pytest.mark.parametrize("point", most(["start.link"], ["rendezvous.publish", "rendezvous.gather"]))
def test_dies_while_ftcomm_starts(point: str) -> None:
    """The others get an error that names it, long before the timeout of half an hour."""
    done = mpirun(
        """
        try:
            ftcomm.init()
        except ftcomm.Error as error:
            say(error.ranks)
        """,
        *ULFM,
        FTCOMM_FAULTS=f"rank=2,at={point},do=kill",
    )
    assert done.lines == ["(2,)"] * 3, done


@needs_mpi
def test_rank_0_dies_while_ftcomm_starts() -> None:
    """It hosts the store."""
    done = mpirun(
        """
        try:
            ftcomm.init()
        except ftcomm.Error as error:
            say("ank 0" in str(error) or error)
        """,
        *ULFM,
        ranks=3,
        FTCOMM_FAULTS="rank=0,at=rendezvous.gather,do=kill",
    )
    assert done.lines == ["True", "True"], done


@needs_mpi
def test_a_rank_that_never_calls_init() -> None:
    done = mpirun(
        """
        from mpi4py import MPI
        if MPI.COMM_WORLD.rank == 1:
            MPI.COMM_WORLD.recv(source=0)
        else:
            try:
                ftcomm.init(timeout=2)
            except ftcomm.Timeout as error:
                say(error.missing)
            if MPI.COMM_WORLD.rank == 0:
                MPI.COMM_WORLD.send("enough", 1)
        """,
        *ULFM,
        ranks=3,
    )
    assert done.lines == ["(1,)", "(1,)"], done


@needs_mpi
def test_wrong_arguments() -> None:
    done = mpirun(
        """
        for arguments in ({"rank": 7}, {"world_size": 3}):
            try:
                ftcomm.init(init_method="mpi://", **arguments)
            except ftcomm.ConfigError as error:
                say("are MPI's" in str(error))
        """,
        *ULFM,
        ranks=1,
    )
    assert done == Done(0, ["True", "True"], "")


@pytest.mark.table
@needs_mpi
@pytest.mark.skipif(importlib.util.find_spec("pytest_mpi") is None, reason="pip install pytest-mpi")
def test_under_pytest_mpi() -> None:
    done = mpirun(
        f"""
        import pytest
        sys.exit(pytest.main(["-q", "--with-mpi", "-p", "no:cacheprovider", {str(UNDER_MPIRUN)!r}]))
        """,
        *ULFM,
    )
    passed = [line for line in done.lines if " passed" in line]
    assert done.code == 0, done
    assert len(passed) == 4, done
    assert not any("skipped" in line or "failed" in line for line in passed), done


def test_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ftcomm.ConfigError, match="needs mpi4py"):
        ftcomm.init(init_method="mpi://")
