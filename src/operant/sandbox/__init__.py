"""Work that is not trusted to come back: other processes that can be ended with all that they have started.

Three layers, each of use without the next:

1. `keeper.py` and `kernel.py`: the process beside the work, which limits it and ends it with all its descendants;
   `box.py` is the run's end of that. A box holds any program.
2. `pool.py`: boxes that answer JSON lines, with deadlines; `serve.py` is their end of it. Nothing is unpickled.
3. `plain.py` and `isolation.py`: rollouts as plain data, and the rewards that judge them there.

Nothing is imported here: a keeper and a worker start with what they need and no more.
"""
