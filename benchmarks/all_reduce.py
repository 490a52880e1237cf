"""All-reduce: ftcomm, Open MPI and gloo side by side in one job, their rounds in turn."""

from suite.main import main

if __name__ == "__main__":
    main("all_reduce", __doc__)
