"""GPU time per kernel of a decode step: the passes of its launches, timed one by one.

``kernel_times.py`` measures after a run and outside of it: ``DecodeSession.rehearse`` repeats the step after the last
token, without committing it, through a launcher of its own with a compute pass per launch, 24 times or for 2.5 s.
``attribution.py`` says what a launch is (node, kernel, matrix) and the least that it reads: the weights that it binds
(only rows of the embedding), and for attention K and V of the positions that it sees; activations do not count.
``table.py`` makes the rows: medians over the steps, raw and net of what empty passes in the same chain take (an
estimate, never below 0).  ``plain_read.py`` measures beside it the bandwidth of a kernel that only reads: up to 1 GiB
of random words (16 MiB on a CPU adapter), the best of 8 passes.
"""
