"""Every reader of user input, as commands on mutated input.

A reader makes cases: the files, the command line and the environment of one run of a command.  Its seeds are valid; each case
mutates one of them.  The commands are chosen so that input that is accepted is worked with: planned, fitted, drawn, compared.
Where that work takes much longer than reading, a share of the cases is a command, and the others are what it reads with.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from mutations import broken_json, broken_text, mutated_text

from autoddl.__main__ import main
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.distribution import Distribution
from autoddl.costmodel.sbp import parse_state
from autoddl.pipelines.profile import load_profile, to_document
from autoddl.zoo import Transformer, bert, gpt, mlp, resolve_model

__all__ = ["READERS", "Case"]

_ON_TWO = ("--cluster", "dgx-a100", "--nodes", "1", "--devices-per-node", "2")
_QUICK = ("--batch", "4", "--micro-batch", "4", "--recompute", "never", "--json", "--quiet")


@dataclass(frozen=True)
class Case:
    """One run: of a command, or of a function where no command reads such input.

    Attributes:
        argv: the command line.
        files: what lies in the current directory, by name.
        environ: variables that are set besides those of the test.
        call: what runs in place of the command.
        last_line_only: whether the command may say more on stderr before its one line: the grid of an invalid schedule.
    """

    argv: tuple[str, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    call: Callable[[], str] | None = None
    last_line_only: bool = False


def _preset(name: str) -> Any:
    return json.loads(
        resources.files("autoddl.costmodel.clusters").joinpath(f"{name}.json").read_text(encoding="utf-8")
    )


@cache
def _made(*argv: str) -> bytes:
    """What a command writes to the file that is named by -o; made once."""
    target = Path("seed")
    with contextlib.redirect_stdout(io.StringIO()):
        assert main([*argv, "-o", str(target)]) == 0, argv
    return target.read_bytes()


@cache
def _plan() -> Any:
    return json.loads(_made("plan", "mlp:8,4,2", *_ON_TWO, "--batch", "4", "--quiet"))


@cache
def _joint_plan() -> Any:
    argv = ("plan", "mlp:8,8,8", *_ON_TWO, "--batch", "4", "--quiet", "--pipeline", "auto")
    return json.loads(_made(*argv, "--bandwidth", "1MB/s"))


_ON_CLUSTER = ("plan", "mlp:8,8", "--cluster", "input.json", *_QUICK)


def _used(rng: random.Random, argv: tuple[str, ...], files: Mapping[str, bytes], read: Callable[[], str]) -> Case:
    """A command for an eighth of the files; the others are read alone, for planning takes longer than all the rest."""
    return Case(argv, files) if rng.random() < 1 / 8 else Case(files=files, call=read)


def _graph(rng: random.Random) -> Case:
    sizes = Transformer("gpt", 1, 16, 2, 8, 32)
    seed = rng.choice(
        (mlp([8, 4, 2]), mlp([8, 4, 2]), gpt(sizes), bert(Transformer("bert", 1, 16, 2, 8, 32, tied=False)))
    )
    return _used(
        rng,
        ("plan", "input.json", *_ON_TWO, *_QUICK),
        {"input.json": broken_json(rng, seed.document())},
        lambda: resolve_model("./input.json").hash,
    )


def _cluster(rng: random.Random) -> Case:
    seed = _preset("gcp-a100")
    seed.update(num_nodes=1, devices_per_node=2)
    return _used(rng, _ON_CLUSTER, {"input.json": broken_json(rng, seed)}, lambda: load_cluster("input.json").hash)


@cache
def _calibrated() -> Any:
    """A cluster that was fitted to made-up measurements."""
    Path("samples.csv").write_bytes(_MEASUREMENTS.encode())
    _fit_with_few_draws()
    return json.loads(_made("fit", "samples.csv", "--quiet", "--name", "fitted"))


@cache
def _fit_with_few_draws() -> None:
    """Draws are all alike, and a hundred of them take longer than all that is read."""
    from autoddl.calib import device, fit

    for module in (fit, device):
        module.DRAWS = 4  # type: ignore[attr-defined]


def _calibration(rng: random.Random) -> Case:
    """One member is mutated: nearly all of such a file's values are in it."""
    member = rng.choice(("calibration", "links"))
    place = f'"{member}": '
    before, _, after = json.dumps({**_calibrated(), member: 0}).partition(f"{place}0")
    data = before.encode() + place.encode() + broken_json(rng, _calibrated()[member]) + after.encode()
    return _used(rng, _ON_CLUSTER, {"input.json": data}, lambda: load_cluster("input.json").hash)


_CONFIGS: tuple[dict[str, Any], ...] = (
    {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 8, "vocab_size": 32, "n_inner": None},
    {"model_type": "bert", "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32,
     "max_position_embeddings": 8, "vocab_size": 32, "hidden_act": "gelu"},
    {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1,
     "intermediate_size": 32, "max_position_embeddings": 8, "vocab_size": 32, "tie_word_embeddings": True},
)  # fmt: skip


def _huggingface(rng: random.Random) -> Case:
    return _used(
        rng,
        ("plan", "config.json", *_ON_TWO, *_QUICK),
        {"config.json": broken_json(rng, rng.choice(_CONFIGS))},
        lambda: resolve_model("./config.json").hash,
    )


def _of_plan(rng: random.Random, plan: Any) -> Case:
    """Compared with itself: by the command, which reads it twice, or read once. Of some a page is made."""
    data, roll, edited = broken_json(rng, plan), rng.random(), rng.random() < 0.7
    options = ("--edited",) if edited else ()
    if roll < 0.03:
        return Case(("report", "input.json", "-o", "page.html", "--alternatives", "0", *options), {"input.json": data})
    if roll < 0.12:
        return Case(("diff", "input.json", "input.json", "--json", *options), {"input.json": data})
    return Case(files={"input.json": data}, call=lambda: _compared("input.json", edited))


def _compared(path: str, edited: bool) -> str:
    from autoddl.diffing import compare, difference_document
    from autoddl.explain import view_of
    from autoddl.planfile import load_plan

    view = view_of(load_plan(path, edited), path)
    return json.dumps(difference_document(compare(view, view)), allow_nan=False)


def _plan_document(rng: random.Random) -> Case:
    return _of_plan(rng, _plan())


def _joint_document(rng: random.Random) -> Case:
    return _of_plan(rng, _joint_plan())


_PLANNER = ("--cluster", "dgx-a100", "--nodes", "1", "--devices-per-node", "2", "--batch", "4", "--json")
_PROFILE = {
    "format": "autoddl-profile", "version": 1, "name": "small", "micro_batch": 2, "edges": [[0, 1], [1, 2], [0, 2]],
    "layers": [
        {"name": "a", "forward_s": 0.1, "backward_s": 0.2, "activation_bytes": 1000, "parameter_bytes": 4000},
        {"name": "b", "repeat": 2, "forward_s": 0.1, "backward_s": 0.2, "activation_bytes": 1000, "parameter_bytes": 4000,
         "stored_bytes": 5000},
    ],
}  # fmt: skip


def _profile(rng: random.Random) -> Case:
    planner = rng.choice(("dapple", "dapple", "chimera", "wpipe"))
    return _used(
        rng,
        ("pipeline", "--profile", "input.json", "--planner", planner, *_PLANNER),
        {"input.json": broken_json(rng, _PROFILE)},
        lambda: json.dumps(to_document(load_profile("./input.json")), allow_nan=False),
    )


_TEXT_GRAPH = """\
node1 -- Input0 -- forward_compute_time=0.000, backward_compute_time=0.000, activation_size=0.0, parameter_size=0.000
node2 -- Embedding(32320, 1024) -- forward_compute_time=0.073, backward_compute_time=6.949, activation_size=6291456.0, parameter_size=132382720.000
node3 -- LSTM(1024, 1024) -- forward_compute_time=3.190, backward_compute_time=5.348, activation_size=[6291456.0; 131072.0; 131072.0], parameter_size=33587200.000
node4 -- Linear(4, 4) -- forward_compute_time=1.2e1, backward_compute_time=5, activation_size=62.0, parameter_size=335.000
\tnode1 -- node2
\tnode2 -- node3
\tnode3 -- node4
"""  # noqa: E501  (PipeDream's lines)


def _text_graph(rng: random.Random) -> Case:
    argv = ("pipeline", "--profile", "graph.txt", "--profile-batch", "2", *_PLANNER)
    return _used(
        rng,
        argv,
        {"graph.txt": broken_text(rng, _TEXT_GRAPH)},
        lambda: json.dumps(to_document(load_profile("./graph.txt", 2)), allow_nan=False),
    )


@cache
def _schedules() -> tuple[str, ...]:
    return tuple(
        _made("schedule", name, "--stages", "2", "--micro-batches", "2", "--format", "csv", *more).decode()
        for name, *more in (
            ("1f1b",),
            ("chimera",),
            ("pipedream-2bw", "--iterations", "2"),
            ("zero-bubble", "--width", "2,1"),
        )
    )


def _schedule_file(rng: random.Random) -> Case:
    form = rng.choice(("json", "json", "text", "svg", "trace", "csv"))
    data = broken_text(rng, rng.choice(_schedules()))
    return Case(("schedule", "input.csv", "--format", form), {"input.csv": data}, last_line_only=True)


_MEASUREMENTS = "collective,level,ranks,bytes,seconds,job_ranks,ranks_per_node,cores,stride,shape,foreign\n" + "".join(
    f"{name},intra-node,{ranks},{size},{1e-5 * ranks + size * 1e-9 * (1 + repetition / 50)},4,4,2,1,,0.1\n"
    for name in ("all-reduce", "all_gather", "reduce-scatter", "all-to-all")
    for ranks in (2, 4)
    for size in (1024, 65536, 1048576)
    for repetition in (0, 1)
) + "".join(f"matmul,device,1,1,{n**3 * 1e-10},4,4,2,1,{n}x{n}x{n},0\n" for n in (64, 128, 256))  # fmt: skip
_SHORT = "\n".join(_MEASUREMENTS.split("\n")[:4]) + "\n"


def _measurements(rng: random.Random) -> Case:
    _fit_with_few_draws()
    argv = (
        ("fit", "input.csv", "--against", "local-cpu")
        if rng.random() < 0.95
        else ("fit", "input.csv", "--json", "--quiet")
    )
    return Case(argv, {"input.csv": broken_text(rng, _MEASUREMENTS if argv[2] == "--json" else _SHORT)})


_NCCL = """\
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 2 minBytes 1024 maxBytes 1048576 step: 32(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0
# Using devices
#  Rank  0 Group  0 Pid   1887 on   worker-1 device  0 [0x8d] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid   1888 on   worker-1 device  1 [0x95] NVIDIA H100 80GB HBM3
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
        1024           256     float     sum      -1    27.25    0.04    0.05      0    25.86    0.04    0.05      0
     1048576        262144     float     sum      -1    57.25   18.32   32.05      0    55.86   18.77   32.85      0
# Out of bounds values : 0 OK
"""


def _nccl(rng: random.Random) -> Case:
    return Case(("fit", "input.txt", "--against", "dgx-a100"), {"input.txt": broken_text(rng, _NCCL)})


@cache
def _read_launched_plan_once() -> None:
    """The plan of a launch is the same in all cases, and takes longer to check than what is mutated."""
    from autoddl import planfile as module

    load = module.load_plan
    load_once = cache(load)
    module.load_plan = lambda path, edited=False: (load_once if path == "plan.json" else load)(path, edited)


def _launch(rng: random.Random, argv: tuple[str, ...], files: Mapping[str, bytes], environ: Mapping[str, str]) -> Case:
    _read_launched_plan_once()
    plan = json.dumps(_plan()).encode()
    always = {"plan.json": plan, "script.py": b"# a script\n"}
    return Case(("launch", "plan.json", "script.py", "--dry-run", *argv), {**always, **files}, environ)


def _hosts(rng: random.Random) -> Case:
    text = _argument(rng, rng.choice(("localhost", "host:2", "user@host:2,h2", "h1,h2,h3:4", "[::1]:2")))
    more = ("--force",) if rng.random() < 0.5 else ()
    return _launch(rng, (f"--hosts={text}", *more), {}, {})


def _hostfile(rng: random.Random) -> Case:
    data = broken_text(rng, rng.choice(("# hosts\nh1 slots=2\n", "h1\nh2 slots=1 # two\n\nuser@h3 slots=12\n")))
    more = ("--force",) if rng.random() < 0.5 else ()
    return _launch(rng, ("--hostfile=hosts", *more), {"hosts": data}, {})


_STEP = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
    "SLURM_STEP_NODELIST": "gpu[01-02,7],login", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}  # fmt: skip
_OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
_PLAIN = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "29500",
}


def _environment(rng: random.Random) -> Case:
    environ = dict(rng.choice((_STEP, _STEP, _OPENMPI, _PLAIN)))
    for name in rng.sample(sorted(environ), rng.randint(1, 2)):
        environ[name] = _argument(rng, environ[name])
    if rng.random() < 0.2:
        del environ[rng.choice(sorted(environ))]
    return _launch(rng, (), {}, environ)


def _argument(rng: random.Random, text: str) -> str:
    """A mutated word of a command line, which holds no NUL, and nothing that is no text."""
    return mutated_text(rng, text).replace("\0", "")


_MODELS = ("gpt:2x64", "bert:1x64", "llama:1x128", "mlp:16,8,4", "vgg11", "gpt2", "FILE.json", "x.py")


def _model(rng: random.Random) -> Case:
    text = _argument(rng, rng.choice(_MODELS))
    if ".py:" in text:  # code of the user's, which is run
        text = text.replace(":", "")

    def call() -> str:
        graph = resolve_model(text)
        return f"{graph.num_parameters} {graph.flops}"

    if rng.random() < 0.9:  # the models that there are, are large: planning each takes long
        return Case(call=call)
    small = _argument(rng, rng.choice(("gpt:1x64", "mlp:16,8")))
    return Case(("plan", "mlp:8,8" if ".py:" in small or small.startswith("-") else small, *_ON_TWO, *_QUICK))


#: The last ones need a plan, or ranks: their options are read, and then something is missing.
_OPTIONS = (
    "schedule 1f1b --stages=2 --micro-batches=4 --iterations=2 --width=1,2 --activation-limit=2.5 --forward=1,2",
    "schedule 1f1b --stages=3 --micro-batches=4 --max-in-flight=2 --policy=B --backward=2.5 --transfer=0.1",
    "schedule 1f1b --stages=2 --micro-batches=2 --warm-up=2,1 --width=2 --all-reduce-time=0.5 --update-time=1",
    "schedule chimera --stages=4 --micro-batches=4 --pipelines=2 --concatenation=direct --all-reduce=eager",
    "schedule interleaved-1f1b --stages=2 --micro-batches=4 --groups=2 --transfer-latency=0.1",
    "schedule grouped-gpipe --stages=2 --micro-batches=4 --groups=2 --recompute --recompute-time=1",
    "schedule wpipe --stages=2 --micro-batches=4 --groups=2 --iterations=3 --format=text",
    "schedule zero-bubble --stages=2 --micro-batches=4 --policy=H2 --backward-input=1,0.5 --format=svg",
    "schedule gems --stages=2 --micro-batches=4 --forward=1e3 --format=trace",
    "schedule pipedream --stages=2 --micro-batches=4 --blocking-transfers --transfer=1",
    "schedule list",
    "plan mlp:8,8 --cluster=dgx-a100 --nodes=1 --devices-per-node=2 --batch=4 --micro-batch=2 --json --quiet",
    "plan mlp:8,8 --cluster=dgx-a100 --nodes=1 --devices-per-node=2 --latency=2us --bandwidth=10GB/s --json",
    "plan mlp:8,8 --cluster=dgx-a100 --nodes=1 --devices-per-node=2 --memory-limit=1.5 --seed=1 --json",
    "plan mlp:8,8 --cluster=dgx-a100 --nodes=2 --devices-per-node=2 --evaluations=9 --time-limit=1 --json",
    "plan gpt:1x64 --cluster=dgx-a100 --nodes=1 --devices-per-node=2 --heads=2 --sequence=8 --vocabulary=99 --json",
    "pipeline --profile=transformer:2x8x8 --cluster=dgx-a100 --nodes 1 --devices-per-node 2 --batch=4 --micro-batch=1 --json",
    "pipeline --profile=transformer:4x8x8 --cluster=dgx-a100 --nodes 1 --batch=8 --devices-per-node 4 --planner=chimera "
    "--pipelines=2 --stages=4 --micro-batch=1 --json",
    "pipeline --profile=transformer:4x8x8 --cluster=dgx-a100 --nodes 1 --devices-per-node 2 --batch=4 --widths=1:1 "
    "--stages=2 --micro-batch=2 --state-factor=4 --memory-limit=1 --json",
    "verify missing.json --ranks=2 --tolerance=0.1 --timeout=300 --seed=1",
    "explain missing.json --alternatives=2 --time-limit=30",
    "report missing.json -o out.html --alternatives=2 --time-limit=3",
    "launch missing.json missing.py --max-restarts=2 --stall-timeout=60 --start-timeout=9.5 --grace=1 --dry-run",
    "train missing --stages=2 --micro-batches=2 --steps=5 --width=1,2 --learning-rate=1e-3 --every=3 --seed=1",
    "calibrate --ranks=2,x --sizes=4KiB:16MiB --repetitions=10 --budget=5 --seed=1",
    "calibrate --ranks=2,4 --sizes=4KiB,0x --repetitions=10",
    "rank missing --ranks=2 --batch=4 --strategies=4 --rounds=1 --repetitions=1 --budget=5",
)  # fmt: skip


def _options(rng: random.Random) -> Case:
    argv = rng.choice(_OPTIONS).split()
    options = [i for i, word in enumerate(argv) if "=" in word]
    for i in rng.sample(options, min(len(options), rng.randint(1, 2))):
        name, _, value = argv[i].partition("=")
        argv[i] = f"{name}={_argument(rng, value)}"
        if name in ("--cluster", "--format", "--profile") and rng.random() < 0.5:
            argv[i] = f"{name}={value}"
    return Case(tuple(argv), last_line_only=argv[0] == "schedule")


def _distribution(rng: random.Random) -> Case:
    text = _argument(
        rng, rng.choice(("(S0:4, B:2, S1:8)", "(S0:2, S1:4 | P:2, S(1):4)", "(S0:2@4, S1:2@1, S1:2@2)", "()"))
    )

    def call() -> str:
        found = Distribution.parse(text)
        assert Distribution.parse(str(found)) == found, text
        return f"{found} {found.num_ranks}"

    state = _argument(rng, rng.choice(("S0", "S(12)", "B", "P")))
    return Case(call=call if rng.random() < 0.8 else lambda: str(parse_state(state)))


#: By name, what makes a case.
READERS: Mapping[str, Callable[[random.Random], Case]] = {
    "graph": _graph,
    "cluster": _cluster,
    "calibration": _calibration,
    "huggingface": _huggingface,
    "plan": _plan_document,
    "pipeline-plan": _joint_document,
    "profile": _profile,
    "text-graph": _text_graph,
    "schedule": _schedule_file,
    "measurements": _measurements,
    "nccl-tests": _nccl,
    "hosts": _hosts,
    "hostfile": _hostfile,
    "environment": _environment,
    "model": _model,
    "options": _options,
    "distribution": _distribution,
}
