"""How large things may be that a user gives: every bound once, with its reason.

A bound is far above all that makes sense and far below what would take hours, gigabytes or more than 64 bits.  Within them
products stay in range too: 2^40 samples of 2^62 elements are 5e30, and sums of figures of 1e30 keep far away from 1e308.
"""

from __future__ import annotations

__all__ = [
    "LARGEST_BATCH",
    "LARGEST_BYTES",
    "LARGEST_FIGURE",
    "LARGEST_FLOPS",
    "LARGEST_MLP_WIDTH",
    "LARGEST_OPTION",
    "LARGEST_SECONDS",
    "LARGEST_SIZES",
    "LARGEST_TENSOR",
    "LARGEST_WHOLE",
    "LONGEST_HOST_NAME",
    "MOST_DEVICES",
    "MOST_DIGITS",
    "MOST_DIMS",
    "MOST_FILE_BYTES",
    "MOST_HOSTS",
    "MOST_LAYERS",
    "MOST_PASSES",
    "MOST_PROFILE_LAYERS",
    "MOST_RESTARTS",
    "MOST_SAMPLES",
    "MOST_SHOWN",
    "MOST_SHOWN_EACH",
    "MOST_STAGES",
    "MOST_TASKS",
    "MOST_TEXT_BYTES",
    "MOST_TRAINING_PASSES",
    "PIPE_WAIT_S",
    "RANGES",
    "SHORTEST_SECONDS",
]

# Texts and files

#: Bytes of a document, a profile, a schedule, a table of measurements.  Parsed JSON takes up to 24 times its text, and the largest
#: plan seen (GPT-3 of 1,000 layers, untied) has 10 MB.
MOST_FILE_BYTES = 64 * 2**20
#: Bytes of a text to train on; each is held as an integer of 8 bytes.
MOST_TEXT_BYTES = 2**28
#: Seconds until somebody has to write into a pipe that is read.
PIPE_WAIT_S = 60.0
#: Digits of a whole number that is read from a text: all of these fit 63 bits.
MOST_DIGITS = 18
#: The largest whole number of a document: numpy's and JSON readers' integers.
LARGEST_WHOLE = 2**63 - 1
#: Characters of the user's input in one message, in all and of each value.
MOST_SHOWN, MOST_SHOWN_EACH = 200, 60

# Figures

#: Any number of a document or an option.  The largest true ones are FLOPs.
LARGEST_FIGURE = 1e30
#: A number on the command line: a time in a unit of the user's, a limit in GiB, a factor.
LARGEST_OPTION = 1e18
#: FLOPs of a layer and sample.
LARGEST_FLOPS = 1e30
#: Elements of a tensor: byte counts of it fit 64 bits.
LARGEST_TENSOR = 2**62
#: Dimensions of a tensor.
MOST_DIMS = 16
#: Bytes of a message, an activation, a layer's parameters: an exabyte.
LARGEST_BYTES = 10**18
#: Seconds that something takes or may take: 31 years.  Clocks of the system end at 9.2e9 seconds.
LARGEST_SECONDS = 1e9

#: The shortest time that is measured: no clock tells less, and the inverse of it stays a number.
SHORTEST_SECONDS = 1e-12

# Models and training

#: Layers of a graph: 4,096 blocks, the most that a built-in model has, of 12 layers each, and what stands around them: more are
#: not planned within seconds.
MOST_LAYERS = 2**16
#: Sizes of a transformer; within them every count fits 63 bits.
LARGEST_SIZES = {
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
LARGEST_MLP_WIDTH = 2**30
#: Layers of a profile, repetitions counted: planners compare all pairs of cuts.
MOST_PROFILE_LAYERS = 2_000
#: Samples per step.
LARGEST_BATCH = 2**40

# Clusters and hosts

#: What a quantity of a cluster can be, in SI units: anything else would make times infinite or zero.
RANGES = {
    "time": (0.0, 1e3),
    "size": (1.0, 1e18),
    "rate": (1.0, 1e18),
    "compute": (1.0, 1e24),
    "ratio": (1e-6, 1.0),
    "factor": (0.0, 1e3),
    "slowness": (0.0, 1.0),
}

#: Devices of a cluster.
MOST_DEVICES = 2**20
#: Hosts of a job: names of a list of nodes, tasks per node.
MOST_HOSTS = 2**16
#: Characters of a host's name with its user: names of the DNS have 253.
LONGEST_HOST_NAME = 320
#: Times that a failed job is started anew.
MOST_RESTARTS = 10**6

# Schedules

#: Stages of a pipeline; validation and simulation keep tables of stages by workers.
MOST_STAGES = 2**12
#: Passes of a micro-batch through a stage: about 10 us each to generate, validate and simulate, and 1 kB.
#: 128 workers with 1,000 micro-batches are half of it.
MOST_PASSES = 2**18
#: Passes of all steps that a training run makes between two checkpoints: a minute of generating before hours of training.
MOST_TRAINING_PASSES = 2**22
#: Tasks of a schedule that is read from a file: a pass is at most four (forward, recomputation, and a backward in two parts).
MOST_TASKS = 4 * MOST_PASSES

# Measurements

#: Rows of a table of measurements, each of which is an object.
MOST_SAMPLES = 10**6
