"""The parts of a OneFlow file that are the same for all: how it starts, and its main function."""

from __future__ import annotations

import re

from ..models.builtin import Perceptron, Pictures
from .scene import Scene
from .source import literal

__all__ = ["DOCSTRING", "IMPORTS", "loading", "main"]

DOCSTRING = '''"""An annotated OneFlow model and a training loop, written by `autoddl export`; needs OneFlow 0.9.0 alone.

Parameters are OneFlow global tensors with the plan's placements and SBP signatures; layers run on each rank's part, and
every step of communication stands where it happens, with its predicted price: time, and bytes sent by each rank. The
backward pass runs the adjoint of each step, at the same price. Activations are (samples, rows, features): samples split
over p0, features over the other ranks. Edit it like any model; start it as

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


def batch(seed: int, step: int@batch_argument@) -> tuple[np.ndarray, np.ndarray]:
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
        inputs, targets = batch(options.seed, step@batch_value@)
        loss = train_step(model, inputs, targets, MICRO_BATCH)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)  # adding to gradients of zero would send bytes
        if RANK == 0:
            print(f"step {step + 1}: loss {loss:.6f}", flush=True)
    if options.save:
        state = plain_state(model, ALIASES)
        if RANK == 0:
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


def fail(kind: Any, error: Any, trace: Any) -> None:
    """End the process at once: a rank that only raises would wait for the others for ever."""
    traceback.print_exception(kind, error, trace)
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    sys.excepthook = fail
    main(arguments())'''


def loading(num_ranks: int) -> str:
    """The number of ranks, checked, and what has to be loaded before OneFlow."""
    return _LOADING.replace("@ranks@", str(num_ranks))


def main(scene: Scene, model: str) -> str:
    """The functions that train; ``model`` is the user's FILE.py:FUNCTION, or empty."""
    values = {
        "argument": "",
        "batch_argument": "",
        "batch_value": "",
        "build": "    model = Model()\n    initialize(model, seed)",
        "prepare": "    model = build(options.seed)",
        "optimizer": literal(scene.workload.optimizer),
        "rate": "0.001" if scene.workload.optimizer == "adam" else "0.01",
        "options": "",
        **(_users(model) if scene.built_in is None else _built_in(scene)),
    }
    return re.sub(r"@(\w+)@", lambda match: values[match[1]], _MAIN)


def _users(model: str) -> dict[str, str]:
    file, _, function = model.rpartition(":")
    return {
        "argument": ", plain: Any = None",
        "batch_argument": ", examples: Any = ()",
        "batch_value": ", examples",
        "build": "    model = Model(plain)\n    take_plain_values(model, plain)",
        "prepare": f"    flow.manual_seed(options.seed)\n    plain, examples = plain_model({literal(file)}, {literal(function)})\n"
        "    model = build(options.seed, plain)\n"
        "    check_against_plain(model, plain, [like(example, BATCH, np.random.default_rng(0)) for example in examples])",
        "batch": "    first, *_, last = [like(example, BATCH, rng) for example in examples]\n    return first, last",
        "what": "random data like its examples",
    }


def _built_in(scene: Scene) -> dict[str, str]:
    assert scene.built_in is not None
    sizes = scene.built_in.sizes
    if isinstance(sizes, Perceptron):
        return {
            "batch": f"    return random_rows(rng, ({sizes.widths[0]}, {sizes.widths[-1]}), BATCH)",
            "what": "random rows",
        }
    if isinstance(sizes, Pictures):
        return {
            "batch": f"    return random_images(rng, (3, {sizes.image}, {sizes.image}), {sizes.classes}, BATCH)",
            "what": "random images",
        }
    rows, vocabulary = sizes.sequence, sizes.vocabulary
    option = '    parser.add_argument("--text", metavar="FILE", help="train on its bytes in place of random tokens")\n'
    return {
        "batch_argument": ', text: bytes = b""',
        "batch_value": ", text",
        "batch": f"    if text:\n        return tokens_of_text(rng, text, BATCH, {rows})\n"
        f"    return random_tokens(rng, {vocabulary}, BATCH, {rows})",
        "prepare": f'    text = read_text(options.text, {rows}, {vocabulary}) if options.text else b""\n'
        "    model = build(options.seed)",
        "what": "random tokens, or a text",
        "options": option,
    }
