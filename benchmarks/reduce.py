"""Reduce to rank 0: ftcomm, Open MPI and gloo side by side in one job, their rounds in turn."""

from suite.main import main

if __name__ == "__main__":
    main("reduce", __doc__)
