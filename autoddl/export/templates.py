"""The parts of a OneFlow file that are the same for all: how it starts, and its main function."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ..zoo.builtin import MLPSizes, VGGSizes
from .scene import Scene
from .source import literal

__all__ = ["DOCSTRING", "IMPORTS", "PIPELINE_DOCSTRING", "loading", "main", "pipeline_main"]

DOCSTRING = '''"""An annotated OneFlow model and a training loop, written by `autoddl export`; needs OneFlow 0.9.0 alone.

Parameters are OneFlow global tensors with the plan's placements and SBP signatures; layers run on each rank's part, and
every step of communication stands where it happens, with its predicted price: time, and bytes sent by each rank. The
backward pass runs the adjoint of each step, at the same price. Activations are (samples, rows, features): samples split
over p0, features over the other ranks. What the model calls stands behind it as `The library`, with `Ranks` and `Axis` before
it: that is AutoDDL's runtime in its own words. Edit the file like any model; start it as

    python3 -m oneflow.distributed.launch --nproc_per_node RANKS_OF_A_NODE THIS_FILE.py --steps 10

or under any launcher that sets MASTER_ADDR, MASTER_PORT, WORLD_SIZE, RANK and LOCAL_RANK.
"""'''

PIPELINE_DOCSTRING = '''"""An annotated OneFlow model in a pipeline, written by `autoddl export`; needs OneFlow 0.9.0 alone.

Each stage is a class. Its parameters are OneFlow global tensors on the ranks of its worker, with the plan's SBP signatures; its
layers run on each rank's part, and every step of communication stands where it happens, with its predicted price: time, and
bytes sent by each rank. The backward pass runs the adjoint of each step, at the same price. Activations are (samples, rows,
features): samples split over p0, features over the other ranks of the stage. What each worker does in which order, and what
it sends to others, is data: INSTRUCTIONS. What all this calls stands behind it as `The library`, with `Ranks` and `Axis` before
it: that is AutoDDL's runtime in its own words. Edit the file like any model; start it as

    python3 -m oneflow.distributed.launch --nproc_per_node RANKS_OF_A_NODE THIS_FILE.py --steps 10

or under any launcher that sets MASTER_ADDR, MASTER_PORT, WORLD_SIZE, RANK and LOCAL_RANK.
"""'''

#: What the text here needs of the standard library.
IMPORTS = (
    *("import argparse", "import ctypes", "import importlib.util", "import os", "import sys", "import traceback"),
    *("from pathlib import Path", "from typing import Any"),
)

_LOADING = """if int(os.environ.get("WORLD_SIZE", "1")) != @ranks@:
    raise SystemExit(f"this model is for @ranks@ ranks, WORLD_SIZE is {os.environ.get('WORLD_SIZE', '1')}")
# OneFlow 0.9.0 needs cuBLAS and cuDNN on machines without a GPU too, and the linker does not look into NVIDIA's wheels.
if (spec := importlib.util.find_spec("nvidia")) is not None:
    os.environ.setdefault("GLOG_minloglevel", "3")
    for library in (
        "cublas/lib/libcublasLt.so.11",
        "cublas/lib/libcublas.so.11",
        "cudnn/lib/libcudnn.so.8",
        "cudnn/lib/libcudnn_ops_infer.so.8",
        "cudnn/lib/libcudnn_ops_train.so.8",
        "cudnn/lib/libcudnn_cnn_infer.so.8",
        "cudnn/lib/libcudnn_cnn_train.so.8",
    ):
        for folder in map(Path, spec.submodule_search_locations or []):
            if (folder / library).exists():
                ctypes.CDLL(str(folder / library), mode=ctypes.RTLD_GLOBAL)"""

_MAIN = '''def build(seed: int = 0@argument@) -> Model:
    """The model with its initial values."""
@build@
    return model


def batch(seed: int, step: int@batch_argument@) -> tuple[np.ndarray, ...]:
    """The inputs and targets of a step, the same on every rank."""
    rng = np.random.default_rng([seed, step])
@batch@


def main(options: argparse.Namespace) -> None:
    """Train some steps."""
@prepare@
    if options.load:
        with np.load(options.load) as file:
            load_plain_state(model, file)
    optimizer = optimizer_of(model, @optimizer@, options.learning_rate)
    for step in range(options.steps):
        inputs, *_, targets = batch(options.seed, step@batch_value@)
        loss = train_step(model, inputs, targets, MICRO_BATCH)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)  # adding to gradients of zero would send bytes
        if RANKS.rank == 0:
            print(f"step {step + 1}: loss {loss:.6f}", flush=True)
    if options.save:
        state = plain_state(model, ALIASES)
        if RANKS.rank == 0:
            np.savez(options.save, **state)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train the annotated model on @what@.")
    parser.add_argument("--steps", type=int, default=10, help="(%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=@rate@, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of initial values and data (%(default)s)")
    parser.add_argument("--load", metavar="STATE.npz", help="begin with the values of a plain model's state_dict")
    parser.add_argument("--save", metavar="STATE.npz", help="write them, by the plain model's names, at the end")
@options@    return parser.parse_args()


@end@'''

_END = '''def fail(kind: Any, error: Any, trace: Any) -> None:
    """End the process at once: a rank that only raises would wait for the others for ever."""
    traceback.print_exception(kind, error, trace)
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    sys.excepthook = fail
    main(arguments())'''

_PIPELINE_MAIN = '''def build(seed: int = 0, optimizer: str = @optimizer@, learning_rate: float = @rate@@argument@) -> Pipeline:
    """The stages of this rank's worker with their initial values."""
    pipeline = Pipeline(
        stages=@stages@,
        words=INSTRUCTIONS,
        schedule=schedule(),
        micro_batch=MICRO_BATCH,
        slots_per_micro_batch=SLOTS,
        boundaries=boundaries(),
        joint_stages=JOINT_STAGES,
        shared=@shared@,
        optimizer=optimizer,
        learning_rate=learning_rate,
    )
    for replica in pipeline.replicas.values():
        @build@
    return pipeline


def batch(seed: int, number: int@batch_argument@) -> tuple[np.ndarray, ...]:
    """The inputs and targets of a micro-batch, counted over all steps, the same on every rank."""
    rng = np.random.default_rng([seed, number])
@batch@


def main(options: argparse.Namespace) -> None:
    """Train some steps: run the schedule, again and again."""
    updates, micro_batches = schedule().num_updates, schedule().num_micro_batches
    if options.steps % updates:
        raise ValueError(f"--steps is {options.steps}, should be a multiple of {updates}, the updates of the schedule")
@prepare@
    if options.load:
        load_values(pipeline, options.load)
    for run in range(options.steps // updates):
        first = run * micro_batches
        losses = pipeline.run(lambda number, first=first: batch(options.seed, first + number@batch_value@)@ends@)
@check@        for step, loss in enumerate(losses.tolist(), run * updates + 1):
            if JOB_RANK == 0:
                print(f"step {step}: loss {loss:.6f}", flush=True)
    if options.save:
        save_values(pipeline, options.save)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train the annotated model on @what@.")
    parser.add_argument("--steps", type=int, default=@steps@, help="(%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=@rate@, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of initial values and data (%(default)s)")
    parser.add_argument(
        "--load", metavar="STATE.npz", nargs="+", default=[], help="begin with values of a plain model's state_dict"
    )
    parser.add_argument("--save", metavar="NAME", help="write them, by the plain model's names, to NAME.stageN.npz at the end")
@options@    return parser.parse_args()


@end@'''


def loading(num_ranks: int) -> str:
    """The number of ranks, checked, and what has to be loaded before OneFlow."""
    return _LOADING.replace("@ranks@", str(num_ranks))


def main(scene: Scene, model: str) -> str:
    """The functions that train; ``model`` is the user's FILE.py:FUNCTION, or empty."""
    made = "    model = build(options.seed)"
    values = {
        "argument": "",
        "batch_argument": "",
        "batch_value": "",
        "build": "    model = Model()\n    initialize(model, seed)",
        "prepare": made,
        "options": "",
        **_training(scene),
        **(_users(model) if scene.built_in is None else _built_in(scene, "BATCH", made)),
    }
    return _filled(_MAIN, values)


def pipeline_main(scene: Scene, stages: Sequence[str], num_updates: int, has_shared: bool, model: str) -> str:
    """The same for a pipeline; ``num_updates`` are those of its schedule."""
    steps = 10 if num_updates == 1 else 2 * num_updates
    made = f"    pipeline = build(options.seed, {_training(scene)['optimizer']}, options.learning_rate)"
    values = {
        "argument": "",
        "batch_argument": "",
        "batch_value": "",
        "build": "initialize(replica.module, seed)",
        "prepare": made,
        "check": "",
        "ends": "",
        "options": "",
        "stages": f"[{', '.join(stages)}]",
        "shared": "shared_weights()" if has_shared else "[]",
        "steps": str(steps),
        **_training(scene),
        **(_users_stages(model, stages, made) if scene.built_in is None else _built_in(scene, "MICRO_BATCH", made)),
    }
    return _filled(_PIPELINE_MAIN, values)


def _training(scene: Scene) -> dict[str, str]:
    return {
        "optimizer": literal(scene.workload.optimizer),
        "rate": "0.001" if scene.workload.optimizer == "adam" else "0.01",
        "end": _END,
    }


def _filled(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"@(\w+)@", lambda match: values[match[1]], text)


def _users(model: str) -> dict[str, str]:
    return {
        **_users_data(
            model,
            "BATCH",
            "    model = build(options.seed, plain)\n    check_against_plain(model, plain, batch(options.seed, 0, examples))",
        ),
        "build": "    model = Model(plain)\n    take_plain_values(model, plain)",
        "check": "    check_against_plain(model, plain, batch(options.seed, 0, examples))\n",
    }


def _users_stages(model: str, stages: Sequence[str], made: str) -> dict[str, str]:
    """Of a pipeline; its first loss is compared with the plain model's, in the place of a pass of its own."""
    first = "[batch(options.seed, number, examples) for number in range(schedule().update_period)]"
    expected = f"    expected = None if options.load else plain_loss(plain, {first})"
    return {
        **_users_data(model, "MICRO_BATCH", f"{made.removesuffix(')')}, plain)\n{expected}"),
        "build": "take_plain_values(replica.module, plain, is_whole=False)",
        "stages": f"[lambda stage=stage: stage(plain) for stage in ({', '.join(stages)})]",
        "ends": "[:: len(examples) - 1]",
        "check": "        if not run and expected is not None:\n            check_loss(float(losses[0]), expected)\n",
    }


def _users_data(model: str, size: str, made: str) -> dict[str, str]:
    """A user's plain model, what ``made`` makes of it, and ``size`` samples of data for it."""
    file, _, function = model.rpartition(":")
    return {
        "argument": ", plain: Any = None",
        "batch_argument": ", examples: Any = ()",
        "batch_value": ", examples",
        "prepare": f"    flow.manual_seed(options.seed)\n    plain, examples = plain_model({literal(file)}, {literal(function)})\n"
        f"{made}",
        "batch": f"    return tuple(like(example, {size}, rng) for example in examples)",
        "what": "random data like its examples",
    }


def _built_in(scene: Scene, size: str, made: str) -> dict[str, str]:
    """Data of a built-in model, ``size`` samples of it; ``made`` is the statement that makes the model."""
    assert scene.built_in is not None
    sizes = scene.built_in.sizes
    if isinstance(sizes, MLPSizes):
        return {
            "batch": f"    return random_rows(rng, ({sizes.widths[0]}, {sizes.widths[-1]}), {size})",
            "what": "random rows",
        }
    if isinstance(sizes, VGGSizes):
        return {
            "batch": f"    return random_images(rng, (3, {sizes.image}, {sizes.image}), {sizes.classes}, {size})",
            "what": "random images",
        }
    rows, vocabulary = sizes.sequence, sizes.vocabulary
    # Pipelines are compared with `autoddl train`, which masks what BERT is to guess.
    of_text = "masked_bytes" if scene.is_stage and scene.built_in.family == "bert" else "following_bytes"
    option = '    parser.add_argument("--text", metavar="FILE", help="train on its bytes in place of random tokens")\n'
    return {
        "batch_argument": ', text: bytes = b""',
        "batch_value": ", text",
        "batch": f"    if text:\n        return {of_text}(rng, np.frombuffer(text, np.uint8), {size}, {rows})\n"
        f"    return random_tokens(rng, {vocabulary}, {size}, {rows})",
        "prepare": f'    text = read_text(options.text, {rows}, {vocabulary}) if options.text else b""\n{made}',
        "what": "random tokens, or a text",
        "options": option,
    }
