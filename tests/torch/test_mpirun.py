"""``dist.init_process_group("ftcomm")`` under mpirun: whole scripts, also unchanged ones, some of whose ranks are killed."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch.distributed as dist
from launch.running import clean_environment
from mpi import running
from mpi.running import ULFM, Done, needs_mpi
from tables import most

EXAMPLES = Path(__file__).parents[2] / "examples"

# Ranks die with mpirun: PDEATHSIG.
PREAMBLE = """
import ctypes, os, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
from datetime import timedelta
import torch
import torch.distributed as dist
import ftcomm.torch

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


def mpirun(program: str, ranks: int = 3, **environment: str) -> Done:
    return launch(["-c", PREAMBLE + textwrap.dedent(program)], ranks, **environment)


def launch(command: list[str], ranks: int, **environment: str) -> Done:
    given = {name: "" for name in ("RANK", "WORLD_SIZE") if name in clean_environment()}
    assert not given, "the tests themselves run under a launcher"
    return running.mpirun(command, *ULFM, ranks=ranks, OMP_NUM_THREADS="1", **environment)


@needs_mpi
@pytest.mark.table
@pytest.mark.parametrize("victim", [None, 0, 2])
def test_the_engine_example_as_it_is(victim: int | None) -> None:
    faults = "" if victim is None else f"rank={victim},at=step:10,do=kill"
    command = [str(EXAMPLES / "train_engine.py"), "--epochs", "1"]
    done = launch(command, 4, FTCOMM_POLICY="lossy", FTCOMM_FAULTS=faults)
    assert done.code == 0, done
    assert "strategy rollback: every rank holds the whole state, and nobody replaces who dies" in done.errors
    (steps,) = re.findall(r"ftcomm: (\d+) steps", done.errors)
    assert int(steps) == 20 if victim is None else int(steps) > 20, done  # three ranks take more of them for the epoch
    assert [line.startswith("accuracy") for line in done.lines if "weights" in line] == [True] * (victim != 0), done


@needs_mpi
@pytest.mark.table
def test_stages_of_a_pipeline(tmp_path: Path) -> None:
    def start(folder: str, faults: str = "") -> Done:
        command = [str(EXAMPLES / "pipeline_engine.py"), "--samples", "160", "--epochs", "1", "--every", "2"]
        return launch([*command, "--checkpoints", str(tmp_path / folder)], 4, FTCOMM_FAULTS=faults)

    wanted, killed = start("a"), start("b", "rank=2,at=step:5,do=kill")
    assert wanted.code == 0, wanted
    assert killed.code != 0, killed
    assert "Rank 2 is gone, and a pipeline can't go on without its stage. Start again" in killed.errors
    done = start("b")
    assert done.code == 0, done
    assert "goes on from the checkpoint of step 4" in done.errors
    assert [line for line in done.lines if "digest" in line] == [line for line in wanted.lines if "digest" in line]


@needs_mpi
@pytest.mark.table
@pytest.mark.parametrize("victim", [None, 2])
def test_sharded_models(victim: int | None, tmp_path: Path) -> None:
    """Nobody replaces who dies, and shards are needed: all end. There is no checkpoint yet, and the next start begins anew."""

    def start(folder: str, faults: str = "") -> Done:
        command = [
            str(EXAMPLES / "train_engine.py"),
            "--epochs",
            "1",
            "--hsdp",
            "--checkpoints",
            str(tmp_path / folder),
        ]
        return launch(command, 4, FTCOMM_POLICY="lossy", FTCOMM_FAULTS=faults)

    done = start("a")
    assert done.code == 0, done
    assert "strategy checkpoint: the model is sharded, and nobody replaces who dies" in done.errors
    if victim is not None:
        killed = start("b", f"rank={victim},at=step:10,do=kill")
        assert killed.code != 0, killed
        again = start("b")
        assert again.code == 0, again
        assert [line for line in again.lines if "weights" in line] == [line for line in done.lines if "weights" in line]


@needs_mpi
@pytest.mark.table
@pytest.mark.parametrize("at", ["step:10", "collective.part,step=10"])
def test_replicas_of_the_survivors_are_equal(at: str) -> None:
    done = mpirun(
        f"""
        sys.path.insert(0, {str(EXAMPLES)!r})
        import train_digits
        made, build = [], train_digits.build
        def kept():
            made.append(build())
            return made[-1]
        train_digits.build = kept
        sys.argv = ["train_engine.py", "--epochs", "1"]
        runpy.run_path({str(EXAMPLES / "train_engine.py")!r}, run_name="__main__")
        say("replica", train_digits.digest(made[0]))
        """,
        ranks=4,
        FTCOMM_POLICY="lossy",
        FTCOMM_FAULTS=f"rank=1,at={at},do=kill",
    )
    replicas = [line for line in done.lines if line.startswith("replica")]
    assert done.code == 0, done
    assert len(replicas) == 3, done
    assert len(set(replicas)) == 1, done


@needs_mpi
@pytest.mark.parametrize("method", most(["None"], ["'env://'", "'mpi://'"]))
def test_once_and_again(method: str) -> None:
    done = mpirun(
        f"""
        for _ in range(2):
            dist.init_process_group("ftcomm", init_method={method})
            data = torch.full((1000,), dist.get_rank() + 1.0)
            dist.all_reduce(data)
            job = ftcomm.torch.communicator().job
            say(dist.get_rank(), dist.get_world_size(), int(data[0]), job.name.startswith("mpi-"))
            dist.destroy_process_group()
        """
    )
    assert done == Done(0, sorted([f"{rank} 3 6 True" for rank in range(3)] * 2), "")


# Each rank pretends to be another host: without a secret their links would be refused.
ON_HOSTS = """
    from mpi4py import MPI
    os.environ["FTCOMM_HOST"] = f"host-{MPI.COMM_WORLD.rank}"
    dist.init_process_group("ftcomm", init_method="mpi://")
    data = torch.ones(1000)
    dist.all_reduce(data)
    say(int(data[0]), ftcomm.torch.communicator().job.options.secret)
    dist.destroy_process_group()
    """


@needs_mpi
@pytest.mark.table
def test_hosts_have_a_secret() -> None:
    made = {line.split()[1] for line in mpirun(ON_HOSTS).lines}
    assert len(made) == 1
    assert len(made.pop()) == 64


@needs_mpi
@pytest.mark.table
def test_a_secret_that_is_given_stays() -> None:
    given = "of the one who has started the job"
    assert mpirun(ON_HOSTS, FTCOMM_SECRET=given) == Done(0, [f"3 {given}"] * 3, "")


@needs_mpi
@pytest.mark.parametrize("late", most(["start.link"], ["rendezvous.publish", "none"]))
@pytest.mark.parametrize("point", most(["rendezvous.gather"], ["rendezvous.publish", "start.link"]))
def test_dies_while_the_job_starts(point: str, late: str) -> None:
    """The others get an error that names it, long before the timeout of half an hour; rank 1 also when it comes so late that
    rank 0, which hosts the store, has failed long ago.
    """
    done = mpirun(
        """
        try:
            dist.init_process_group("ftcomm")
        except Exception as error:
            cause = error if isinstance(error, ftcomm.Error) else error.__cause__
            say(cause.ranks)
        """,
        FTCOMM_FAULTS=f"rank=2,at={point},do=kill" + (f"; rank=1,at={late},do=delay:2000" if late != "none" else ""),
    )
    assert done.lines == ["(2,)"] * 2, done


@needs_mpi
@pytest.mark.table
def test_rank_0_dies_while_the_job_starts() -> None:
    """It hosts the store."""
    done = mpirun(
        """
        try:
            dist.init_process_group("ftcomm")
        except ftcomm.Error as error:
            say("ank 0" in str(error) or error)
        """,
        FTCOMM_FAULTS="rank=0,at=rendezvous.gather,do=kill",
    )
    assert done.lines == ["True", "True"], done


@needs_mpi
@pytest.mark.table
@pytest.mark.parametrize("victim", [0, 2])
def test_dies_before_the_rendezvous(victim: int) -> None:
    done = mpirun(
        """
        from mpi4py import MPI
        MPI.COMM_WORLD.Barrier()
        if MPI.COMM_WORLD.rank == int(os.environ["VICTIM"]):
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.init_process_group("ftcomm")
        except ftcomm.PeerFailure as error:
            say(error.ranks, error.evidence)
        sys.stdout.flush()
        os._exit(0)  # whoever imports MPI first has to mind MPI_Finalize
        """,
        VICTIM=str(victim),
    )
    assert done.lines == [f"({victim},) ('mpi',)"] * 2, done


@needs_mpi
@pytest.mark.table
def test_a_rank_that_never_comes() -> None:
    done = mpirun(
        """
        from mpi4py import MPI
        if MPI.COMM_WORLD.rank == 1:
            MPI.COMM_WORLD.recv(source=0)
        else:
            try:
                dist.init_process_group("ftcomm", timeout=timedelta(seconds=2))
            except ftcomm.Timeout as error:
                say(error.missing)
            if MPI.COMM_WORLD.rank == 0:
                MPI.COMM_WORLD.send("enough", 1)
        """
    )
    assert done.lines == ["(1,)", "(1,)"], done


@needs_mpi
def test_a_rank_of_the_scripts_own() -> None:
    """What is not MPI's is refused, under its name; ``env://`` with a rank is torch's own, which needs the rest, too."""
    done = mpirun(
        """
        for method, more in (("mpi://", {"rank": 7}), ("mpi://", {"world_size": 3}), ("env://", {"rank": 0})):
            try:
                dist.init_process_group("ftcomm", init_method=method, **more)
            except (ftcomm.ConfigError, ValueError) as error:
                say("are MPI's" in str(error), "WORLD_SIZE expected" in str(error))
        """,
        ranks=1,
    )
    assert done == Done(0, ["False True", "True False", "True False"], "")


@pytest.mark.parametrize("variables", [{}, {"OMPI_COMM_WORLD_SIZE": "2", "RANK": "0"}])
def test_env_stays_torchs_own(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"environment variable \w+ expected, but not set"):
        dist.init_process_group("ftcomm")
