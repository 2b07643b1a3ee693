"""The fixed parts of an exported OneFlow file: its docstring, start-up code, training loop and command line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from autoddl.pipelines.runtime.load import CUDA_LIBRARIES

from ..zoo.builtin import MLPSizes, VGGSizes
from .scene import Scene
from .source import literal

__all__ = ["DOCSTRING", "IMPORTS", "PIPELINE_DOCSTRING", "main_text", "pipeline_main_text", "startup_text"]

DOCSTRING = '''"""A OneFlow model annotated with an AutoDDL plan, and its training loop. Written by `autoddl export`.

The file needs OneFlow 0.9.0 and numpy, but not AutoDDL. Its parts are marked by lines `# ====`:

    Library: ranks and mesh axes    the classes `Axis` and `Ranks`, which the next part uses
    The plan                        ranks, mesh axes and batch size of this plan
    The model                       a class for each kind of repeated block, and the class `Model`
    The library                     functions and classes that the model calls, copied from AutoDDL's runtime
    Main                            data, training loop and command line

Parameters are OneFlow global tensors with the plan's placements and SBP signatures. Each rank computes with its own blocks of
them. Every communication step is a statement, with its predicted price as a comment: the time, and the bytes that each rank
sends. The backward pass runs the adjoint of each step, at the same price. Activations have the shape (samples, rows, features);
samples are split over the p0 ranks, features over the other ranks.

The file can be edited like any model. Start it with

    python3 -m oneflow.distributed.launch --nproc_per_node RANKS_OF_A_NODE THIS_FILE.py --steps 10

or with any launcher that sets MASTER_ADDR, MASTER_PORT, WORLD_SIZE, RANK and LOCAL_RANK.
"""'''

PIPELINE_DOCSTRING = '''"""A OneFlow pipeline annotated with an AutoDDL plan, and its training loop. Written by `autoddl export`.

The file needs OneFlow 0.9.0 and numpy, but not AutoDDL. Its parts are marked by lines `# ====`:

    Library: ranks and mesh axes    the classes `Axis` and `Ranks`, which the next part uses
    The plan                        workers, mesh axes and micro-batch size of this plan
    The model                       a class for each kind of repeated block, and a class for each stage
    The schedule                    placement of the stages, tensors between them, and the instructions of each worker
    The library                     functions and classes that these parts call, copied from AutoDDL's runtime
    Main                            data, training loop and command line

The parameters of a stage are OneFlow global tensors on the ranks of its worker, with the plan's SBP signatures. Each rank
computes with its own blocks of them. Every communication step inside a stage is a statement, with its predicted price as a
comment: the time, and the bytes that each rank sends. The backward pass runs the adjoint of each step, at the same price.
Activations have the shape (samples, rows, features); samples are split over the p0 ranks of a stage, features over its other
ranks. INSTRUCTIONS lists the tasks and messages of each worker, in order.

The file can be edited like any model. Start it with

    python3 -m oneflow.distributed.launch --nproc_per_node RANKS_OF_A_NODE THIS_FILE.py --steps 10

or with any launcher that sets MASTER_ADDR, MASTER_PORT, WORLD_SIZE, RANK and LOCAL_RANK.
"""'''

#: Imports of the standard library that the texts of this module need.
IMPORTS = (
    *("import argparse", "import ctypes", "import importlib.util", "import os", "import sys", "import traceback"),
    *("from pathlib import Path", "from typing import Any"),
)

_STARTUP = """if int(os.environ.get("WORLD_SIZE", "1")) != @ranks@:
    raise SystemExit(f"this model is for @ranks@ ranks, WORLD_SIZE is {os.environ.get('WORLD_SIZE', '1')}")
# OneFlow 0.9.0 needs cuBLAS and cuDNN even on machines without a GPU. The dynamic linker does not search the folders of
# NVIDIA's Python packages, so their libraries are loaded here, before OneFlow is imported.
if (spec := importlib.util.find_spec("nvidia")) is not None:
    os.environ.setdefault("GLOG_minloglevel", "3")
    for library in (
@libraries@
    ):
        for folder in map(Path, spec.submodule_search_locations or []):
            if (folder / library).exists():
                ctypes.CDLL(str(folder / library), mode=ctypes.RTLD_GLOBAL)"""

_MAIN = '''def build(seed: int = 0@argument@) -> Model:
    """Make the model with its initial values."""
@build@
    return model


def batch(seed: int, step: int@batch_argument@) -> tuple[np.ndarray, ...]:
    """Return the inputs and targets of a step, the same on every rank."""
    rng = np.random.default_rng([seed, step])
@batch@


def main(options: argparse.Namespace) -> None:
    """Train for the given number of steps."""
@prepare@
    if options.load:
        with np.load(options.load) as file:
            load_plain_state(model, file)
    optimizer = optimizer_of(model, @optimizer@, options.learning_rate)
    for step in range(options.steps):
        inputs, *_, targets = batch(options.seed, step@batch_value@)
        loss = train_step(model, inputs, targets, MICRO_BATCH)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)  # accumulating into gradients of zero would communicate
        if RANKS.rank == 0:
            print(f"step {step + 1}: loss {loss:.6f}", flush=True)
    if options.save:
        state = plain_state(model, ALIASES)
        if RANKS.rank == 0:
            np.savez(options.save, **state)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train the annotated model on @what@.")
    parser.add_argument("--steps", type=int, default=10, help="number of training steps (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=@rate@, help="learning rate of the optimizer (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of initial values and data (%(default)s)")
    parser.add_argument("--load", metavar="STATE.npz", help="file with initial values: a plain model's state_dict")
    parser.add_argument("--save", metavar="STATE.npz", help="write final values to this file, by the plain model's names")
@options@    return parser.parse_args()


@end@'''

_END = '''def fail(kind: Any, error: Any, trace: Any) -> None:
    """Print an exception and end the process at once; otherwise it would wait for the other ranks at exit."""
    traceback.print_exception(kind, error, trace)
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    sys.excepthook = fail
    main(arguments())'''

_PIPELINE_MAIN = '''def build(seed: int = 0, optimizer: str = @optimizer@, learning_rate: float = @rate@@argument@) -> Pipeline:
    """Make the stages of this rank's worker, with their initial values."""
    pipeline = Pipeline(
        stages=@stages@,
        instructions=INSTRUCTIONS,
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
    """Return inputs and targets of a micro-batch, the same on every rank; micro-batches are numbered over all steps."""
    rng = np.random.default_rng([seed, number])
@batch@


def main(options: argparse.Namespace) -> None:
    """Train for the given number of steps; each run of the schedule makes one or several steps."""
    num_updates, num_micro_batches = schedule().num_updates, schedule().num_micro_batches
    if options.steps % num_updates:
        raise ValueError(
            f"--steps is {options.steps}, should be a multiple of {num_updates}, the number of updates of the schedule"
        )
@prepare@
    if options.load:
        load_values(pipeline, options.load)
    for run in range(options.steps // num_updates):
        first = run * num_micro_batches
        losses = pipeline.run(lambda number, first=first: batch(options.seed, first + number@batch_value@)@ends@)
@check@        for step, loss in enumerate(losses.tolist(), run * num_updates + 1):
            if JOB_RANK == 0:
                print(f"step {step}: loss {loss:.6f}", flush=True)
    if options.save:
        save_values(pipeline, options.save)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train the annotated model on @what@.")
    parser.add_argument("--steps", type=int, default=@steps@, help="number of training steps (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=@rate@, help="learning rate of the optimizer (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of initial values and data (%(default)s)")
    parser.add_argument(
        "--load", metavar="STATE.npz", nargs="+", default=[], help="files with initial values: a plain model's state_dict"
    )
    parser.add_argument("--save", metavar="NAME", help="write final values to NAME.stageN.npz, by the plain model's names")
@options@    return parser.parse_args()


@end@'''


def startup_text(num_ranks: int) -> str:
    """Return the statements before the import of OneFlow: check the number of ranks, load shared libraries."""
    libraries = "\n".join(f'        "{library}",' for library in CUDA_LIBRARIES)
    return _STARTUP.replace("@ranks@", str(num_ranks)).replace("@libraries@", libraries)


def main_text(scene: Scene, model: str) -> str:
    """Return the training functions of a file without a pipeline.

    Args:
        scene: the file.
        model: ``FILE.py:FUNCTION`` that makes the plain model; empty if the model is a built-in one.
    """
    made = "    model = build(options.seed)"
    values = {
        "argument": "",
        "batch_argument": "",
        "batch_value": "",
        "build": "    model = Model()\n    initialize(model, seed)",
        "prepare": made,
        "options": "",
        **_training_values(scene),
        **(_user_values(model) if scene.built_in is None else _built_in_values(scene, "BATCH", made)),
    }
    return _filled(_MAIN, values)


def pipeline_main_text(scene: Scene, stages: Sequence[str], num_updates: int, has_shared: bool, model: str) -> str:
    """Return the training functions of a file with a pipeline.

    Args:
        scene: any stage of the file.
        stages: names of the classes of the stages.
        num_updates: number of updates of the schedule.
        has_shared: whether several stages share a weight.
        model: ``FILE.py:FUNCTION`` that makes the plain model; empty if the model is a built-in one.
    """
    steps = 10 if num_updates == 1 else 2 * num_updates
    made = f"    pipeline = build(options.seed, {_training_values(scene)['optimizer']}, options.learning_rate)"
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
        **_training_values(scene),
    }
    if scene.built_in is None:
        values.update(_user_stage_values(model, stages, made))
    else:
        values.update(_built_in_values(scene, "MICRO_BATCH", made))
    return _filled(_PIPELINE_MAIN, values)


def _training_values(scene: Scene) -> dict[str, str]:
    """Return the values of the placeholders that all files have."""
    return {
        "optimizer": literal(scene.workload.optimizer),
        "rate": "0.001" if scene.workload.optimizer == "adam" else "0.01",
        "end": _END,
    }


def _filled(text: str, values: Mapping[str, str]) -> str:
    """Replace each placeholder ``@name@`` of a text by its value."""
    return re.sub(r"@(\w+)@", lambda match: values[match[1]], text)


def _user_values(model: str) -> dict[str, str]:
    """Return the values of placeholders for a user's model without a pipeline."""
    made = "    model = build(options.seed, plain)\n    check_against_plain(model, plain, batch(options.seed, 0, examples))"
    return {
        **_user_data_values(model, "BATCH", made),
        "build": "    model = Model(plain)\n    take_plain_values(model, plain)",
    }


def _user_stage_values(model: str, stages: Sequence[str], made: str) -> dict[str, str]:
    """Return the values of placeholders for a user's model in a pipeline.

    The training compares its first loss with the plain model's: a comparison beforehand would need another run of the schedule.
    """
    first = "[batch(options.seed, number, examples) for number in range(schedule().update_period)]"
    expected = f"    expected = None if options.load else plain_loss(plain, {first})"
    return {
        **_user_data_values(model, "MICRO_BATCH", f"{made.removesuffix(')')}, plain)\n{expected}"),
        "build": "take_plain_values(replica.module, plain, is_whole=False)",
        "stages": f"[lambda stage=stage: stage(plain) for stage in ({', '.join(stages)})]",
        "ends": "[:: len(examples) - 1]",
        "check": "        if not run and expected is not None:\n            check_loss(float(losses[0]), expected)\n",
    }


def _user_data_values(model: str, size: str, made: str) -> dict[str, str]:
    """Return the values of placeholders for the data of a user's model.

    Args:
        model: ``FILE.py:FUNCTION`` that makes the plain model.
        size: expression of the number of samples that ``batch`` returns.
        made: statements that make the annotated model from the variable ``plain``.
    """
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


def _built_in_values(scene: Scene, size: str, made: str) -> dict[str, str]:
    """Return the values of placeholders for the data of a built-in model.

    Args:
        scene: the file.
        size: expression of the number of samples that ``batch`` returns.
        made: the statement that makes the annotated model.
    """
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
    # A pipeline gets the data of `autoddl train`, so that the losses can be compared: BERT predicts masked bytes.
    text_function = "masked_bytes" if scene.is_stage and scene.built_in.family == "bert" else "following_bytes"
    option = (
        '    parser.add_argument("--text", metavar="FILE", help="train on the bytes of a file, not on random tokens")\n'
    )
    return {
        "batch_argument": ', text: bytes = b""',
        "batch_value": ", text",
        "batch": f"    if text:\n        return {text_function}(rng, np.frombuffer(text, np.uint8), {size}, {rows})\n"
        f"    return random_tokens(rng, {vocabulary}, {size}, {rows})",
        "prepare": f'    text = read_text(options.text, {rows}, {vocabulary}) if options.text else b""\n{made}',
        "what": "random tokens, or a text",
        "options": option,
    }
