"""Messages there and back between neighbours, half of that time: ftcomm, Open MPI and gloo in one job, their rounds in turn."""

from suite.main import main

if __name__ == "__main__":
    main("send_recv", __doc__)
