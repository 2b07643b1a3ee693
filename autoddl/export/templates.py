"""The fixed parts of an exported OneFlow file: start-up code, training loop and command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from autoddl.pipelines.runtime.load import CUDA_LIBRARIES
from autoddl.pipelines.runtime.model_constants import LEARNING_RATES
from autoddl.pipelines.runtime.samples import text_task
from autoddl.pipelines.runtime.stage.plan import norm_parts

from ..zoo.builtin import BuiltIn, MLPSizes, ResNetSizes, VGGSizes
from .scene import Scene
from .source import literal, value_text

__all__ = ["ENDING", "IMPORTS", "PipelineCalls", "main_text", "startup_text"]

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

#: How a file ends, before the call of `main`.
ENDING = '''def fail(kind: Any, error: Any, trace: Any) -> None:
    """Print an exception and end the process at once; otherwise it would wait for the other ranks at exit."""
    traceback.print_exception(kind, error, trace)
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    sys.excepthook = fail'''

_MAIN = '''@build@


def batch(seed: int, number: int@batch_argument@) -> tuple[np.ndarray, ...]:
    """Return inputs and targets of a micro-batch, the same on every rank; micro-batches are numbered over all steps."""
    rng = np.random.default_rng([seed, number])
@batch@


@main@


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train the annotated model on @what@.")
    parser.add_argument("--steps", type=int, default=@steps@, help="number of training steps (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=@rate@, help="learning rate of the optimizer (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of initial values and data (%(default)s)")
    parser.add_argument("--device", help="type of device, in place of DEVICE")  # read by chosen_backend
@state_options@@data_options@    return parser.parse_args()


@ending@
    main(arguments())'''

_MODEL_BUILD = '''def build(seed: int = 0@argument@) -> Model:
    """Make the model with its initial values."""
    model = Model(@plain@)
    @set_values@
@sums@    return model'''

_MODEL_MAIN = '''def main(options: argparse.Namespace) -> None:
    """Train for the given number of steps."""
    take_device(BACKEND)
@prepare@    model = build(options.seed@plain_argument@)
@check_before@    if options.load:
        with np.load(options.load) as file:
            load_plain_state(model, file)
    optimizer = make_optimizer(model.parameters(), @optimizer@, options.learning_rate)
@scaler@    for step in range(options.steps):
        numbers = range(step * NUM_MICRO_BATCHES, (step + 1) * NUM_MICRO_BATCHES)
        batches = [@selected@batch(options.seed, number@batch_value@)@end@ for number in numbers]
        loss = train_step(model, batches@scale@)
        update_parameters(optimizer, all_parameters(model), RANKS, @scaler_name@)
        if RANKS.rank == 0:
            print(f"step {step + 1}: loss {loss:.6f}", flush=True)
    if options.save:
        state = plain_state(model, ALIASES)
        if RANKS.rank == 0:
            np.savez(options.save, **state)'''

_MODEL_OPTIONS = """\
    parser.add_argument("--load", metavar="STATE.npz", help="file with initial values: a plain model's state_dict")
    parser.add_argument("--save", metavar="STATE.npz", help="write final values to this file, by the plain model's names")
"""

#: The option of models that learn from texts.
_TEXT_OPTION = """\
    parser.add_argument("--text", metavar="FILE", help="train on the bytes of a file, not on random tokens")
"""

_PIPELINE_BUILD = '''def build(seed: int = 0, optimizer: str = @optimizer@, learning_rate: float = @rate@@argument@) -> Pipeline:
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
@set_stages@    return pipeline'''

_PIPELINE_MAIN = '''def main(options: argparse.Namespace) -> None:
    """Train for the given number of steps; each run of the schedule makes one or several steps."""
    take_device(BACKEND)
    num_updates, num_micro_batches = schedule().num_updates, schedule().num_micro_batches
    if options.steps % num_updates:
        raise ValueError(
            f"--steps is {options.steps}, should be a multiple of {num_updates}, the number of updates of the schedule"
        )
@prepare@    pipeline = build(options.seed, @optimizer@, options.learning_rate@plain_argument@)
@check_before@    if options.load:
        load_values(pipeline, options.load)
    for run in range(options.steps // num_updates):
        first = run * num_micro_batches
        losses = pipeline.run(lambda number, first=first: @selected@batch(options.seed, first + number@batch_value@)@end@)
@check@        for step, loss in enumerate(losses.tolist(), run * num_updates + 1):
            if JOB_RANK == 0:
                print(f"step {step}: loss {loss:.6f}", flush=True)
    if options.save:
        save_values(pipeline, options.save)'''

_PIPELINE_OPTIONS = """\
    parser.add_argument(
        "--load", metavar="STATE.npz", nargs="+", default=[], help="files with initial values: a plain model's state_dict"
    )
    parser.add_argument("--save", metavar="NAME", help="write final values to NAME.stageN.npz, by the plain model's names")
"""


def startup_text(num_ranks: int) -> str:
    """Return the statements before the import of OneFlow: check the number of ranks, load shared libraries."""
    libraries = "\n".join(f'        "{library}",' for library in CUDA_LIBRARIES)
    return _STARTUP.replace("@ranks@", str(num_ranks)).replace("@libraries@", libraries)


@dataclass(frozen=True)
class PipelineCalls:
    """What the training functions of a file with a pipeline depend on.

    Attributes:
        stages: names of the classes of the stages.
        num_updates: number of updates of the schedule.
        has_shared_weights: whether several stages share a weight.
        divides_parameters: whether the ranks of a stage divide parameters.
        norms: how ranks divide the samples of each batch norm, by path.
    """

    stages: tuple[str, ...]
    num_updates: int
    has_shared_weights: bool
    divides_parameters: bool
    norms: Mapping[str, tuple[int, int]]


def main_text(scene: Scene, model: str, pipeline: PipelineCalls | None = None) -> str:
    """Return the functions of a file that make the model, make data and train.

    Args:
        scene: the model, or any stage of it.
        model: ``FILE.py:FUNCTION`` that makes the plain model; empty if the model is a built-in one.
        pipeline: the pipeline; None if the plan has one stage.
    """
    optimizer = scene.workload.optimizer
    values = {
        "argument": "",
        "batch_argument": "",
        "batch_value": "",
        "check": "",
        "check_before": "",
        "data_options": "",
        "end": "",
        "ending": ENDING,
        "optimizer": literal(optimizer),
        "plain": "",
        "plain_argument": "",
        "prepare": "",
        **(_SCALED_VALUES if scene.workload.types.scales_losses else _UNSCALED_VALUES),
        "rate": str(LEARNING_RATES[optimizer]),
        "selected": "",
        "set_values": "initialize(model, seed)",
        "sums": "    sum_together(model, BUCKET_BYTES)\n" if scene.workload.bucket_bytes else "",
        **(_pipeline_values(pipeline) if pipeline else _MODEL_VALUES),
        **(_user_values(model, pipeline, scene) if scene.built_in is None else _built_in_values(scene.built_in)),
    }
    parts = {name: _filled(values[name], values) for name in ("build", "main")}
    return _filled(_MAIN, {**values, **parts})


#: Values of the placeholders of the training loop, with and without a scale of the loss.
_SCALED_VALUES = {
    "scaler": "    scaler = LossScaler()\n",
    "scaler_name": "scaler",
    "scale": ", scaler.scale",
}
_UNSCALED_VALUES = {"scaler": "", "scaler_name": "None", "scale": ""}
#: Values of the placeholders of a file without a pipeline.
_MODEL_VALUES = {"build": _MODEL_BUILD, "main": _MODEL_MAIN, "state_options": _MODEL_OPTIONS, "steps": "10"}


def _pipeline_values(pipeline: PipelineCalls) -> dict[str, str]:
    """Return the values of the placeholders of a file with a pipeline."""
    return {
        "build": _PIPELINE_BUILD,
        "main": _PIPELINE_MAIN,
        "state_options": _PIPELINE_OPTIONS,
        "stages": f"[{', '.join(pipeline.stages)}]",
        "shared": "shared_weights()" if pipeline.has_shared_weights else "[]",
        "set_stages": "    for replica in pipeline.replicas.values():\n        initialize(replica.module, seed)\n"
        + ("        replica.weights.renew()\n" if pipeline.divides_parameters else ""),
        "steps": str(10 if pipeline.num_updates == 1 else 2 * pipeline.num_updates),
    }


def _filled(text: str, values: Mapping[str, str]) -> str:
    """Replace each placeholder ``@name@`` of a text by its value."""
    return re.sub(r"@(\w+)@", lambda match: values[match[1]], text)


def _user_values(model: str, pipeline: PipelineCalls | None, scene: Scene) -> dict[str, str]:
    """Return the values of placeholders for a user's model.

    A pipeline compares its first loss with the plain model's: a comparison beforehand would need another run of the schedule.

    Args:
        model: ``FILE.py:FUNCTION`` that makes the plain model.
        pipeline: the pipeline; None if the plan has one stage.
        scene: the model, or any stage of it.
    """
    file, _, function = model.rpartition(":")
    is_traced = scene.is_traced
    # In the results of other operators the samples are the first dimension.
    places = {stream: place for stream, place in scene.random_places.items() if place != (0, 1)}
    unused = scene.model.unused
    values = {
        "argument": ", plain: Any = None",
        "batch_argument": ", examples: Any = ()",
        "batch_value": ", examples",
        "batch": "    return tuple(like(example, MICRO_BATCH, rng) for example in examples)",
        "end": "" if is_traced else ")",
        "plain": "plain",
        "plain_argument": ", plain",
        "prepare": f"    flow.manual_seed(options.seed)\n    plain, examples = plain_model({literal(file)}, {literal(function)})\n",
        "selected": "" if is_traced else "inputs_and_targets(",
        "what": "random data like its examples",
    }
    whole = ", reads_all=True" if is_traced else ""
    drawing = f"lambda steps: seeded_random(plain, {value_text(places)}, steps)"
    norms = norm_parts(scene.model, scene.strategies) if pipeline is None else pipeline.norms
    grouping = f"    group_norms(plain, {value_text(norms)}, MICRO_BATCH{'' if pipeline is None else ' // SLOTS'})\n"
    # In evaluation, batch norms of CPU ranks are alike, but OneFlow runs synchronised ones on GPUs only.
    before = grouping if norms and (pipeline or scene.draws_noise or scene.has_synchronised_norms) else ""
    # Statistics of batch norms depend on how samples are split, so those models are compared in evaluation, unless they draw there.
    if scene.draws_noise or (scene.is_replayed and not norms):
        whole += f", drawing={drawing}, in_training=True" if scene.draws_numbers else ", in_training=True"
    # GPUs draw the dropouts of layers with generators of their own.
    condition = "    if BACKEND.device != GPU:\n    " if "drawing" in whole and scene.has_dropouts else ""
    if pipeline is None:
        return {
            **values,
            "check_before": f"{before}{condition}    check_against_plain(model, plain, batch(options.seed, 0, examples){whole})\n",
            "set_values": f"take_plain_values(model, plain{f', unused={value_text(unused)}' if unused else ''})",
        }
    options = f", {drawing}, SLOTS" if scene.draws_numbers else ""
    unlike = f"options.load{' or BACKEND.device == GPU' if scene.has_dropouts else ''}"
    samples = "[batch(options.seed, number, examples) for number in range(schedule().update_period)]"
    return {
        **values,
        "stages": f"[lambda stage=stage: stage_of_plain(stage, plain) for stage in ({', '.join(pipeline.stages)})]",
        "set_stages": "",
        "check_before": f"{before}    samples = {samples}\n"
        f"    expected = None if {unlike} else plain_loss(plain, samples{options})\n",
        "check": "        if not run and expected is not None:\n            check_loss(float(losses[0]), expected)\n",
    }


def _built_in_values(built_in: BuiltIn) -> dict[str, str]:
    """Return the values of placeholders for the data of a built-in model; texts are learnt as by `autoddl train`."""
    sizes = built_in.sizes
    if isinstance(sizes, MLPSizes):
        return {
            "batch": f"    return random_rows(rng, ({sizes.widths[0]}, {sizes.widths[-1]}), MICRO_BATCH)",
            "what": "random rows",
        }
    if isinstance(sizes, (VGGSizes, ResNetSizes)):
        return {
            "batch": f"    return random_images(rng, (3, {sizes.image}, {sizes.image}), {sizes.classes}, MICRO_BATCH)",
            "what": "random images",
        }
    rows, vocabulary, task = sizes.sequence, sizes.vocabulary, text_task(built_in.family)
    return {
        "batch_argument": ', text: bytes = b""',
        "batch_value": ", text",
        "batch": f"    if text:\n        return {task.samples.__name__}(rng, np.frombuffer(text, np.uint8), MICRO_BATCH, {rows})\n"
        f"    return random_tokens(rng, {vocabulary}, MICRO_BATCH, {rows})",
        "prepare": f'    text = read_text(options.text, {rows}, {vocabulary}, {task.num_tokens}) if options.text else b""\n',
        "what": "random tokens, or a text",
        "data_options": _TEXT_OPTION,
    }
