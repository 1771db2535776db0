"""What steps, surrogates and refreshes cost: ratios, each over a named baseline that is measured in the same run.

    splitveil bench --device cpu --batches 128 --out benchmarks/measured/bench_cpu.json
    splitveil bench --device cuda --compile --only step,floor
    make bench                                  # fails if a ratio is more than 20 % worse than the committed one

    timing.py   runs pieces of work in turns, and gives the ratio of two of them
    steps.py    step, captured, together, floor: a training step as `train` makes it
    alone.py    loop, memory: a surrogate without the rest of the step
    refresh.py  refresh, sklearn: statistics over a whole training set
    table.py    the tables, and what got worse
    command.py  the command line

Random pixels in the shapes of real data: 1 x 28 x 28 for `small`, 3 x 32 x 32 for `vgg11`, both with an 8-channel bottleneck.
docs/performance.md says what each row means.
"""

from benchmarks.bench.steps import BASE, random_images, steps_of
from benchmarks.bench.timing import ROUNDS, in_turns

__all__ = ["BASE", "ROUNDS", "in_turns", "random_images", "steps_of"]
