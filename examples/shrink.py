"""Policy "raise", no torch: a rank dies, every survivor gets the same error, and the survivors go on as a smaller group.

    ftrun --nproc-per-node 4 --max-restarts 0 --faults "rank=2,at=collective.part:1,do=kill" examples/shrink.py

ftrun's exit code is 1 here: rank 2 failed for good, which is what this example is about.
"""

import numpy as np

import ftcomm

comm = ftcomm.init()
data = np.full(1 << 20, comm.rank + 1.0, dtype=np.float32)
while True:
    mine = data.copy()  # after an error the buffer's content is unspecified
    try:
        comm.all_reduce(mine, "sum")
        succeeded = True
    except ftcomm.PeerFailure as failure:
        print(f"rank {comm.rank} of {comm.size}: {failure}")
        succeeded = False
    comm.ack_failed()
    if comm.agree(int(succeeded)):
        break
    comm = comm.shrink()
print(f"rank {comm.rank} of {comm.size}: the sum is {mine[0]:g}, epoch {comm.epoch}")
