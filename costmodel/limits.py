"""Bounds on user input, each with its reason.

A bound is far above all sensible values, and far below what would take hours, gigabytes or more than 64 bits.  Products of values
within the bounds stay in range as well: 2^40 samples of 2^62 elements are 5e30, and sums of numbers of 1e30 are far below 1e308.
"""

from __future__ import annotations

__all__ = [
    "LONGEST_HOST_NAME",
    "MAX_BATCH",
    "MAX_BYTES",
    "MAX_DEVICES",
    "MAX_DIGITS",
    "MAX_DIMS",
    "MAX_FIGURE",
    "MAX_FILE_BYTES",
    "MAX_FLOPS",
    "MAX_HOSTS",
    "MAX_LAYERS",
    "MAX_MLP_WIDTH",
    "MAX_OPTION",
    "MAX_PASSES",
    "MAX_PROFILE_LAYERS",
    "MAX_RESTARTS",
    "MAX_SAMPLES",
    "MAX_SECONDS",
    "MAX_SHOWN",
    "MAX_SHOWN_EACH",
    "MAX_SIZES",
    "MAX_STAGES",
    "MAX_TASKS",
    "MAX_TENSOR",
    "MAX_TEXT_BYTES",
    "MAX_TRAINING_PASSES",
    "MAX_WHOLE",
    "MIN_SECONDS",
    "PIPE_WAIT_S",
    "RANGES",
]

# Texts and files

#: Bytes of a document, a profile, a schedule, a table of measurements.  Parsed JSON takes up to 24 times its text, and the largest
#: plan seen (GPT-3 of 1,000 layers, untied) has 10 MB.
MAX_FILE_BYTES = 64 * 2**20
#: Bytes of a text to train on; each is stored as an integer of 8 bytes.
MAX_TEXT_BYTES = 2**28
#: Seconds to wait for data from a pipe.
PIPE_WAIT_S = 60.0
#: Digits of an integer in a text; all such integers fit into 63 bits.
MAX_DIGITS = 18
#: The largest integer of a document; it fits into numpy's integers and those of other JSON readers.
MAX_WHOLE = 2**63 - 1
#: Characters of user input in one message: in total, and of each value.
MAX_SHOWN, MAX_SHOWN_EACH = 200, 60

# Figures

#: Any number of a document or an option.  The largest real ones are FLOPs.
MAX_FIGURE = 1e30
#: A number on the command line: a time in any unit, a limit in GiB, a factor.
MAX_OPTION = 1e18
#: FLOPs of a layer per sample.
MAX_FLOPS = 1e30
#: Elements of a tensor; its number of bytes fits into 64 bits.
MAX_TENSOR = 2**62
#: Dimensions of a tensor.
MAX_DIMS = 16
#: Bytes of a message, an activation, a layer's parameters: an exabyte.
MAX_BYTES = 10**18
#: A duration or time limit in seconds: 31 years.  System clocks end at 9.2e9 seconds.
MAX_SECONDS = 1e9

#: The shortest measured time: below the resolution of any clock, and its inverse is finite.
MIN_SECONDS = 1e-12

# Models and training

#: Layers of a graph: 4,096 blocks of 12 layers (the largest built-in model) and the layers around them.  Larger graphs are not
#: planned within seconds.
MAX_LAYERS = 2**16
#: Sizes of a transformer; within them every count fits into 63 bits.
MAX_SIZES = {
    "layers": 2**12,
    "width": 2**20,
    "heads": 2**20,
    "kv_heads": 2**20,
    "head_dim": 2**20,
    "intermediate": 2**24,
    "sequence": 2**20,
    "positions": 2**24,
    "vocabulary": 2**27,
    "types": 2**20,
}
#: Features of a layer of a perceptron.
MAX_MLP_WIDTH = 2**30
#: Layers of a profile, including repetitions; planners compare all pairs of cuts.
MAX_PROFILE_LAYERS = 2_000
#: Samples per step.
MAX_BATCH = 2**40

# Clusters and hosts

#: (minimum, maximum) of each quantity of a cluster, in SI units.  Outside of it, times would be infinite or zero.
RANGES = {
    "time": (0.0, 1e3),
    "size": (1.0, 1e18),
    "rate": (1.0, 1e18),
    "compute": (1.0, 1e24),
    "flops": (0.0, 1e15),
    "ratio": (1e-6, 1.0),
    "factor": (0.0, 1e3),
    "slowness": (0.0, 1.0),
}

#: Devices of a cluster.
MAX_DEVICES = 2**20
#: Hosts of a job: names of a list of nodes, tasks per node.
MAX_HOSTS = 2**16
#: Characters of ``user@host``; a DNS name has at most 253.
LONGEST_HOST_NAME = 320
#: Restarts of a failed job.
MAX_RESTARTS = 10**6

# Schedules

#: Stages of a pipeline; validation and simulation keep tables of stages by workers.
MAX_STAGES = 2**12
#: Passes of a micro-batch through a stage: generating, validating and simulating one takes about 10 us and 1 kB.
#: 128 workers with 1,000 micro-batches are half of this bound.
MAX_PASSES = 2**18
#: Passes of all training steps between two checkpoints: a minute to generate the schedule, before hours of training.
MAX_TRAINING_PASSES = 2**22
#: Tasks of a schedule file: at most four per pass (forward, recomputation, and a backward in two parts).
MAX_TASKS = 4 * MAX_PASSES

# Measurements

#: Rows of a table of measurements; each becomes an object.
MAX_SAMPLES = 10**6
