"""The examples that take some numbers of ranks only say so, not with an error of torch's."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from launch.running import Start

pytest.importorskip("ftcomm.torch")
if importlib.util.find_spec("sklearn") is None:  # to import it takes two seconds
    pytest.skip("needs scikit-learn", allow_module_level=True)

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "ranks", "arguments", "policy", "said"),
    [
        (
            "pipeline_replay",
            1,
            [],
            "replay",
            "There are two stages or more, each 1 time(s): start with 2, 3, 4, ... ranks",
        ),
        ("pipeline_engine", 1, [], "replay", "each 1 time(s): start with 2, 3, 4, ... ranks; now there are 1."),
        ("pipeline_engine", 3, ["--copies", "2"], "replay", "each 2 time(s): start with 4, 6, 8, ... ranks"),
        ("train_engine", 3, ["--hsdp"], "lossy", "With --hsdp the number of ranks has to be even"),
    ],
    ids=["pipeline", "engine", "copies", "hsdp"],
)
def test_a_wrong_number_of_ranks(
    start: Start, name: str, ranks: int, arguments: list[str], policy: str, said: str
) -> None:
    script = f"""
        import runpy, sys
        sys.path.insert(0, {str(EXAMPLES)!r})
        sys.argv[1:] = {arguments!r}
        runpy.run_path({str(EXAMPLES / f"{name}.py")!r}, run_name="__main__")
        """
    ftrun = start(script, "--nproc-per-node", str(ranks), "--policy", policy, "--max-restarts", "0")
    code, _, err = ftrun.finish()
    assert code == 1
    assert said in err
    assert "Traceback" not in err
