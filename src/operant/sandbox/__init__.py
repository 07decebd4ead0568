"""Processes for code that may hang, crash or fork: they are limited, and ended with all their descendants.

Three layers, each usable without the next:

1. `supervisor.py` with `linux.py`: a small process beside each program, which limits it and ends it with all its
   descendants; `process.py` is the run's side of it. The program may be anything.
2. `pool.py`: worker programs that answer requests as JSON lines, with deadlines; `worker.py` is their side of it.
   Nothing is unpickled.
3. `serialise.py` and `reward_call.py`: rollouts as plain data, and the rewards that judge them in a worker. Worlds in
   workers stand in `envs/isolated.py`.

Beside them, for programs that attack: `jail.py` judges untrusted programs, at one of the `levels.py`; `harness.py` runs
inside, and `seccomp.py` is the filter of system calls.

This file imports nothing, so that supervisors and workers load only what they need. The package never imports torch.
"""
